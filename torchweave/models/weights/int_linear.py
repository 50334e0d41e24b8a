"""Linears with packed weights (4- or 8-bit integers, MXFP4, NVFP4): the scheme, the module, and quantization at load time.

Activations keep 16 bits, or have 8 in W8A8 and 4 in NVFP4's W4A4. Numerics and layout: `torchweave.ops.quant.int_linear`.
Checkpoints: `torchweave.models.weights.packed_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchweave.models.experts import runs_as_op
from torchweave.models.weights.formats import QuantizationFormat
from torchweave.models.weights.quantize import Quantizer
from torchweave.models.weights.read import set_tensor
from torchweave.ops.quant.int8_linear import MANY_ROWS
from torchweave.ops.quant.int_linear import launch_samples, num_groups, pack_int4
from torchweave.ops.quant.mxfp4 import MX_BLOCK, quantize_mxfp4
from torchweave.ops.quant.nvfp4 import BLOCK, dequantize_fp4, fp4_scale_from_amax, quantize_fp4

if TYPE_CHECKING:
    from torchweave.models.weights.packed_experts import PackedExpertReader

PER_CHANNEL = 0


@dataclass(frozen=True)
class IntScheme:
    """Weight-only quantization to integers, or to 4-bit floating-point numbers.

    Attributes:
        bits: 4 or 8.
        group: inputs that share a scale; 0: one scale per row (output channel).
        code: "int", or the format of e2m1 numbers.
        activations: "int8", rounded token by token (W8A8); "fp4", rounded with a scale for each 16 inputs (W4A4); None: 16 bits.
    """

    bits: int = 4
    group: int = 128
    code: Literal["int", "mxfp4", "nvfp4"] = "int"
    activations: Literal["int8", "fp4"] | None = None
    static = False  # no scale of activations is calibrated, but for W4A4, whose scales arrive with the weights

    @property
    def name(self) -> str:
        """Value of the option `quantization`, or of a checkpoint."""
        if self.activations is not None:
            return "w8a8_int8" if self.activations == "int8" else "nvfp4_w4a4"
        if self.code != "int":
            return self.code
        return f"int{self.bits}_per_channel" if self.group == PER_CHANNEL else f"int{self.bits}_g{self.group}"

    def group_of(self, width: int) -> int:
        """Inputs that share a scale in a row of `width`."""
        return self.group or width

    def quantizer(self, model: PreTrainedModel) -> IntQuantizer:
        """See `Scheme.quantizer`."""
        return IntQuantizer(model, self)


MXFP4, NVFP4 = IntScheme(4, MX_BLOCK, "mxfp4"), IntScheme(4, BLOCK, "nvfp4")
NVFP4_W4A4 = IntScheme(4, BLOCK, "nvfp4", activations="fp4")
INT4_FORMAT, NVFP4_FORMAT = QuantizationFormat(scheme=IntScheme()), QuantizationFormat(scheme=NVFP4)


class IntWeight(NamedTuple):
    """A weight in the layout of `torchweave::int_linear`, with the inputs that share a scale.

    input_scale, float32 `[1]`: `scale` of `torchweave::fp4_quant` for the activations of W4A4.
    """

    w: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    group: int
    row_scale: Tensor | None = None
    input_scale: Tensor | None = None


class IntLinear(nn.Module):
    """A linear with packed weights that replaces `nn.Linear`.

    Attributes:
        weight, weight_scale, weight_zero, input_order, row_scale: the weight, as `torchweave::int_linear` takes it.
        bias: `[N]` or None.
        group: inputs that share a scale.
    """

    weight_scale: Tensor
    weight_zero: Tensor | None
    input_order: Tensor | None
    row_scale: Tensor | None

    def __init__(self, packed: IntWeight, in_features: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.w.shape[0], in_features
        self.weight = nn.Parameter(packed.w, requires_grad=False)
        self.register_buffer("weight_scale", packed.scale)
        self.register_buffer("weight_zero", packed.zero)
        self.register_buffer("input_order", packed.order)
        self.register_buffer("row_scale", packed.row_scale)
        self.bias = bias
        self.group = packed.group

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., K]` -> `[..., N]` of x's dtype."""
        return torch.ops.torchweave.int_linear(
            x,
            self.weight,
            self.weight_scale,
            self.weight_zero,
            self.input_order,
            self.bias,
            self.group,
            self.row_scale,
        )

    def detached(self) -> IntLinear:
        """A copy with its own tensor objects, unaffected when a pass moves the model's tensors."""
        tensors = (self.weight, self.weight_scale, self.weight_zero, self.input_order)
        own = (None if each is None else each.detach() for each in tensors)
        rows = None if self.row_scale is None else self.row_scale.detach()
        inputs = self.input_scale.detach() if isinstance(self, Fp4Linear) else None
        return type(self)(IntWeight(*own, self.group, rows, inputs), self.in_features, self.bias)  # type: ignore[arg-type]

    def launch_samples(self, x: Tensor) -> None:
        """Launch the kernels of this linear, and of one that it is merged into, for x `[T, K]`."""
        weight = (self.weight, self.weight_scale, self.weight_zero, self.input_order)
        launch_samples(x, *weight, self.bias, self.group, self.row_scale)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Linear(IntLinear):
    """A linear with weights and activations in 8 bits; see `torchweave::int8_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., K]` -> `[..., N]` of x's dtype."""
        return torch.ops.torchweave.int8_linear(x, self.weight, self.weight_scale, self.bias)

    def launch_samples(self, x: Tensor) -> None:
        """Launch the kernels of this linear, and of one that it is merged into, for x `[T, K]`."""
        self.forward(x)
        wide = self.weight.new_empty(MANY_ROWS, self.in_features)
        torch.ops.torchweave.int8_linear(x, wide, self.weight_scale.new_empty(MANY_ROWS, 1), None)


