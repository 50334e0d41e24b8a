"""Checkpoints with packed integer weights: which tensors make up a linear, and their conversion to the kernels' layout.

These packings of integers are read, each of 4 or 8 bits, with or without zero points, a scale per group of inputs or per row:

- compressed-tensors (llm-compressor) `pack-quantized`: `X.weight_packed` `[N, K / per]`, `X.weight_scale` `[N, G]`,
  `X.weight_zero_point` `[N / per, G]`, `X.weight_g_idx` `[K]`.
- compressed-tensors `int-quantized`, 8 bits: `X.weight` int8 `[N, K]`, `X.weight_scale`. If it declares activations in 8 bits
  (W8A8) with a scale for each token, linears round them; else they keep 16 bits, and their scales are dropped.
- GPTQ (AutoGPTQ, GPTQModel): `X.qweight` `[K / per, N]`, `X.scales` `[G, N]`, `X.qzeros` `[G, N / per]`, `X.g_idx` `[K]`. The
  format `gptq` stores zero points less one, `gptq_v2` as they are.
- AWQ (AutoAWQ) `gemm`, 4 bits: `X.qweight` `[K, N / per]`, `X.scales` `[G, N]`, `X.qzeros` `[G, N / per]`; an int32 holds outputs
  in the order of AWQ_ORDER.

`per` integers share an int32, the first in its lowest bits. These packings of e2m1 numbers, two in a byte, are read:

- compressed-tensors `nvfp4-pack-quantized`: `X.weight_packed` `[N, K / 2]`, `X.weight_scale` e4m3 `[N, K / 16]`,
  `X.weight_global_scale` float32 `[1]`, by which a scale is divided. `mxfp4-pack-quantized`: scales uint8 `[N, K / 32]`, exponents.
- TensorRT Model Optimizer `NVFP4`: `X.weight` `[N, K / 2]`, `X.weight_scale`, and `X.weight_scale_2`, which is multiplied.

Activations keep 16 bits, whatever the checkpoint declares, unless W4A4 is requested: then the scale of FP4 activations is a part of
the weight (`X.input_global_scale`, a divisor, or Model Optimizer's `X.input_scale`). A weight is read part by part, restricted to
this rank's outputs or inputs, and packed for the kernels on the device when its last part arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchweave.models.attention import UnsupportedModel
from torchweave.models.weights.int_linear import IntQuantizer, IntScheme, IntWeight, to_layout
from torchweave.models.weights.read import CheckpointTensor, loadable_tensors
from torchweave.models.weights.shards import Range, TensorShard
from torchweave.ops.quant.int_linear import num_groups

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output that each 4 bits of an int32 hold, from the lowest."""
PACKED_DTYPE = "packed integers"
"""`CheckpointTensor.dtype` of a weight that consists of parts."""
_FLOATS = ("F16", "BF16", "F32")
_SCALE_DTYPES = {"int": _FLOATS, "mxfp4": ("U8",), "nvfp4": ("F8_E4M3",)}
_ACTIVATION_PARTS = frozenset({"input_scale", "input_zero_point", "input_global_scale"})

Axis = tuple[Literal["n", "k", "g"], int]
"""Meaning of a dimension (outputs, inputs, groups of inputs), and integers in an element."""


