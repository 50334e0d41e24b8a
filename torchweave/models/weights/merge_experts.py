"""Merge a checkpoint's separate expert tensors while reading them, restricted to this rank's part.

Most MoE checkpoints have `experts.7.gate_proj.weight`, `experts.7.up_proj.weight` and `experts.7.down_proj.weight`;
transformers' models have `experts.gate_up_proj` `[E, 2 I, K]` and `experts.down_proj` `[E, K, I]`. transformers' conversion
defines the mapping; conversions beyond stacking and concatenation are left to transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchweave.models.attention import UnsupportedModel
from torchweave.models.weights.read import (
    CheckpointTensor,
    checkpoint_shapes,
    conversions,
    map_tensor_names,
    read_tensors,
    rename,
)
from torchweave.models.weights.shards import TensorShard

_EXPERT = re.compile(r"\.(\d+)\.")
_EXPERT_NAME = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class ExpertMatrix:
    """A matrix of one expert: index `part` among the matrices that are concatenated by rows."""

    expert: int
    part: int


@dataclass
class MergedParameter:
    """Sources of a merged parameter.

    Attributes:
        parts: matrices per expert, concatenated by rows.
        pieces: expert matrix by checkpoint name.
    """

    parts: int
    pieces: dict[str, ExpertMatrix] = field(default_factory=dict)


@dataclass(frozen=True)
class ExpertMergePlan:
    """Mapping of a checkpoint to a model.

    Attributes:
        merged: sources by merged parameter.
        renamed: checkpoint name -> model name of the other tensors.
    """

    merged: dict[str, MergedParameter]
    renamed: dict[str, str]


def plan_expert_merge(model: PreTrainedModel, stored: Mapping[str, CheckpointTensor]) -> ExpertMergePlan | None:
    """The plan for a checkpoint; None if transformers has to convert it."""
    converters, renamings = conversions(model)
    if not all(hasattr(each, "rename_source_key") for each in (*converters, *renamings)):
        return None  # a transformers version with another interface
    used = [each for each in converters if any(each.rename_source_key(rename(renamings, name))[1] for name in stored)]
    if not used or not all(map(_only_stacks, used)):
        return None
    merged: dict[str, MergedParameter] = {}
    plain: dict[str, str] = {}
    for name in stored:
        renamed = rename(renamings, name)
        for converter in used:
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None:
                experts = _EXPERT.findall(renamed[renamed.index(".experts.") :] if ".experts." in renamed else renamed)
                if len(experts) != 1:
                    return None
                part = converter.source_patterns.index(pattern)
                merge = merged.setdefault(target, MergedParameter(len(converter.source_patterns)))
                merge.pieces[name] = ExpertMatrix(int(experts[0]), part)
                break
        else:
            plain[name] = renamed
    # A renaming may hit names that the model has: DeepSeek-V4's of `.norm.` means the compressor's, and not `model.norm`.
    known = map_tensor_names(model, [*merged, *plain.values(), *plain])
    if not all(target in known for target in merged):
        return None
    return ExpertMergePlan(
        {known[target]: merge for target, merge in merged.items()},
        {name: target for name, renamed in plain.items() if (target := known.get(renamed) or known.get(name))},
    )


def _only_stacks(converter: Any) -> bool:
    """Whether a conversion only stacks experts and concatenates the stacks by rows."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    stacked = steps[:1] == [("MergeModulelist", 0)] and len(converter.target_patterns) == 1
    joined = steps[1:] == [("Concatenate", 1)] if len(converter.source_patterns) > 1 else not steps[1:]
    return stacked and joined and all(len(re.findall(r"\*", pattern)) == 1 for pattern in converter.source_patterns)