class Fp4Linear(IntLinear):
    """A linear of NVFP4 weights whose activations are rounded to NVFP4 (W4A4) and dequantized: `torchweave::fp4_quant`."""

    input_scale: Tensor

    def __init__(self, packed: IntWeight, in_features: int, bias: nn.Parameter | None) -> None:
        super().__init__(packed, in_features, bias)
        self.register_buffer("input_scale", packed.input_scale)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., K]` -> `[..., N]` of x's dtype."""
        q, s = torch.ops.torchweave.fp4_quant(x, self.input_scale)
        return super().forward((dequantize_fp4(q, s, torch.float32) * self.input_scale).to(x.dtype))

    def launch_samples(self, x: Tensor) -> None:
        """Launch the kernels of this linear for x `[T, K]`."""
        torch.ops.torchweave.fp4_quant(x, self.input_scale)
        super().launch_samples(x)


_LINEARS = {None: IntLinear, "int8": Int8Linear, "fp4": Fp4Linear}
"""The module by the format of activations."""


def distinct_int_linears(model: nn.Module) -> list[IntLinear]:
    """One linear with integer weights of the model per shape and kind of weight."""
    kinds: dict[tuple[Any, ...], IntLinear] = {}
    for module in model.modules():
        if isinstance(module, IntLinear):
            present = tuple(each is None for each in (module.weight_zero, module.input_order, module.bias))
            dtypes = (module.weight.dtype, module.weight_scale.dtype)
            kinds.setdefault((module.in_features, module.out_features, *dtypes, module.group, *present), module)
    return list(kinds.values())


def quantize_int_weight(weight: Tensor, scheme: IntScheme) -> IntWeight:
    """Round weight `[N, K]` to the nearest of 2 ** bits equidistant numbers per group, without zero points, or to FP4."""
    if scheme.code != "int":
        return _quantize_fp4_weight(weight, scheme)
    group, width, middle = scheme.group_of(weight.shape[1]), weight.shape[1], 1 << (scheme.bits - 1)
    groups = nn.functional.pad(weight.float(), (0, -width % group)).unflatten(1, (-1, group))
    scale = (groups.abs().amax(2) / (middle - 0.5)).clamp(min=torch.finfo(torch.float16).tiny).to(weight.dtype)
    q = (groups / scale.float()[..., None]).round_().clamp_(-middle, middle - 1).flatten(1)[:, :width]
    return to_layout((q + middle).to(torch.uint8), scale, None, None, scheme)


def _quantize_fp4_weight(weight: Tensor, scheme: IntScheme) -> IntWeight:
    rows, width = weight.shape
    padded, row_scale = nn.functional.pad(weight.float(), (0, -width % scheme.group)), None
    if scheme.code == "mxfp4":
        q, scale = quantize_mxfp4(padded)
    else:
        whole = fp4_scale_from_amax(padded.abs().amax())
        q, scale = quantize_fp4(padded, whole)
        row_scale = whole.expand(rows)
    codes = torch.stack((q & 15, q >> 4), -1).flatten(1)[:, :width]
    return to_layout(codes, scale, None, None, scheme, row_scale)


def to_layout(
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    order: Tensor | None,
    scheme: IntScheme,
    row_scale: Tensor | None = None,
) -> IntWeight:
    """Pack unsigned integers, or e2m1 codes, q uint8 `[N, K]` for the kernels."""
    w = pack_int4(q) if scheme.bits == 4 else (q ^ 128).view(torch.int8)
    points, rows = (None if each is None else each.contiguous() for each in (zero, row_scale))
    return IntWeight(w, scale.contiguous(), points, order, scheme.group_of(q.shape[1]), rows)


def store_experts(model: nn.Module, name: str, packed: IntWeight) -> None:
    """Set the parameter `name` of experts to packed weights; group 0: one scale a row."""
    set_tensor(model, name, packed.w)
    owner, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(owner)
    for kind, each in (("scale", packed.scale), ("zero", packed.zero), ("row_scale", packed.row_scale)):
        module.register_buffer(f"{leaf}_{kind}", each)
    module.weight_group = packed.group


class IntQuantizer(Quantizer):
    """A `TensorSetter` that replaces linears by `IntLinear`, and stores packed experts.

    Args:
        stored: weights of a quantized checkpoint by linear, filled while it is read; None: quantize weights here.
        names: linears that are quantized in the checkpoint.
        experts: its packed experts.
    """

    scheme: Any

    def __init__(
        self,
        model: PreTrainedModel,
        scheme: IntScheme,
        stored: dict[str, IntWeight] | None = None,
        names: Mapping[str, Any] | None = None,
        experts: PackedExpertReader | None = None,
    ) -> None:
        targets = frozenset() if experts is None else experts.targets
        scales: Any = dict.fromkeys(targets)  # their scales arrive with the weights
        super().__init__(model, scheme, names if stored is not None else None, expert_scales=scales)  # type: ignore[arg-type]
        self._packed, self._experts = stored, experts

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {}

    def set_tensor(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """Set the parameter or buffer `name` to a tensor on its final device."""
        if self._experts is None or name not in self._experts.targets:
            super().set_tensor(model, name, tensor)
            return
        owner, _, _ = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        if module.is_transposed or not runs_as_op(module):
            raise ValueError(f"This checkpoint has {name} packed, which is not supported for {type(module).__name__}.")
        store_experts(model, name, self._experts.merged.pop(name))

    def round_experts(self, model: nn.Module, name: str, weight: Tensor) -> None:
        parts = [quantize_int_weight(each, self.scheme) for each in weight]
        w, scale = torch.stack([each.w for each in parts]), torch.stack([each.scale for each in parts])
        rows = [each.row_scale for each in parts if each.row_scale is not None]
        row_scale = torch.stack(rows) if rows else None
        store_experts(model, name, IntWeight(w, scale, None, None, self.scheme.group, row_scale))

    def make_linear(self, name: str, linear: Any, weight: Tensor) -> nn.Module:
        packed = quantize_int_weight(weight, self.scheme) if self._packed is None else self._packed.pop(name)
        assert packed.scale.shape[1] == num_groups(linear.in_features, packed.group)
        return _LINEARS[self.scheme.activations](packed, linear.in_features, linear.bias)
