"""Checkpoints of which parts are quantized in different ways: `config_groups` that differ, Model Optimizer's `MIXED_PRECISION`.

Each linear is read as its group's format, by that format's own reader, and gets that format's module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchweave.models.weights.formats import Scheme, StoredFormat, StoredWeights, WeightQuantizer, WeightReader
from torchweave.models.weights.methods.scales import INPUT_SCALES, WEIGHT_SCALES, check_scales, shard_scales
from torchweave.models.weights.packed_checkpoint import PACKED_DTYPE
from torchweave.models.weights.quantize import Quantizer, QuantScheme
from torchweave.models.weights.read import AssemblerGroup, CheckpointTensor, read_tensors, set_tensor
from torchweave.models.weights.shards import TensorShard
from torchweave.report import Report


@dataclass(frozen=True)
class MixedScheme:
    """The schemes of a checkpoint's groups."""

    schemes: tuple[Scheme, ...]

    @property
    def name(self) -> str:
        """As reports name it."""
        return "+".join(sorted(scheme.name for scheme in self.schemes))

    def quantizer(self, model: PreTrainedModel) -> WeightQuantizer:
        """See `Scheme.quantizer`: of a model without a checkpoint, whose linears have no groups, all take the first scheme."""
        return self.schemes[0].quantizer(model)


@dataclass(frozen=True)
class MixedFormat:
    """Formats by the names of linears.

    Attributes:
        groups: (targets, format): names of modules, regular expressions after `re:`, or the class `Linear`.
    """

    groups: tuple[tuple[tuple[str, ...], StoredFormat], ...]

    @property
    def scheme(self) -> MixedScheme:
        """See `StoredFormat.scheme`."""
        return MixedScheme(tuple(dict.fromkeys(each.scheme for _, each in self.groups)))

    def _group_of(self, module: str) -> int | None:
        """The group of a module: the one that names it, else the first whose expression matches it, else that of its class."""
        ranks = [
            (min(map(_rank, targets, [module] * len(targets))), number)
            for number, (targets, _) in enumerate(self.groups)
        ]
        rank, number = min(ranks)
        return None if rank == _NO_TARGET else number

    def collect(self, folder: Path, stored: dict[str, CheckpointTensor]) -> MixedCheckpoint:
        """See `StoredFormat.collect`."""
        parts: list[dict[str, CheckpointTensor]] = [{} for _ in self.groups]
        for name, tensor in stored.items():
            number = self._group_of(name.rpartition(".")[0])
            if number is not None:
                parts[number][name] = tensor
        checkpoints: list[StoredWeights] = []
        for (_, stored_format), part in zip(self.groups, parts, strict=True):
            before = set(part)
            if isinstance(stored_format, QuantScheme):
                checkpoints.append(Fp8Checkpoint.collect(stored_format, part))
            elif _holds(stored_format, part):
                collected = stored_format.collect(folder, part)
                assert collected is not None, "only FP8 weights are whole"
                checkpoints.append(collected)
            for name in before - set(part):
                del stored[name]
            stored |= part
        if not any(checkpoint.weights for checkpoint in checkpoints):
            raise ValueError(
                f"{folder} has no quantized weights, though its config.json declares {self.scheme.name}; check that config.json "
                "belongs to these weights."
            )
        return MixedCheckpoint(checkpoints)


_NO_TARGET = 3


def _rank(target: str, module: str) -> int:
    """How closely a target names a module: 0 by its name, 1 by an expression, 2 by its class, 3 not at all."""
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), module) else _NO_TARGET
    return 0 if target == module else 2 if target == "Linear" else _NO_TARGET


def _holds(stored_format: StoredFormat, part: Mapping[str, CheckpointTensor]) -> bool:
    """Whether some of the tensors are quantized weights of a format: beside a scale, or packed."""
    return any(tensor.dtype in ("I8", "I32", "U8", "F8_E4M3") for tensor in part.values())


@dataclass
class MixedCheckpoint:
    """See `StoredWeights`."""

    checkpoints: Sequence[StoredWeights]
    weights: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = {name: each for checkpoint in self.checkpoints for name, each in checkpoint.weights.items()}

    def reader(
        self,
        model: PreTrainedModel,
        stored: dict[str, CheckpointTensor],
        renamed: Mapping[str, str],
        shards: Mapping[str, TensorShard],
    ) -> MixedReader:
        """See `StoredWeights.reader`."""
        return MixedReader([each.reader(model, stored, renamed, shards) for each in self.checkpoints])


