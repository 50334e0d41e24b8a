"""Linears in FP8: which of a model become so, how a weight is quantised as it is loaded, and the module that takes its place.

A weight comes to the device in the model's dtype, is quantised there and forgotten, before the next one comes: no whole model in
16 bits is ever on the device. Numerics: `torchweave.ops.quant.fp8` and `torchweave.ops.quant.fp8_linear`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import torchweave.ops.quant.fp8_linear  # noqa: F401  (defines torchweave::fp8_linear)
from torchweave.models.weights.read import set_tensor
from torchweave.ops.quant.fp8 import FP8, GROUP, PER_TOKEN, scale_from_amax, to_fp8
from torchweave.ops.quant.fp8_linear import block_scales, supports_weight_shape
from torchweave.report import Report

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "block_sparse_moe_gate"})
_LAYER = re.compile(r"\.\d+\.")
DUMMY_INPUT_SCALE = 0.02
"""Static scale of activations where there is no checkpoint: that of numbers up to 9, as norms leave them."""


@dataclass(frozen=True)
class QuantScheme:
    """How weights and activations of linears are quantised.

    Attributes:
        weights: a weight has one scale, one for each row (output channel), or one for each block of 128 x 128.
        static: activations have one scale that the checkpoint brings; else it is found for each token, or with blocks for
            each 128 channels of a token, as the model runs.
    """

    weights: Literal["tensor", "channel", "block"]
    static: bool = False

    @property
    def name(self) -> str:
        """As the option `quantization` names it; `_static` behind it for what only checkpoints have."""
        return f"fp8_per_{self.weights}" + ("_static" if self.static else "")

    @property
    def group(self) -> int:
        """`group` of `torchweave::fp8_quant`."""
        return GROUP if self.weights == "block" else PER_TOKEN


def scheme(name: str) -> QuantScheme:
    """The scheme of an option's value; `fp8` is `fp8_per_tensor`."""
    kinds: dict[str, Literal["tensor", "channel", "block"]] = {
        "fp8": "tensor",
        "fp8_per_tensor": "tensor",
        "fp8_per_channel": "channel",
        "fp8_per_block": "block",
    }
    if name not in kinds:
        raise ValueError(f"quantization is {name!r}: expected {', '.join(kinds)}.")
    return QuantScheme(kinds[name])


class Fp8Linear(nn.Module):
    """A linear over FP8 operands, in place of `nn.Linear`.

    Attributes:
        weight: e4m3 `[N, K]`.
        weight_scale: float32 `[N]`, or by block as `torchweave::fp8_linear` takes it.
        input_scale: float32 `[1]`, or None: found as the model runs.
        bias: `[N]` or None.
        group: of `torchweave::fp8_quant`.
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
        """The same over tensors of its own, which stay where they are when a pass moves the model's."""
        return Fp8Linear(self.weight.detach(), self.weight_scale.detach(), self.bias, self.input_scale, self.group)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def distinct_linears(model: nn.Module) -> list[Fp8Linear]:
    """One of a model's FP8 linears for each shape."""
    linears = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    return list({(linear.in_features, linear.out_features): linear for linear in linears}.values())


