"""Experts whose matrices a checkpoint stores one by one as packed weights: read, packed for the kernels, and merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchweave.models.attention import UnsupportedModel
from torchweave.models.weights.int_linear import IntWeight
from torchweave.models.weights.merge_experts import ExpertMergePlan, ExpertMerger
from torchweave.models.weights.packed_checkpoint import PackedCheckpoint, PackedReader
from torchweave.models.weights.read import CheckpointTensor
from torchweave.models.weights.shards import TensorShard


class PackedExpertReader:
    """A `TensorAssembler` that merges packed matrices of experts into this rank's parameters.

    Attributes:
        pieces: name of a part in the checkpoint -> name of the model's parameter.
        parts: the checkpoint's tensors behind `pieces`.
        matrices: name that a whole matrix would have in the checkpoint -> name of the model's parameter.
        merged: weights `[E, rows, .]` by parameter: empty until its last part arrived, then until the quantizer takes it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: PackedCheckpoint,
        merge_plan: ExpertMergePlan,
        shards: Mapping[str, TensorShard],
    ) -> None:
        self._merger = ExpertMerger(model, merge_plan, shards)
        own: dict[str, TensorShard] = {}
        for name in self._merger.pieces:
            weight = checkpoint.weights[name]
            for rows, columns, _ in self._merger.destinations(name):
                shape = (weight.rows, weight.width)
                own[name] = (
                    TensorShard(shape, 0, (rows,))
                    if columns == (0, weight.width)
                    else TensorShard(shape, 1, (columns,))
                )
        self._scheme = checkpoint.format.scheme
        self._reader = PackedReader(checkpoint, {name: name for name in own}, own)
        self._shapes = {target: self._merger.shape_of(target) for target in merge_plan.merged}
        self._missing = {
            target: sum(name in own for name in merge.pieces) for target, merge in merge_plan.merged.items()
        }
        self.pieces = {part: self._merger.pieces[name] for part, name in self._reader.pieces.items()}
        self.parts, self.matrices = self._reader.parts, self._merger.pieces
        self.merged: dict[str, IntWeight] = {}

    @property
    def targets(self) -> frozenset[str]:
        """Parameters that are merged here."""
        return frozenset(self._missing)

    def num_bytes(self, name: str, stored: CheckpointTensor) -> int:
        return self._reader.num_bytes(name, stored)

    def add(self, name: str, part: Any, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if self._reader.add(name, part, dtype, device) is None:
            return None
        matrix, target = self._reader.pieces[name], self.pieces[name]
        weight = self._reader.packed.pop(matrix.removesuffix(".weight"))
        if weight.order is not None:
            raise UnsupportedModel(
                f"{matrix} has its inputs in the order of their activations, which is not supported for experts; use a checkpoint "
                "without activation order."
            )
        ((_, _, (expert, row)),) = self._merger.destinations(matrix)
        whole = self._with_room_for(target, weight)
        for to, given in ((whole.w, weight.w), (whole.scale, weight.scale), (whole.row_scale, weight.row_scale)):
            if to is not None and given is not None:
                to[expert, row : row + len(given)] = given
        if weight.zero is not None and whole.zero is not None:
            whole.zero[expert, row : row + len(weight.zero)] = weight.zero
        self._missing[target] -= 1
        return whole.w if not self._missing[target] else None

    def _with_room_for(self, target: str, weight: IntWeight) -> IntWeight:
        """The merged weight, with memory for what this matrix has; zero points of others are the middle."""
        experts, rows, _ = self._shapes[target]
        whole = self.merged.get(target)
        if whole is None:
            like = (weight.w, weight.scale, weight.row_scale)
            w, scale, row_scale = (None if t is None else t.new_empty(experts, rows, *t.shape[1:]) for t in like)
            assert w is not None and scale is not None
            whole = IntWeight(w, scale, None, None, self._scheme.group, row_scale)
        if weight.zero is not None and whole.zero is None:
            middle = 1 << (self._scheme.bits - 1)
            whole = whole._replace(zero=weight.zero.new_full((experts, rows, weight.zero.shape[1]), middle))
        self.merged[target] = whole
        return whole
