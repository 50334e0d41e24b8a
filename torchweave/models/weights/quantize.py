"""FP8 linears: selection, quantization at load time, and the module that replaces `nn.Linear`.

Each weight is quantized on the device before the next one arrives, so the device never holds the whole 16-bit model. Numerics:
`torchweave.ops.quant.fp8` and `torchweave.ops.quant.fp8_linear`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import torchweave.ops.quant.fp8_linear  # noqa: F401  (defines torchweave::fp8_linear)
from torchweave.models.experts import expert_weights, runs_as_op
from torchweave.models.multimodal.support import decoder_of
from torchweave.models.weights.formats import QuantizationFormat
from torchweave.models.weights.read import CheckpointTensor, set_tensor
from torchweave.ops.quant.fp8 import FP8, GROUP, PER_TOKEN, has_nan, scale_from_amax, to_fp8
from torchweave.ops.quant.fp8_linear import block_scales, supports_weight_shape
from torchweave.report import Report

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "block_sparse_moe_gate"})
_LAYER = re.compile(r"\.\d+\.")
DUMMY_INPUT_SCALE = 0.02
"""Static activation scale without a checkpoint: for values up to 9, as after norms."""


@dataclass(frozen=True)
class QuantScheme:
    """Quantization scheme of linears.

    Attributes:
        weights: scales per weight, per row (output channel), or per block of 128 x 128.
        static: activations have a scale from the checkpoint; else scales are computed per token at run time, or per 128
            channels of a token for block weights.
    """

    weights: Literal["tensor", "channel", "block"]
    static: bool = False

    @property
    def name(self) -> str:
        """Value of the option `quantization`; the suffix `_static` occurs in checkpoints only."""
        return f"fp8_per_{self.weights}" + ("_static" if self.static else "")

    @property
    def group(self) -> int:
        """Argument `group` of `torchweave::fp8_quant`."""
        return GROUP if self.weights == "block" else PER_TOKEN

    @property
    def scheme(self) -> QuantScheme:
        """See `StoredFormat.scheme`."""
        return self

    def collect(self, folder: Path, stored: dict[str, CheckpointTensor]) -> None:
        """See `StoredFormat.collect`: weights are whole, beside their scales."""

    def quantizer(self, model: PreTrainedModel) -> Quantizer:
        """See `Scheme.quantizer`."""
        return Quantizer(model, self)


FP8_PER_TENSOR, FP8_PER_CHANNEL, FP8_PER_BLOCK = (
    QuantizationFormat(scheme=QuantScheme(weights)) for weights in ("tensor", "channel", "block")
)


class Fp8Linear(nn.Module):
    """A linear with FP8 operands that replaces `nn.Linear`.

    Attributes:
        weight: e4m3 `[N, K]`.
        weight_scale: float32 `[N]`, or by block as `torchweave::fp8_linear` takes it.
        input_scale: float32 `[1]`; None: computed at run time.
        bias: `[N]` or None.
        group: argument of `torchweave::fp8_quant`.
    """

    weight_scale: Tensor
    input_scale: Tensor | None

    def __init__(
        self, weight: Tensor, weight_scale: Tensor, bias: nn.Parameter | None, input_scale: Tensor | None, group: int
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("input_scale", input_scale)
        self.bias = bias
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., K]` -> `[..., N]` of x's dtype."""
        q, scale = torch.ops.torchweave.fp8_quant(x, self.group, self.input_scale)
        return torch.ops.torchweave.fp8_linear(q, scale, self.weight, self.weight_scale, self.bias, x.dtype)

    def detached(self) -> Fp8Linear:
        """A copy with its own tensor objects, unaffected when a pass moves the model's tensors."""
        return Fp8Linear(self.weight.detach(), self.weight_scale.detach(), self.bias, self.input_scale, self.group)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def distinct_linears(model: nn.Module) -> list[Fp8Linear]:
    """One FP8 linear of the model per shape."""
    linears = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    return list({(linear.in_features, linear.out_features): linear for linear in linears}.values())