class MixedReader(AssemblerGroup):
    """See `WeightReader`."""

    def __init__(self, readers: Sequence[WeightReader]) -> None:
        super().__init__(readers)
        self._readers = readers
        self.parts = {name: part for reader in readers for name, part in reader.parts.items()}

    def quantizer(self, model: PreTrainedModel, experts: Any = None) -> MixedQuantizer:
        """See `WeightReader.quantizer`."""
        return MixedQuantizer([each.quantizer(model) for each in self._readers])


class MixedQuantizer:
    """A `WeightQuantizer` that hands each weight to that of its format."""

    def __init__(self, quantizers: Sequence[WeightQuantizer]) -> None:
        self._quantizers = quantizers
        self._owners = {f"{name}.weight": each for each in quantizers for name in getattr(each, "linears", ())}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes that differ from the model's, by tensor name."""
        return {name: dtype for each in self._quantizers for name, dtype in each.dtypes.items()}

    def set_tensor(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """Set the parameter or buffer `name` to a tensor on its final device."""
        owner = self._owners.get(name)
        if owner is None:
            set_tensor(model, name, tensor)
        else:
            owner.set_tensor(model, name, tensor)

    def apply(self, model: nn.Module, device: torch.device) -> None:
        """See `WeightQuantizer.apply`: weights arrive quantized."""

    def report_summary(self, model: nn.Module, report: Report) -> None:
        """Report what is quantized, format by format."""
        for each in self._quantizers:
            each.report_summary(model, report)


@dataclass
class Fp8Checkpoint:
    """FP8 weights of a group, whole, beside their scales; see `StoredWeights`.

    Attributes:
        scales: of weights and of activations, by the name of the weight.
    """

    scheme: QuantScheme
    weights: dict[str, CheckpointTensor]
    scales: tuple[dict[str, CheckpointTensor], dict[str, CheckpointTensor]]

    @staticmethod
    def collect(scheme: QuantScheme, stored: dict[str, CheckpointTensor]) -> Fp8Checkpoint:
        """Take the scales out of `stored`, and mark the weights as packed."""
        by_kind: list[dict[str, CheckpointTensor]] = []
        for endings in (WEIGHT_SCALES, INPUT_SCALES):
            names = {name: end for name in stored for end in endings if name.endswith(end)}
            by_kind.append({f"{name.removesuffix(end)}.weight": stored.pop(name) for name, end in names.items()})
        weights = {name: tensor for name, tensor in stored.items() if name in by_kind[0] and tensor.dtype == "F8_E4M3"}
        for name, tensor in weights.items():
            stored[name] = CheckpointTensor(tensor.file, name, tensor.shape, tensor.num_bytes, PACKED_DTYPE)
        return Fp8Checkpoint(scheme, weights, (by_kind[0], by_kind[1]))

    def reader(
        self,
        model: PreTrainedModel,
        stored: dict[str, CheckpointTensor],
        renamed: Mapping[str, str],
        shards: Mapping[str, TensorShard],
    ) -> Fp8Reader:
        """See `StoredWeights.reader`."""
        targets = {name: renamed[name] for name in self.weights if name in renamed}
        scales, inputs = (
            {targets[name].removesuffix(".weight"): each for name, each in read_tensors(_among(kind, targets))}
            for kind in self.scales
        )
        check_scales(scales, inputs if self.scheme.static else {})
        return Fp8Reader(self, targets, shards, shard_scales(scales, shards), inputs)


def _among(kind: Mapping[str, CheckpointTensor], names: Mapping[str, str]) -> dict[str, CheckpointTensor]:
    return {name: tensor for name, tensor in kind.items() if name in names}


class Fp8Reader:
    """A `WeightReader` of this rank's parts of FP8 weights."""

    def __init__(
        self, checkpoint: Fp8Checkpoint, targets: Mapping[str, str], shards: Mapping[str, TensorShard],
        scales: Mapping[str, Tensor], inputs: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self._scheme, self._shards, self._scales, self._inputs = checkpoint.scheme, shards, scales, inputs
        self.pieces = {checkpoint.weights[name].name: target for name, target in targets.items()}
        self.parts = {checkpoint.weights[name].name: checkpoint.weights[name] for name in targets}

    def num_bytes(self, name: str, stored: CheckpointTensor) -> int:
        """See `TensorAssembler.num_bytes`."""
        shard = self._shards.get(self.pieces[name])
        return stored.num_bytes if shard is None else shard.num_bytes(stored.num_bytes)

    def add(self, name: str, part: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `TensorAssembler.add`: the weight is one piece."""
        shard = self._shards.get(self.pieces[name])
        return (part[...] if shard is None else shard.extract(part)).to(device, copy=True)

    def quantizer(self, model: PreTrainedModel, experts: Any = None) -> Quantizer:
        """See `WeightReader.quantizer`."""
        return Quantizer(model, self._scheme, self._scales, self._inputs)
