"""Weights that a checkpoint has in a form without kernels here: each is dequantized exactly once, when its last part arrives.

In memory they take the model's dtype, so such a checkpoint saves its download and not the memory; the event `dequantized` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchweave.models.weights.packed_checkpoint import PACKED_DTYPE
from torchweave.models.weights.read import CheckpointTensor, set_tensor
from torchweave.models.weights.shards import TensorShard
from torchweave.report import Report

Parts = Mapping[str, CheckpointTensor]
"""Tensors of one weight in the checkpoint, by the ends of their names."""


@dataclass(frozen=True)
class DequantizedScheme:
    """The numbers of a checkpoint that are dequantized; nothing is quantized in memory."""

    name: str

    def quantizer(self, model: PreTrainedModel) -> PlainSetter:
        """See `Scheme.quantizer`: weights of a model without a checkpoint keep their dtype."""
        return PlainSetter(self.name, 0)


@dataclass(frozen=True)
class PlainSetter:
    """A `WeightQuantizer` that stores weights as they arrive, dequantized."""

    scheme: str
    count: int
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def set_tensor(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """Set the parameter or buffer `name`."""
        set_tensor(model, name, tensor)

    def apply(self, model: nn.Module, device: torch.device) -> None:
        """See `WeightQuantizer.apply`."""

    def report_summary(self, model: nn.Module, report: Report) -> None:
        """Report that weights were dequantized."""
        report.event("dequantized", scheme=self.scheme, weights=self.count)


@dataclass(frozen=True)
class DequantizedFormat:
    """A stored form of weights.

    Attributes:
        scheme: as reports name it.
        endings: ends of the names of a weight's parts after the linear's; the first is that of the numbers.
        shape: the weight's `[N, K]` from its parts; None: these are no quantized weight.
        dequantize: parts, whole -> the weight in float32 or the dtype that it was quantized from.
    """

    scheme: DequantizedScheme
    endings: tuple[str, ...]
    shape: Callable[[Parts], tuple[int, ...] | None]
    dequantize: Callable[[Mapping[str, Tensor]], Tensor]

    def collect(self, folder: Path, stored: dict[str, CheckpointTensor]) -> DequantizedCheckpoint:
        """See `StoredFormat.collect`."""
        owners: dict[str, dict[str, CheckpointTensor]] = {}
        for name, tensor in stored.items():
            ending = next((each for each in self.endings if name.endswith(f".{each}")), None)
            if ending is not None:
                owners.setdefault(name.removesuffix(f".{ending}"), {})[ending] = tensor
        weights: dict[str, Parts] = {}
        for owner, parts in owners.items():
            shape = self.shape(parts) if self.endings[0] in parts else None
            if shape is None:
                continue
            for ending in parts:
                del stored[f"{owner}.{ending}"]
            first, name = parts[self.endings[0]], f"{owner}.weight"
            num_bytes = sum(part.num_bytes for part in parts.values())
            stored[name], weights[name] = CheckpointTensor(first.file, name, shape, num_bytes, PACKED_DTYPE), parts
        if not weights:
            raise ValueError(
                f"{folder} has no weights of {self.scheme.name}, though its config.json declares them; check that config.json "
                "belongs to these weights."
            )
        return DequantizedCheckpoint(self, weights)


@dataclass
class DequantizedCheckpoint:
    """See `StoredWeights`."""

    format: DequantizedFormat
    weights: dict[str, Any]

    def reader(
        self,
        model: PreTrainedModel,
        stored: dict[str, CheckpointTensor],
        renamed: Mapping[str, str],
        shards: Mapping[str, TensorShard],
    ) -> DequantizedReader:
        """See `StoredWeights.reader`."""
        return DequantizedReader(self, renamed, shards)


class DequantizedReader:
    """A `WeightReader` that dequantizes whole weights and keeps this rank's part of them."""

    def __init__(
        self, checkpoint: DequantizedCheckpoint, renamed: Mapping[str, str], shards: Mapping[str, TensorShard]
    ) -> None:
        self._format, self._shards = checkpoint.format, shards
        self._num_parts = {renamed[name]: len(parts) for name, parts in checkpoint.weights.items() if name in renamed}
        self.pieces: dict[str, str] = {}
        self.parts: dict[str, CheckpointTensor] = {}
        self._endings: dict[str, str] = {}
        self._arrived: dict[str, dict[str, Tensor]] = {}
        for name, parts in checkpoint.weights.items():
            for ending, part in parts.items() if name in renamed else ():
                self.pieces[part.name], self.parts[part.name] = renamed[name], part
                self._endings[part.name] = ending

    def num_bytes(self, name: str, stored: CheckpointTensor) -> int:
        """See `TensorAssembler.num_bytes`."""
        return stored.num_bytes

    def add(self, name: str, part: Any, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """See `TensorAssembler.add`."""
        target = self.pieces[name]
        arrived = self._arrived.setdefault(target, {})
        arrived[self._endings[name]] = part[...].to(device)
        if len(arrived) < self._num_parts[target]:
            return None
        try:
            weight = self._format.dequantize(self._arrived.pop(target))
        except (RuntimeError, LookupError) as error:
            raise ValueError(
                f"This checkpoint has parts of {target} that do not fit together; copy or download it again."
            ) from error
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"This checkpoint has numbers or scales of {target} that are not finite; copy or download it again."
            )
        shard = self._shards.get(target)
        whole = weight if shard is None else shard.extract(weight)
        return whole.to(dtype).contiguous()

    def quantizer(self, model: PreTrainedModel, experts: Any = None) -> PlainSetter:
        """See `WeightReader.quantizer`."""
        return PlainSetter(self._format.scheme.name, len(self._num_parts))


def _fp8_shape(parts: Parts) -> tuple[int, ...] | None:
    """Of e4m3 weights beside a scale."""
    return parts["weight"].shape if parts["weight"].dtype == "F8_E4M3" and "weight_scale" in parts else None


def _dequantize_fp8(parts: Mapping[str, Tensor]) -> Tensor:
    weight, scale = parts["weight"].float(), parts["weight_scale"].float()
    if scale.numel() in (1, weight.shape[0]):
        return weight * scale.reshape(-1, 1)
    if scale.ndim != 2 or any(length % blocks for length, blocks in zip(weight.shape, scale.shape, strict=True)):
        raise ValueError(
            f"This checkpoint has scales of shape {list(scale.shape)} of a weight of shape {list(weight.shape)}: expected one, "
            "one a row, or one a block; check that config.json belongs to these weights."
        )
    rows, columns = (length // blocks for length, blocks in zip(weight.shape, scale.shape, strict=True))
    return weight * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


FP8_WEIGHTS_ONLY = DequantizedFormat(
    DequantizedScheme("fp8_weights_only"), ("weight", "weight_scale"), _fp8_shape, _dequantize_fp8
)
"""Weights in e4m3 whose activations keep 16 bits (W8A16)."""
