"""The experts function that transformers' MoE blocks call after `install_experts` has set its name in their config.

The model's router stays. Experts that `torchweave::experts` does not support (a norm after each expert, an unusual gate) use
transformers' grouped matmul, which can be traced too. Blocks outside transformers' experts interface are left to the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import torchweave.ops.moe.experts
import torchweave.ops.moe.quantized_experts  # noqa: F401  (defines torchweave::quantized_experts)
from torchweave.models.attention import UnsupportedModel

NAME = "torchweave"
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
    # functions of torch.nn.functional
    "silu": "silu",
    "gelu": "gelu",
    "relu": "relu",
}
# Classes whose gate is the op's clamped form: attribute names of (alpha, limit).
_CLAMPED_GATES = {"GptOssExperts": ("alpha", "limit")}


_DIVISOR = 16
"""Triton builds a kernel for integers that are divisible by this, and another one."""


def activation_name(act: Any) -> str | None:
    """The op's name of an activation, a module or a function; None if the op does not support it."""
    return _ACTIVATIONS.get(type(act).__name__ if isinstance(act, nn.Module) else getattr(act, "__name__", ""))


def _activation_form(block: Any) -> tuple[str, float, float] | None:
    """(activation, alpha, limit) of a block; None if the op does not support it."""
    if getattr(block, "has_post_expert_norm", False):
        return None
    kind = type(block).__name__
    if kind in _CLAMPED_GATES:
        alpha, limit = (float(getattr(block, name)) for name in _CLAMPED_GATES[kind])
        return "silu", alpha, limit
    has_own_gate = getattr(type(block), "_apply_gate", None).__module__ != "transformers.integrations.moe"
    activation = activation_name(getattr(block, "act_fn", None))
    return None if has_own_gate or activation is None else (activation, 0.0, 0.0)