@dataclass(frozen=True)
class PartLayout:
    """Name and dimensions of one of the tensors of a packed weight."""

    leaf: str
    axes: tuple[Axis, ...]

    def shape(self, rows: int, width: int, groups: int) -> tuple[int, ...]:
        sizes = {"n": rows, "k": width, "g": groups}
        return tuple(-(-sizes[axis] // per) for axis, per in self.axes)


@dataclass(frozen=True)
class PackedFormat:
    """A packing of integer weights.

    Attributes:
        scheme: bits, and inputs that share a scale.
        method: as error messages name it.
        q, scale, zero, order: parts of a weight; zero None: without zero points.
        shape: leaf of a tensor with the weight's shape; empty if there is none.
        zero_offset: added to stored zero points.
        symmetric: zero points, if stored, are all the middle.
        nibble_order: output that each 4 bits of an int32 hold; None: in order.
        whole_scale: leaf of one more scale of the whole weight; empty if there is none.
        divided: scales are divided by it, not multiplied.
        input_scale: leaf of the scale of FP4 activations; empty if the checkpoint declares none.
    """

    scheme: IntScheme
    method: str
    q: PartLayout
    scale: PartLayout
    zero: PartLayout | None
    order: PartLayout
    shape: str = ""
    zero_offset: int = 0
    symmetric: bool = False
    nibble_order: tuple[int, ...] | None = None
    whole_scale: str = ""
    divided: bool = False
    input_scale: str = ""

    @property
    def parts(self) -> dict[str, PartLayout]:
        """Parts by leaf, those that must exist first."""
        required = (self.q, self.scale) if self.zero is None else (self.q, self.scale, self.zero)
        names = [self.whole_scale, self.input_scale if self.scheme.activations == "fp4" else ""]
        whole = [PartLayout(leaf, ()) for leaf in names if leaf]
        return {part.leaf: part for part in (*required, *whole, self.order)}

    def dtypes(self, leaf: str) -> tuple[str, ...]:
        """Dtypes that a part may have."""
        if leaf in (self.scale.leaf, self.whole_scale, self.input_scale):
            return _SCALE_DTYPES[self.scheme.code] if leaf == self.scale.leaf else _FLOATS
        integers = "I32" if self.scheme.code == "int" else "U8"
        return ("I8",) if leaf == "weight" and self.scheme.code == "int" else (integers,)

    def collect(self, folder: Path, stored: dict[str, CheckpointTensor]) -> PackedCheckpoint:
        """See `StoredFormat.collect`."""
        return PackedCheckpoint.collect(self, folder, stored)


def compressed_tensors_format(bits: int, group: int, symmetric: bool) -> PackedFormat:
    per = 32 // bits
    zero = None if symmetric else PartLayout("weight_zero_point", (("n", per), ("g", 1)))
    return PackedFormat(
        IntScheme(bits, group), "compressed-tensors", PartLayout("weight_packed", (("n", 1), ("k", per))),
        PartLayout("weight_scale", (("n", 1), ("g", 1))), zero, PartLayout("weight_g_idx", (("k", 1),)),
        "weight_shape", symmetric=symmetric,
    )  # fmt: skip


def int8_format(group: int, tokens: bool) -> PackedFormat:
    """tokens: activations are rounded to 8 bits as well, token by token."""
    scheme = IntScheme(8, group, activations="int8" if tokens else None)
    return PackedFormat(
        scheme, "compressed-tensors", PartLayout("weight", (("n", 1), ("k", 1))),
        PartLayout("weight_scale", (("n", 1), ("g", 1))), None, PartLayout("weight_g_idx", (("k", 1),)), symmetric=True,
    )  # fmt: skip


def fp4_format(scheme: IntScheme, input_scale: str) -> PackedFormat:
    """compressed-tensors' MXFP4 or NVFP4."""
    return PackedFormat(
        scheme, "compressed-tensors", PartLayout("weight_packed", (("n", 1), ("k", 2))),
        PartLayout("weight_scale", (("n", 1), ("g", 1))), None, PartLayout("weight_g_idx", (("k", 1),)), symmetric=True,
        whole_scale="weight_global_scale" if scheme.code == "nvfp4" else "", divided=True, input_scale=input_scale,
    )  # fmt: skip


def modelopt_fp4_format(scheme: IntScheme) -> PackedFormat:
    return PackedFormat(
        scheme, "modelopt", PartLayout("weight", (("n", 1), ("k", 2))), PartLayout("weight_scale", (("n", 1), ("g", 1))),
        None, PartLayout("weight_g_idx", (("k", 1),)), symmetric=True, whole_scale="weight_scale_2",
        input_scale="input_scale",
    )  # fmt: skip


def gptq_format(bits: int, group: int, symmetric: bool, zero_offset: int) -> PackedFormat:
    per = 32 // bits
    return PackedFormat(
        IntScheme(bits, group), "gptq", PartLayout("qweight", (("k", per), ("n", 1))),
        PartLayout("scales", (("g", 1), ("n", 1))), PartLayout("qzeros", (("g", 1), ("n", per))),
        PartLayout("g_idx", (("k", 1),)), zero_offset=zero_offset, symmetric=symmetric,
    )  # fmt: skip


def awq_format(group: int) -> PackedFormat:
    return PackedFormat(
        IntScheme(4, group), "awq", PartLayout("qweight", (("k", 1), ("n", 8))),
        PartLayout("scales", (("g", 1), ("n", 1))), PartLayout("qzeros", (("g", 1), ("n", 8))),
        PartLayout("g_idx", (("k", 1),)), nibble_order=AWQ_ORDER,
    )  # fmt: skip


def unpack(raw: Tensor, dim: int, bits: int, nibble_order: tuple[int, ...] | None = None) -> Tensor:
    """uint8 integers of an int32 or uint8 tensor, whose dimension `dim` becomes as many times as long as it has integers."""
    per, mask = raw.element_size() * 8 // bits, (1 << bits) - 1
    places = range(per) if nibble_order is None else [nibble_order.index(output) for output in range(per)]
    parts = [((raw >> (bits * place)) & mask).to(torch.uint8) for place in places]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def are_scales(scale: Tensor) -> bool:
    """Whether all are finite and at least 0; uint8: exponents, of which 255 is no number."""
    if scale.dtype == torch.uint8:
        return not bool((scale == 255).any())
    return bool((torch.isfinite(scale.float()) & (scale.float() >= 0)).all())


@dataclass
class PackedWeight:
    """Tensors of one weight in a checkpoint, by leaf, and the weight's shape."""

    parts: dict[str, CheckpointTensor]
    rows: int = 0
    width: int = 0


@dataclass
class PackedCheckpoint:
    """The packed weights of a checkpoint, by the name that the whole weight would have (`X.weight`).

    `collect` takes their parts out of a checkpoint's tensors and puts the whole weights in, so that names and shapes are mapped
    and checked like those of any checkpoint.
    """

    format: PackedFormat
    folder: Path
    weights: dict[str, PackedWeight] = field(default_factory=dict)

    @staticmethod
    def collect(packed_format: PackedFormat, folder: Path, stored: dict[str, CheckpointTensor]) -> PackedCheckpoint:
        """Replace the parts in `stored`.

        Raises:
            ValueError: a part is missing or has another dtype or shape than the format.
        """
        result = PackedCheckpoint(packed_format, folder)
        leaves = {*packed_format.parts, *([packed_format.shape, "weight_zero_point"] if packed_format.shape else [])}
        for name in list(stored):
            owner, _, leaf = name.rpartition(".")
            if leaf in _ACTIVATION_PARTS and leaf not in leaves:
                del stored[name]
            elif leaf in leaves and (leaf != "weight" or stored[name].dtype in ("I8", "U8")):
                result.weights.setdefault(f"{owner}.weight", PackedWeight({})).parts[leaf] = stored.pop(name)
        for name, weight in result.weights.items():
            result._check(name, weight, stored)
            first = weight.parts[packed_format.q.leaf]
            num_bytes = sum(part.num_bytes for part in weight.parts.values())
            stored[name] = CheckpointTensor(first.file, name, (weight.rows, weight.width), num_bytes, PACKED_DTYPE)
        if not result.weights:
            raise ValueError(
                f"{folder} has no packed weights, though its config.json declares {packed_format.method}; check that "
                "config.json belongs to these weights."
            )
        return result

    def reader(
        self,
        model: PreTrainedModel,
        stored: dict[str, CheckpointTensor],
        renamed: Mapping[str, str],
        shards: Mapping[str, TensorShard],
    ) -> PackedReader:
        """See `StoredWeights.reader`."""
        self.drop_unused_biases(model, stored, renamed)
        return PackedReader(self, {name: target for name, target in renamed.items() if name in stored}, shards)

    def _check(self, name: str, weight: PackedWeight, stored: Mapping[str, CheckpointTensor]) -> None:
        """Set the weight's shape and check those of its parts."""
        packed_format, owner = self.format, name.removesuffix(".weight")
        if name in stored:
            part = next(iter(weight.parts.values()))
            raise ValueError(
                f"{stored[name].file} has {name} as {stored[name].dtype} beside {part.name}; copy or download the checkpoint again."
            )
        required = [leaf for leaf in packed_format.parts if leaf != packed_format.order.leaf]
        if missing := [leaf for leaf in required if leaf not in weight.parts]:
            raise ValueError(f"{self.folder} lacks {owner}.{missing[0]}; copy or download the checkpoint again.")
        q = weight.parts[packed_format.q.leaf]
        if len(q.shape) != 2:
            raise self._shape_error(q, "two dimensions")
        lengths = {axis: size * per for (axis, per), size in zip(packed_format.q.axes, q.shape, strict=True)}
        weight.rows, weight.width = lengths["n"], lengths["k"]
        if packed_format.shape in weight.parts:
            weight.rows, weight.width = self._stored_shape(weight.parts.pop(packed_format.shape), lengths)
        groups = num_groups(weight.width, packed_format.scheme.group_of(weight.width))
        for leaf, part in weight.parts.items():
            layout = packed_format.parts.get(leaf)
            if layout is None:
                raise ValueError(
                    f"{part.file} has {part.name}, but config.json declares symmetric weights; check that config.json belongs "
                    "to these weights."
                )
            expected = layout.shape(weight.rows, weight.width, groups)
            if part.shape != expected and not (layout.axes == () and part.shape == (1,)):
                raise self._shape_error(part, str(list(expected)))
            allowed = packed_format.dtypes(leaf)
            if part.dtype not in allowed:
                raise ValueError(
                    f"{part.file} has {part.name} as {part.dtype}, expected {' or '.join(allowed)}; check that config.json belongs "
                    "to these weights."
                )

    def _stored_shape(self, part: CheckpointTensor, lengths: Mapping[str, int]) -> tuple[int, int]:
        """The weight's shape, which may end within the last int32 of a row."""
        shape = part.read().flatten().tolist()
        per = 32 // self.format.scheme.bits
        if len(shape) != 2 or shape[0] != lengths["n"] or not lengths["k"] - per < shape[1] <= lengths["k"]:
            raise ValueError(
                f"{part.file} has {part.name}={shape} beside packed weights for {[lengths['n'], lengths['k']]}; copy or download "
                "it again."
            )
        return int(shape[0]), int(shape[1])

    def _shape_error(self, part: CheckpointTensor, expected: str) -> ValueError:
        return ValueError(
            f"{part.file} has {part.name} of shape {list(part.shape)}, expected {expected} for {self.format.scheme.name}; "
            "check that config.json belongs to these weights."
        )

    def drop_unused_biases(
        self, model: PreTrainedModel, stored: dict[str, CheckpointTensor], renamed: Mapping[str, str]
    ) -> None:
        """Remove biases of zeros that GPTQ checkpoints add to linears without one."""
        wanted = loadable_tensors(model)
        for name in self.weights:
            bias = f"{name.removesuffix('weight')}bias"
            if bias not in stored or name not in renamed or f"{renamed[name].removesuffix('weight')}bias" in wanted:
                continue
            if not bool(stored[bias].read().any()):
                del stored[bias]


class PackedReader:
    """A `TensorAssembler` that packs weights for the kernels as their parts arrive.

    Attributes:
        pieces: name of a part in the checkpoint -> name of the model's weight.
        parts: the checkpoint's tensors behind `pieces`.
        packed: complete weights by name of the linear, until the quantizer takes them.
    """

    def __init__(
        self, checkpoint: PackedCheckpoint, renamed: Mapping[str, str], shards: Mapping[str, TensorShard]
    ) -> None:
        self.format = checkpoint.format
        self.pieces: dict[str, str] = {}
        self.parts: dict[str, CheckpointTensor] = {}
        self.packed: dict[str, IntWeight] = {}
        self._weights: dict[str, PackedWeight] = {}
        self._leaves: dict[str, str] = {}
        self._shards = shards
        self._arrived: dict[str, dict[str, Tensor]] = {}
        for name, weight in checkpoint.weights.items():
            if name not in renamed:
                continue
            self._weights[renamed[name]] = weight
            for leaf, part in weight.parts.items():
                self.pieces[part.name], self.parts[part.name], self._leaves[part.name] = renamed[name], part, leaf
                self._shard_of(part.name)  # refuses a cut within a group before anything is read

    @property
    def linears(self) -> dict[str, PackedWeight]:
        """Packed weights by name of the model's linear."""
        return {name.removesuffix(".weight"): weight for name, weight in self._weights.items()}

    def num_bytes(self, name: str, stored: CheckpointTensor) -> int:
        num_bytes = stored.num_bytes
        for shard in self._shard_of(name):
            num_bytes = shard.num_bytes(num_bytes)
        return num_bytes

    def add(self, name: str, part: Any, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        target = self.pieces[name]
        arrived = self._arrived.setdefault(target, {})
        for shard in self._shard_of(name):
            part = shard.extract(part)
        arrived[self._leaves[name]] = part[...].to(device)
        if len(arrived) < len(self._weights[target].parts):
            return None
        weight = self._pack(target, self._arrived.pop(target))
        self.packed[target.removesuffix(".weight")] = weight
        return weight.w

    def quantizer(self, model: PreTrainedModel, experts: Any = None) -> IntQuantizer:
        """See `WeightReader.quantizer`."""
        return IntQuantizer(model, self.format.scheme, self.packed, self.linears, experts)

    def _shard_of(self, name: str) -> list[TensorShard]:
        """This rank's part of a part; empty: all of it."""
        target, leaf = self.pieces[name], self._leaves[name]
        shard, layout = self._shards.get(target), self.format.parts[leaf]
        if shard is None or leaf == self.format.order.leaf:
            return []
        group = self.format.scheme.group
        cut, result = ("n", "k")[shard.dim], []
        for dim, (axis, per) in enumerate(layout.axes):
            unit = per if axis == cut else group if (axis, cut) == ("g", "k") and group else 0
            if unit:
                ranges = tuple(self._divided(target, each, unit, shard.full[shard.dim]) for each in shard.ranges)
                result.append(TensorShard(self.parts[name].shape, dim, ranges))
        return result

    def _divided(self, target: str, cut: Range, unit: int, length: int) -> Range:
        begin, end = cut
        if begin % unit or (end % unit and end != length):
            inputs = unit == self.format.scheme.group
            raise UnsupportedModel(
                f"{target} has one {'scale' if inputs else 'int32'} per {unit} {'inputs' if inputs else 'integers'}, and the "
                "parts of ranks would split such a group; use fewer ranks, or a checkpoint with smaller groups."
            )
        return begin // unit, -(-end // unit)

    def _pack(self, target: str, arrived: dict[str, Tensor]) -> IntWeight:
        packed_format, bits = self.format, self.format.scheme.bits
        shard, weight = self._shards.get(target), self._weights[target]
        rows, width = (weight.rows, weight.width) if shard is None else shard.shape
        scale = self._by_rows(packed_format.scale, arrived)
        row_scale = self._row_scale(arrived, rows)
        if not (are_scales(scale) and (row_scale is None or are_scales(row_scale))):
            raise ValueError(
                f"This checkpoint has scales of {target} that are not all finite and at least 0; copy or download it again."
            )
        q = self._by_rows(packed_format.q, arrived)[:rows, :width]
        zero = None
        if packed_format.zero is not None:
            zero = self._by_rows(packed_format.zero, arrived)[:rows]
            zero = (zero + packed_format.zero_offset) & ((1 << bits) - 1)
            if packed_format.symmetric and bool((zero == 1 << (bits - 1)).all()):
                zero = None
        order = self._input_order(target, arrived.get(packed_format.order.leaf), weight.width, shard)
        if order is not None:
            q = q[:, order]
        in_order = None if order is None else order.to(torch.int32)
        packed = to_layout(q, scale, zero, in_order, packed_format.scheme, row_scale)
        return packed._replace(input_scale=self._input_scale(target, arrived))

    def _row_scale(self, arrived: Mapping[str, Tensor], rows: int) -> Tensor | None:
        """float32 `[rows]` of the whole weight's scale; None if the format has none."""
        whole = self._whole_scale(arrived, self.format.whole_scale)
        return None if whole is None else whole.expand(rows)

    def _input_scale(self, target: str, arrived: Mapping[str, Tensor]) -> Tensor | None:
        """float32 `[1]`, the scale of FP4 activations; None if they keep 16 bits."""
        scale = self._whole_scale(arrived, self.format.input_scale)
        if scale is not None and not (bool(torch.isfinite(scale)) and float(scale) > 0):
            raise ValueError(
                f"This checkpoint has {float(scale)} as input scale of {target}: expected a finite number above 0; copy or "
                "download it again."
            )
        return scale

    def _whole_scale(self, arrived: Mapping[str, Tensor], leaf: str) -> Tensor | None:
        """float32 `[1]`, a factor of all numbers; None if there is no such part."""
        if leaf not in arrived:
            return None
        whole = arrived[leaf].float().reshape(1)
        return 1 / whole if self.format.divided else whole

    def _by_rows(self, layout: PartLayout, arrived: Mapping[str, Tensor]) -> Tensor:
        """A part with its integers unpacked, outputs first."""
        tensor = arrived[layout.leaf]
        if tensor.dtype == torch.int8:
            tensor = tensor.view(torch.uint8) ^ 128
        for dim, (axis, per) in enumerate(layout.axes):
            if per > 1:
                tensor = unpack(tensor, dim, self.format.scheme.bits, self.format.nibble_order if axis == "n" else None)
        return tensor if layout.axes[0][0] == "n" else tensor.t()

    def _input_order(self, target: str, index: Tensor | None, width: int, shard: TensorShard | None) -> Tensor | None:
        """Inputs sorted by group; None if they are in order. index `[K]`: the group of each input."""
        group = self.format.scheme.group_of(width)
        if index is None or bool((index < 0).all()):
            return None
        in_order = torch.arange(width, device=index.device) // group
        if torch.equal(index.long(), in_order):
            return None
        order = index.argsort(stable=True)
        if not torch.equal(index[order].long(), in_order):
            raise ValueError(
                f"This checkpoint has groups of {target} that are not of {group} inputs each; copy or download it again."
            )
        if shard is not None and shard.dim == 1:
            raise UnsupportedModel(
                f"{target} has its inputs in the order of their activations, and the parts of ranks would split its groups; use "
                "one rank, or a checkpoint without activation order."
            )
        return order