def quantize_weight(weight: Tensor, quant_scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """Quantize weight `[N, K]` to e4m3, rounding to nearest; returns it with scales in the layout of `Fp8Linear`."""
    rows, width = weight.shape
    if quant_scheme.weights == "block":
        padded = nn.functional.pad(weight, (0, -width % GROUP, 0, -rows % GROUP))
        blocks = padded.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))  # [N / 128, 128, K / 128, 128]
        scale = scale_from_amax(blocks.abs().amax((1, 3)))
        q = to_fp8(blocks, scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :width]
        return q.contiguous(), block_scales(scale)
    amax = weight.abs().amax(1) if quant_scheme.weights == "channel" else weight.abs().max().expand(rows)
    scale = scale_from_amax(amax).contiguous()
    return to_fp8(weight, scale[:, None]), scale


def select_linears(
    model: PreTrainedModel, quant_scheme: QuantScheme, with_tower: bool = False
) -> tuple[list[str], dict[str, list[str]]]:
    """Names of linears to quantize, and of the other linears by reason.

    Args:
        with_tower: include the vision tower and projector of an image-text model.

    Raises:
        ValueError: the model has no linear to quantize.
    """
    chosen: list[str] = []
    excluded: dict[str, list[str]] = {}
    head = model.get_output_embeddings() or getattr(model, "score", None)
    decoder = {head, *decoder_of(model).modules()}
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            why = _exclusion(name, module, head)
            if not with_tower and module not in decoder:
                why = "the vision tower: rounding costs accuracy, and its weights are read once an image"
        elif any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            why = "experts of a mixture"
        else:
            continue
        if why is None:
            chosen.append(name)
        else:
            excluded.setdefault(why, []).append(name)
    if not chosen:
        raise ValueError(f"quantization={quant_scheme.name}: {type(model).__name__} has no linear layer to quantize.")
    return chosen, excluded


def _exclusion(name: str, module: nn.Linear, head: nn.Module | None) -> str | None:
    """Why a linear is not quantized; None if it is."""
    if module is head:
        return "the output layer: its logits decide"
    if name.rpartition(".")[2] in _ROUTERS:
        return "a router: small, and it decides"
    if not supports_weight_shape(module.out_features, module.in_features):
        return "sizes that are no multiples of 16"
    return None