def experts_forward(block: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states `[T, K]`, top_k_index and top_k_weights `[T, k]` -> `[T, K]`."""
    form = _activation_form(block)
    if form is None:
        if hidden_states.device.type == "meta":  # shapes only: on meta, the grouped matmul supports bfloat16 only
            return torch.empty_like(hidden_states)
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](block, hidden_states, top_k_index, top_k_weights)
    activation, alpha, limit = form
    gated, biased = block.has_gate, block.has_bias
    up = "gate_up_proj" if gated else "up_proj"
    if hasattr(block, "down_proj_scale"):
        return torch.ops.torchweave.quantized_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            getattr(block, up),
            getattr(block, f"{up}_scale"),
            block.down_proj,
            block.down_proj_scale,
            getattr(block, f"{up}_bias") if biased else None,
            block.down_proj_bias if biased else None,
            activation,
            gated,
            not block.is_concatenated,
            alpha,
            limit,
            getattr(block, "weight_group", 0),
            getattr(block, f"{up}_zero", None),
            getattr(block, "down_proj_zero", None),
            getattr(block, f"{up}_row_scale", None),
            getattr(block, "down_proj_row_scale", None),
        )
    return torch.ops.torchweave.experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        getattr(block, up),
        block.down_proj,
        getattr(block, f"{up}_bias") if biased else None,
        block.down_proj_bias if biased else None,
        activation,
        gated,
        not block.is_concatenated,
        block.is_transposed,
        alpha,
        limit,
    )


def is_experts_module(module: nn.Module) -> bool:
    """Whether a module follows transformers' experts interface."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def runs_as_op(block: nn.Module) -> bool:
    """Whether a block runs as `torchweave::experts` instead of transformers' grouped matmul."""
    return _activation_form(block) is not None


def experts_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that follow transformers' experts interface."""
    return [module for module in model.modules() if is_experts_module(module)]


def expert_weights(model: nn.Module) -> dict[str, bool]:
    """Names of the weights of experts that run as the op, and whether they are `[E, in, out]` instead of `[E, out, in]`."""
    found = {}
    for name, block in model.named_modules():
        if is_experts_module(block) and runs_as_op(block):
            for leaf in ("gate_up_proj" if block.has_gate else "up_proj", "down_proj"):
                found[f"{name}.{leaf}"] = bool(block.is_transposed)
    return found


def count_experts(model: nn.Module) -> dict[str, int]:
    """Number of experts blocks that run as the op and as transformers' grouped matmul."""
    forms = [runs_as_op(block) for block in experts_modules(model)]
    return {"op": sum(forms), "grouped_mm": len(forms) - sum(forms)}


def check_dtype(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Reject dtypes for which transformers' grouped matmul reads counts on the host, which breaks CUDA graphs."""
    hooked = any(hasattr(module, "torchweave_grouped_mm") for module in model.modules())
    if device.type == "cuda" and dtype != torch.bfloat16 and (hooked or count_experts(model)["grouped_mm"]):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served in {str(dtype).removeprefix('torch.')} on a GPU: its experts need "
            "a grouped matmul in bfloat16 there; use dtype=bfloat16."
        )


def launch_samples(module: nn.Module, num_tokens: int, *, quantized_only: bool = False) -> None:
    """Run one experts block of each kind on zeros, which compiles the kernels for `num_tokens` tokens."""
    kinds: dict[tuple[Any, ...], Any] = {}
    for block, shared in _with_shared_experts(module):
        top_k = getattr(block.config, "num_experts_per_tok", None)
        if top_k is not None and _activation_form(block) is not None:
            kinds.setdefault((type(block), block.down_proj.shape, top_k, shared), block)
    for (_, shape, top_k, shared), block in kinds.items():
        weight = block.down_proj
        packed = hasattr(block, "down_proj_scale")
        if quantized_only and not packed:
            continue
        if shared:
            _launch_with_shared(block, num_tokens, top_k)
            continue
        width = shape[2] if block.is_transposed and not packed else shape[1]
        dtype = torch.bfloat16 if packed else weight.dtype
        spread = torch.arange(num_tokens * top_k, device=weight.device).view(num_tokens, top_k) % shape[0]
        x = torch.zeros(num_tokens, width, dtype=dtype, device=weight.device)
        experts_forward(block, x, spread, torch.ones_like(spread, dtype=dtype))


def _with_shared_experts(model: nn.Module) -> Iterator[tuple[Any, bool]]:
    """Experts blocks, and whether the compiler's pass `shared_expert` finds a shared expert of their width beside them."""
    for parent in model.modules():
        blocks: list[Any] = [child for child in parent.children() if is_experts_module(child)]
        for block in blocks:
            packed = hasattr(block, "down_proj_scale") or block.is_transposed or block.has_bias
            own = [getattr(getattr(child, "down_proj", None), "weight", None) for child in parent.children()]
            yield (
                block,
                not packed and any(each is not None and each.shape == block.down_proj.shape[1:] for each in own),
            )


def _launch_with_shared(block: Any, num_tokens: int, top_k: int) -> None:
    """Run experts with the last as a shared one: so many that kernels are specialized as for one more than there are."""
    count = block.down_proj.shape[0] + 1 - _DIVISOR
    if count <= top_k:
        return
    up, down = block.gate_up_proj[:count], block.down_proj[:count]
    index = torch.arange(num_tokens * (top_k + 1), device=down.device).view(num_tokens, top_k + 1) % (count - 1)
    index[:, -1] = count - 1
    x = torch.zeros(num_tokens, down.shape[1], dtype=down.dtype, device=down.device)
    weight = torch.ones_like(index, dtype=down.dtype)
    activation = _activation_form(block)[0]  # type: ignore[index]
    torch.ops.torchweave.experts(x, index, weight, up, down, None, None, activation, shared=True)


def install_experts(model: nn.Module) -> None:
    """Make every experts block of the model call `experts_forward`."""
    for block in experts_modules(model):
        block.config._experts_implementation = NAME  # type: ignore[union-attr]


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