def check_merges(
    model: PreTrainedModel,
    stored: Mapping[str, CheckpointTensor],
    merge_plan: ExpertMergePlan,
    shards: Mapping[str, TensorShard],
) -> None:
    """Raise `ValueError` if the checkpoint lacks experts or has other shapes than the model."""
    wanted = checkpoint_shapes(model, shards)
    for target, merge in merge_plan.merged.items():
        experts, rows, width = wanted[target]
        expected = {ExpertMatrix(expert, part) for expert in range(experts) for part in range(merge.parts)}
        if missing := expected - set(merge.pieces.values()):
            first = min(missing, key=lambda piece: (piece.expert, piece.part))
            raise ValueError(
                f"The checkpoint lacks {len(missing)} of the {len(expected)} matrices of {target}, such as those of expert "
                f"{first.expert}; check that config.json belongs to these weights."
            )
        for name, piece in merge.pieces.items():
            shape = (rows // merge.parts, width)
            if stored[name].shape != shape or piece not in expected:
                raise ValueError(
                    f"{stored[name].file} has {name} of shape {list(stored[name].shape)}, expected one of {experts} experts of "
                    f"shape {list(shape)}; check that config.json belongs to these weights."
                )


class ExpertMerger:
    """A `TensorAssembler` that merges expert matrices into this rank's parameters."""

    def __init__(self, model: PreTrainedModel, merge_plan: ExpertMergePlan, shards: Mapping[str, TensorShard]) -> None:
        self.pieces = {name: target for target, merge in merge_plan.merged.items() for name in merge.pieces}
        self._merged = merge_plan.merged
        self._cuts = {target: shards.get(target) or _whole(model.get_parameter(target)) for target in merge_plan.merged}
        self._partial: dict[str, Tensor] = {}
        self._num_missing = {target: len(merge.pieces) for target, merge in merge_plan.merged.items()}

    def num_bytes(self, name: str, stored: CheckpointTensor) -> int:
        rows, width = stored.shape
        own = sum((a1 - a0) * (b1 - b0) for (a0, a1), (b0, b1), _ in self.destinations(name))
        return stored.num_bytes * own // max(1, rows * width)

    def add(self, name: str, part: Any, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        target = self.pieces[name]
        if target not in self._partial:
            self._partial[target] = torch.empty(self._cuts[target].shape, dtype=dtype, device=device)
        for rows, columns, (expert, row) in self.destinations(name):
            block = part[slice(*rows), slice(*columns)]
            self._partial[target][expert, row : row + block.shape[0]].copy_(block)
        self._num_missing[target] -= 1
        return self._partial.pop(target) if not self._num_missing[target] else None

    def shape_of(self, target: str) -> tuple[int, ...]:
        """Shape of this rank's part of a merged parameter."""
        return self._cuts[target].shape

    def destinations(self, name: str) -> Iterator[tuple[tuple[int, int], tuple[int, int], tuple[int, int]]]:
        """(rows, columns) of this rank in a piece, and their destination (expert, row)."""
        target = self.pieces[name]
        shard, merge = self._cuts[target], self._merged[target]
        piece = merge.pieces[name]
        _, all_rows, width = shard.full
        height = all_rows // merge.parts
        begin = piece.part * height
        if shard.dim == 0:
            ((first, end),) = shard.ranges
            if first <= piece.expert < end:
                yield (0, height), (0, width), (piece.expert - first, begin)
        elif shard.dim == 1:
            place = 0
            for first, end in shard.ranges:
                low, high = max(first, begin), min(end, begin + height)
                if low < high:
                    yield (low - begin, high - begin), (0, width), (piece.expert, place + low - first)
                place += end - first
        else:
            ((first, end),) = shard.ranges
            yield (0, height), (first, end), (piece.expert, begin)


def pop_expert_scales(stored: dict[str, CheckpointTensor], endings: Sequence[str]) -> dict[str, CheckpointTensor]:
    """Remove the scales of single experts' matrices from `stored`; returns them by the matrix's name."""
    scales = {}
    for name in list(stored):
        ending = next((end for end in endings if name.endswith(end)), None)
        if ending is not None and _EXPERT_NAME.search(name):
            matrix = f"{name.removesuffix(ending)}.weight"
            if matrix in stored:
                scales[matrix] = stored.pop(name)
    return scales


def merge_expert_scales(
    model: PreTrainedModel,
    merge_plan: ExpertMergePlan,
    scales: Mapping[str, CheckpointTensor],
    shards: Mapping[str, TensorShard],
    block: int,
) -> dict[str, Tensor]:
    """float32 scales of this rank's part of each merged parameter `[E, rows, width]` in FP8.

    They are `[E, rows, 1]`, or `[E, rows / block, ceil(width / block)]` where the checkpoint has one per block x block.

    Raises:
        ValueError: a matrix has no scale, or one of another shape.
        UnsupportedModel: a block lies in two matrices, or in the parts of two ranks.
    """
    merged: dict[str, Tensor] = {}
    entries: dict[tuple[str, str], CheckpointTensor] = {}
    for target, merge in merge_plan.merged.items():
        first = next((scales[name] for name in merge.pieces if name in scales), None)
        if first is None:
            continue
        experts, rows, width = shards[target].full if target in shards else tuple(model.get_parameter(target).shape)
        height = rows // merge.parts
        by_block = first.shape == (-(-height // block), -(-width // block)) != (1, 1)
        if by_block and merge.parts > 1 and height % block:
            raise UnsupportedModel(
                f"{target} has one scale per {block} x {block} weights, and {height} rows of a matrix are not whole blocks."
            )
        shape = (experts, -(-rows // block), -(-width // block)) if by_block else (experts, rows, 1)
        merged[target] = torch.full(shape, torch.nan)
        for name in merge.pieces:
            if name not in scales:
                raise ValueError(f"This checkpoint has no scale of {name}, unlike of other experts; download it again.")
            entries[target, name] = scales[name]
    for (target, name), stored_scale in read_tensors(entries):
        merge, whole, scale = merge_plan.merged[target], merged[target], stored_scale.float()
        piece, height = merge.pieces[name], whole.shape[1] // merge.parts
        if scale.numel() not in (1, height * whole.shape[2]):
            raise ValueError(
                f"{scales[name].file} has {scales[name].name} of shape {list(scale.shape)}, expected one scale, or "
                f"{[height, whole.shape[2]]}; check that config.json belongs to these weights."
            )
        if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
            raise ValueError(
                f"This checkpoint has scales of {name} that are not all finite and at least 0; download it again."
            )
        rows = slice(piece.part * height, (piece.part + 1) * height)
        whole[piece.expert, rows] = scale.reshape(-1, whole.shape[2]) if scale.numel() > 1 else scale.reshape(1)
    return {target: _own_scales(target, scale, shards.get(target), block) for target, scale in merged.items()}


def _own_scales(target: str, scale: Tensor, shard: TensorShard | None, block: int) -> Tensor:
    """This rank's part of scales of a merged parameter."""
    if shard is None or (shard.dim == 2 and scale.shape[2] == 1):
        return scale
    unit = 1 if shard.dim == 0 or scale.shape[shard.dim] == shard.full[shard.dim] else block
    own = shard.for_block_scales(unit, scale.shape)
    if own is None:
        raise UnsupportedModel(
            f"{target} has one scale per {block} x {block} weights, and the parts of ranks would split such a block; use fewer "
            "ranks, or enable_expert_parallel."
        )
    return own.extract(scale)


def _whole(parameter: Tensor) -> TensorShard:
    return TensorShard(tuple(parameter.shape), 0, ((0, parameter.shape[0]),))