class Quantizer:
    """A `TensorSetter` that quantizes the selected linears and replaces their modules.

    Args:
        weight_scales, input_scales: scales of a quantized checkpoint by linear, on the CPU; its weights are e4m3. None:
            quantize weights here.
        expert_scales: scales of its experts in e4m3 by parameter, as `torchweave::quantized_experts` takes them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        quant_scheme: QuantScheme,
        weight_scales: Mapping[str, Tensor] | None = None,
        input_scales: Mapping[str, Tensor] | None = None,
        expert_scales: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.scheme = quant_scheme
        self.stored = weight_scales is not None
        self.expert_scales = expert_scales or {}
        self.linears, self.excluded = select_linears(model, quant_scheme, with_tower=self.stored)
        rounded = {} if self.stored else expert_weights(model)
        self.experts = [name for name, transposed in rounded.items() if not transposed]
        quantized = {name.rpartition(".")[0] for name in (*self.expert_scales, *self.experts)}
        self.excluded = {
            why: others
            for why, names in self.excluded.items()
            if (others := [name for name in names if name not in quantized])
        }
        self.weight_scales, self.input_scales = weight_scales or {}, input_scales or {}
        if self.stored:
            self._check(model)
        self._chosen, self._rounded = frozenset(self.linears), frozenset(self.experts)

    def _check(self, model: PreTrainedModel) -> None:
        """Restrict the linears to those quantized in the checkpoint, all of which must be supported."""
        if unsupported := sorted(set(self.weight_scales) - set(self.linears)):
            raise ValueError(
                f"This checkpoint has {unsupported[0]} in {self.scheme.name}, which is not a supported linear layer "
                f"({next((why for why, names in self.excluded.items() if unsupported[0] in names), type(model).__name__)})."
            )
        left = [name for name in self.linears if name not in self.weight_scales]
        if left:
            self.excluded["not quantized in the checkpoint"] = left
        self.linears = [name for name in self.linears if name in self.weight_scales]
        if self.scheme.static and (without := [name for name in self.linears if name not in self.input_scales]):
            raise ValueError(f"This checkpoint declares static activation scales, but {without[0]} has none.")

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes that differ from the model's, by tensor name."""
        experts = dict.fromkeys(self.expert_scales, FP8)
        return {f"{name}.weight": FP8 for name in self.linears} | experts if self.stored else {}

    def set_tensor(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """Set the parameter or buffer `name` to a tensor on its final device.

        Raises:
            ValueError: a checkpoint has NaN in the tensor, which kernels of experts would multiply as 480.
        """
        owner, _, leaf = name.rpartition(".")
        if self.stored and tensor.dtype == FP8 and has_nan(tensor):
            raise ValueError(f"This checkpoint has NaN in {name}, in bytes of e4m3; copy or download it again.")
        if owner in self._chosen and leaf == "weight":
            self._replace(model, owner, tensor)
        elif name in self._rounded:
            self.round_experts(model, name, tensor)
        else:
            set_tensor(model, name, tensor)
        if name in self.expert_scales:
            module = model.get_submodule(owner)
            if module.is_transposed or not runs_as_op(module):
                raise ValueError(
                    f"This checkpoint has {name} in FP8, which is not supported for {type(module).__name__}."
                )
            module.register_buffer(f"{leaf}_scale", self.expert_scales[name].to(tensor.device))

    def round_experts(self, model: nn.Module, name: str, weight: Tensor) -> None:
        """Store experts `[E, N, K]` in e4m3 with a scale per output channel, whatever the scheme of linears."""
        scale = scale_from_amax(weight.abs().amax(2, keepdim=True))
        set_tensor(model, name, torch.stack([to_fp8(each, by) for each, by in zip(weight, scale, strict=True)]))
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_buffer(f"{leaf}_scale", scale)

    def _replace(self, model: nn.Module, name: str, weight: Tensor) -> None:
        linear: Any = model.get_submodule(name)
        replacement = self.make_linear(name, linear, weight).eval()
        replacement._forward_hooks.update(linear._forward_hooks)  # e.g. the all-reduce
        model.set_submodule(name, replacement)

    def make_linear(self, name: str, linear: Any, weight: Tensor) -> nn.Module:
        """The module that replaces a linear, from its weight on the final device."""
        device = weight.device
        if self.stored:
            scale = layout_scales(self.weight_scales[name].to(device), weight.shape, self.scheme, name)
        else:
            weight, scale = quantize_weight(weight, self.scheme)
        input_scale = None
        if self.scheme.static:
            stored = self.input_scales.get(name, torch.tensor(DUMMY_INPUT_SCALE))
            input_scale = stored.to(device, torch.float32).reshape(1)
        return Fp8Linear(weight, scale, linear.bias, input_scale, self.scheme.group)

    def apply(self, model: nn.Module, device: torch.device) -> None:
        """Quantize a loaded model, moving one weight at a time to the device."""
        for name in (*(f"{linear}.weight" for linear in self.linears), *self.experts):
            self.set_tensor(model, name, model.get_parameter(name).data.to(device))

    def report_summary(self, model: nn.Module, report: Report) -> None:
        """Report quantized and excluded linears by name pattern."""
        modules = [model.get_submodule(name) for name in self.linears]
        report.event(
            "quantized",
            scheme=self.scheme.name,
            source="checkpoint" if self.stored else "weights as they were loaded",
            linears=len(self.linears),
            parameters=sum(module.in_features * module.out_features for module in modules),  # type: ignore[operator]
            excluded={why: sorted({_LAYER.sub(".*.", name) for name in names}) for why, names in self.excluded.items()},
        )


def layout_scales(scale: Tensor, shape: torch.Size, quant_scheme: QuantScheme, name: str) -> Tensor:
    """A checkpoint's scales of a weight of `shape`, as float32 in the layout of `Fp8Linear`.

    Raises:
        ValueError: the number of scales does not match the scheme.
    """
    rows, width = shape
    scale = scale.float()
    if quant_scheme.weights == "block":
        wanted = (-(-rows // GROUP), -(-width // GROUP))
        if tuple(scale.shape) == wanted:
            return block_scales(scale)
    else:
        wanted = (1,) if quant_scheme.weights == "tensor" else (rows,)
        if scale.numel() == wanted[0]:
            return scale.flatten().expand(rows).contiguous()
    raise ValueError(
        f"{name} has scales of shape {list(scale.shape)}, expected {list(wanted)} for {quant_scheme.name}."
    )
