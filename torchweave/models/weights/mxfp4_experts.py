"""Experts in MXFP4: the checkpoints of gpt-oss, and rounding to the nearest at load time.

A checkpoint has `experts.gate_up_proj_blocks` uint8 `[E, 2 I, K / 32, 16]` and `..._scales` uint8 `[E, 2 I, K / 32]` for the
model's `experts.gate_up_proj` `[E, K, 2 I]`, and the same of `down_proj`. They are packed for the kernels on the device
(`torchweave.ops.quant.int_linear`); linears, norms and the router are not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchweave.models.attention import UnsupportedModel
from torchweave.models.experts import expert_weights, experts_modules
from torchweave.models.weights.formats import QuantizationFormat, WeightQuantizer
from torchweave.models.weights.int_linear import MXFP4, IntQuantizer, IntWeight, store_experts
from torchweave.models.weights.packed_checkpoint import PACKED_DTYPE, are_scales
from torchweave.models.weights.read import CheckpointTensor, set_tensor
from torchweave.models.weights.shards import TensorShard
from torchweave.ops.quant.int_linear import pack_int4
from torchweave.ops.quant.mxfp4 import MX_BLOCK, quantize_mxfp4
from torchweave.report import Report

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = MX_BLOCK // 2


@dataclass(frozen=True)
class Mxfp4Scheme:
    """Quantization of experts to MXFP4, the rest of the model keeps its dtype; without experts, of linears."""

    name: str = "mxfp4"

    @property
    def scheme(self) -> Mxfp4Scheme:
        """See `StoredFormat.scheme`."""
        return self

    def collect(self, folder: Path, stored: dict[str, CheckpointTensor]) -> Mxfp4Checkpoint:
        """See `StoredFormat.collect`."""
        return Mxfp4Checkpoint.collect(folder, stored)

    def quantizer(self, model: PreTrainedModel) -> WeightQuantizer:
        """See `Scheme.quantizer`."""
        return Mxfp4Quantizer(model) if experts_modules(model) else IntQuantizer(model, MXFP4)


MXFP4_FORMAT = QuantizationFormat(read=lambda _: Mxfp4Scheme(), scheme=Mxfp4Scheme())


class Mxfp4Quantizer:
    """A `TensorSetter` that stores experts in MXFP4.

    Args:
        scales: scales of a quantized checkpoint by parameter, filled while it is read; None: quantize here.
    """

    def __init__(self, model: PreTrainedModel, scales: dict[str, Tensor] | None = None) -> None:
        self._scales = scales
        self._transposed = expert_weights(model)
        for name, transposed in self._transposed.items():
            shape = model.get_parameter(name).shape
            if shape[1 if transposed else 2] % MX_BLOCK:
                raise UnsupportedModel(
                    f"{name} of shape {list(shape)} cannot be stored in MXFP4: expected a multiple of {MX_BLOCK} inputs on each "
                    "rank."
                )
        if not self._transposed:
            raise ValueError(f"quantization=mxfp4: {type(model).__name__} has no experts to quantize.")

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {}

    def set_tensor(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """Set the parameter or buffer `name` to a tensor on its final device."""
        if name not in self._transposed:
            set_tensor(model, name, tensor)
            return
        if self._scales is not None:
            q, scale = tensor, self._scales.pop(name)
        else:
            q, scale = quantize_mxfp4(tensor.transpose(1, 2) if self._transposed[name] else tensor)
        store_experts(model, name, IntWeight(_pack(q), scale, None, None, MX_BLOCK))

    def apply(self, model: nn.Module, device: torch.device) -> None:
        """Quantize a loaded model, moving one weight at a time to the device."""
        for name in self._transposed:
            self.set_tensor(model, name, model.get_parameter(name).data.to(device))

    def report_summary(self, model: nn.Module, report: Report) -> None:
        """Report the quantized experts."""
        report.event(
            "quantized",
            scheme=Mxfp4Scheme().name,
            source="checkpoint" if self._scales is not None else "weights as they were loaded",
            linears=len(self._transposed),
            parameters=sum(MX_BLOCK * model.get_buffer(f"{name}_scale").numel() for name in self._transposed),
            excluded={"not experts of a mixture": ["all other layers"]},
        )


def _pack(q: Tensor) -> Tensor:
    """int32 `[E, rows, .]` for the kernels of bytes `[E, rows, K / 2]`, an expert at a time: packing takes 20 times its bytes."""
    return torch.stack([pack_int4(torch.stack((each & 15, each >> 4), -1).flatten(1)) for each in q])


@dataclass
class Mxfp4Checkpoint:
    """The packed experts of a checkpoint: their two parts, by the name that the whole parameter would have."""

    folder: Path
    weights: dict[str, tuple[CheckpointTensor, CheckpointTensor]] = field(default_factory=dict)

    @staticmethod
    def collect(folder: Path, stored: dict[str, CheckpointTensor]) -> Mxfp4Checkpoint:
        """Replace the parts in `stored` by whole parameters.

        Raises:
            ValueError: a part is missing, or has another dtype or shape than the format.
        """
        result = Mxfp4Checkpoint(folder)
        for name in [name for name in stored if name.endswith(_BLOCKS)]:
            whole, blocks = name.removesuffix(_BLOCKS), stored.pop(name)
            scales = stored.pop(f"{whole}{_SCALES}", None)
            if scales is None:
                raise ValueError(f"{folder} lacks {whole}{_SCALES}; copy or download the checkpoint again.")
            fits = len(blocks.shape) == 4 and blocks.shape[3] == _BYTES and scales.shape == blocks.shape[:3]
            if not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
                raise ValueError(
                    f"{blocks.file} has {name} as {blocks.dtype} of shape {list(blocks.shape)} beside scales as {scales.dtype} of "
                    f"shape {list(scales.shape)}, expected U8 of [experts, rows, groups, {_BYTES}] and [experts, rows, groups]; "
                    "copy or download it again."
                )
            experts, rows, groups = scales.shape
            shape, num_bytes = (experts, groups * MX_BLOCK, rows), blocks.num_bytes + scales.num_bytes
            stored[whole] = CheckpointTensor(blocks.file, whole, shape, num_bytes, PACKED_DTYPE)
            result.weights[whole] = (blocks, scales)
        if not result.weights:
            raise ValueError(
                f"{folder} has no packed experts, though its config.json declares mxfp4; check that config.json belongs to these "
                "weights."
            )
        return result

    def reader(
        self,
        model: PreTrainedModel,
        stored: dict[str, CheckpointTensor],
        renamed: Mapping[str, str],
        shards: Mapping[str, TensorShard],
    ) -> Mxfp4Reader:
        """See `StoredWeights.reader`."""
        return Mxfp4Reader(self, renamed, shards)


class Mxfp4Reader:
    """A `TensorAssembler` that joins the bytes and scales of experts.

    Attributes:
        pieces: name of a part in the checkpoint -> name of the model's parameter.
        parts: the checkpoint's tensors behind `pieces`.
        scales: scales of complete parameters, until the quantizer takes them.
    """

    def __init__(
        self, checkpoint: Mxfp4Checkpoint, renamed: Mapping[str, str], shards: Mapping[str, TensorShard]
    ) -> None:
        self.pieces: dict[str, str] = {}
        self.parts: dict[str, CheckpointTensor] = {}
        self.scales: dict[str, Tensor] = {}
        self._shards, self._arrived = shards, dict[str, dict[bool, Tensor]]()
        for whole, parts in checkpoint.weights.items():
            if whole in renamed:
                self.pieces |= {part.name: renamed[whole] for part in parts}
                self.parts |= {part.name: part for part in parts}
                self._shard_of(parts[0].name)  # refuses a cut within a group before anything is read

    def num_bytes(self, name: str, stored: CheckpointTensor) -> int:
        shard = self._shard_of(name)
        return stored.num_bytes if shard is None else shard.num_bytes(stored.num_bytes)

    def add(self, name: str, part: Any, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        target, shard = self.pieces[name], self._shard_of(name)
        arrived = self._arrived.setdefault(target, {})
        arrived[name.endswith(_SCALES)] = (part[:] if shard is None else shard.extract(part)).to(device, copy=True)
        if len(arrived) < 2:
            return None
        del self._arrived[target]
        if not are_scales(arrived[True]):
            raise ValueError(
                f"This checkpoint has scales of {target} that are not all numbers: 255 is no exponent; copy or download it again."
            )
        self.scales[target] = arrived[True]
        return arrived[False].flatten(2)

    def quantizer(self, model: PreTrainedModel, experts: Any = None) -> Mxfp4Quantizer:
        """See `WeightReader.quantizer`."""
        return Mxfp4Quantizer(model, self.scales)

    def _shard_of(self, name: str) -> TensorShard | None:
        """This rank's part: of the experts, the rows, or the groups of inputs."""
        target = self.pieces[name]
        shard = self._shards.get(target)
        if shard is None:
            return None
        dim = {0: 0, 1: 2, 2: 1}[shard.dim]  # of [E, K, rows]
        unit = MX_BLOCK if dim == 2 else 1
        if any(begin % unit or end % unit for begin, end in shard.ranges):
            raise UnsupportedModel(
                f"{target} has one scale per {unit} inputs, and the parts of ranks would split such a group; use fewer ranks, or "
                "enable_expert_parallel."
            )
        return TensorShard(
            self.parts[name].shape, dim, tuple((begin // unit, end // unit) for begin, end in shard.ranges)
        )