def quantize_weight(weight: Tensor, quant_scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """weight `[N, K]` as e4m3 and its scales, as `Fp8Linear` keeps them; rounded to nearest."""
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


def select_linears(model: PreTrainedModel, quant_scheme: QuantScheme) -> tuple[list[str], dict[str, list[str]]]:
    """Names of the linears that are quantised, and of those that are not, by reason.

    Raises:
        ValueError: the model has none.
    """
    chosen: list[str] = []
    excluded: dict[str, list[str]] = {}
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            why = _exclusion(name, module, head)
        elif any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            why = "experts of a mixture"
        else:
            continue
        if why is None:
            chosen.append(name)
        else:
            excluded.setdefault(why, []).append(name)
    if not chosen:
        raise ValueError(
            f"quantization={quant_scheme.name}: {type(model).__name__} has no linear layer that it could take."
        )
    return chosen, excluded


def _exclusion(name: str, module: nn.Linear, head: nn.Module | None) -> str | None:
    """Why a linear keeps its dtype, or None."""
    if module is head:
        return "the output layer: its logits decide"
    if name.rpartition(".")[2] in _ROUTERS:
        return "a router: small, and it decides"
    if not supports_weight_shape(module.out_features, module.in_features):
        return "sizes that are no multiples of 16"
    return None


class Quantizer:
    """Puts weights into a model as they arrive, those of chosen linears in FP8, and replaces their modules.

    Args:
        weight_scales, input_scales: what a quantised checkpoint has for each linear, on the CPU; its weights come as e4m3.
            Without, weights are quantised here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        quant_scheme: QuantScheme,
        weight_scales: Mapping[str, Tensor] | None = None,
        input_scales: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.scheme = quant_scheme
        self.stored = weight_scales is not None
        self.linears, self.excluded = select_linears(model, quant_scheme)
        self.weight_scales, self.input_scales = weight_scales or {}, input_scales or {}
        if self.stored:
            self._check(model)
        self._chosen = frozenset(self.linears)

    def _check(self, model: PreTrainedModel) -> None:
        """Only what the checkpoint has in FP8 is; all of that must be a linear that can be."""
        if strange := sorted(set(self.weight_scales) - set(self.linears)):
            raise ValueError(
                f"This checkpoint has {strange[0]} in FP8, which is no linear layer that can be served so "
                f"({next((why for why, names in self.excluded.items() if strange[0] in names), type(model).__name__)})."
            )
        left = [name for name in self.linears if name not in self.weight_scales]
        if left:
            self.excluded["not quantised in the checkpoint"] = left
        self.linears = [name for name in self.linears if name in self.weight_scales]
        if self.scheme.static and (without := [name for name in self.linears if name not in self.input_scales]):
            raise ValueError(f"This checkpoint promises static scales of activations, but {without[0]} has none.")

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Tensors that come in another dtype than the model's."""
        return {f"{name}.weight": FP8 for name in self.linears} if self.stored else {}

    def set_tensor(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """Make `tensor`, which is on its device, the parameter or buffer called `name`."""
        owner, _, leaf = name.rpartition(".")
        if owner in self._chosen and leaf == "weight":
            self._replace(model, owner, tensor)
        else:
            set_tensor(model, name, tensor)

    def _replace(self, model: nn.Module, name: str, weight: Tensor) -> None:
        linear: Any = model.get_submodule(name)
        device = weight.device
        if self.stored:
            scale = layout_scales(self.weight_scales[name].to(device), weight.shape, self.scheme, name)
        else:
            weight, scale = quantize_weight(weight, self.scheme)
        given = None
        if self.scheme.static:
            found = self.input_scales.get(name, torch.tensor(DUMMY_INPUT_SCALE))
            given = found.to(device, torch.float32).reshape(1)
        replacement = Fp8Linear(weight, scale, linear.bias, given, self.scheme.group).eval()
        replacement._forward_hooks.update(linear._forward_hooks)  # what is done with the result stays to be done
        model.set_submodule(name, replacement)

    def apply(self, model: nn.Module, device: torch.device) -> None:
        """Quantise a model that has its weights already, moving one weight at a time."""
        for name in self.linears:
            self.set_tensor(model, f"{name}.weight", model.get_parameter(f"{name}.weight").data.to(device))

    def report_summary(self, model: nn.Module, report: Report) -> None:
        """Report what was quantised and what was not, layers of one kind together."""
        modules = [model.get_submodule(name) for name in self.linears]
        report.event(
            "quantized",
            scheme=self.scheme.name,
            source="checkpoint" if self.stored else "weights as they were loaded",
            linears=len(self.linears),
            parameters=sum(module.weight.numel() for module in modules),  # type: ignore[union-attr]
            excluded={why: sorted({_LAYER.sub(".*.", name) for name in names}) for why, names in self.excluded.items()},
        )


def layout_scales(scale: Tensor, shape: torch.Size, quant_scheme: QuantScheme, name: str) -> Tensor:
    """A checkpoint's scales of a weight of `shape`, float32, as `Fp8Linear` keeps them.

    Raises:
        ValueError: there are more or fewer than the scheme says.
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
