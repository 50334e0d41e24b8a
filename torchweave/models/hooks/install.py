"""Instance hooks by the name of a module's class, and the padding check of transformers.

Each hook sets a bound method on one module. Classes, and so other models of the process, stay unchanged.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchweave.models.hooks.attention import ATTENTION_FORWARD_OF, ATTENTION_HOOKS
from torchweave.models.hooks.experts import EXPERT_HOOKS
from torchweave.models.hooks.positions import POSITION_FORWARD_OF, POSITION_HOOKS


def _gaussian_topk(module: Any, inputs: Tensor) -> Tensor:
    """Gemma 3n's activations above a quantile of a normal distribution; the original computes the quantile in each forward."""
    mean, std = torch.mean(inputs, dim=-1, keepdim=True), torch.std(inputs, dim=-1, keepdim=True, unbiased=False)
    return torch.relu(inputs - (mean + std * module.torchweave_quantile))


def _hook_gemma3n_mlp(module: Any) -> None:
    if module.activation_sparsity > 0.0:
        quantile = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(module.activation_sparsity))
        module.torchweave_quantile = float(quantile.to(module.gate_proj.weight.dtype))
        module._gaussian_topk = types.MethodType(_gaussian_topk, module)


_HOOKS_BY_CLASS: dict[str, Callable[[nn.Module], None]] = {
    "Gemma3nTextMLP": _hook_gemma3n_mlp,
    **ATTENTION_HOOKS,
    **EXPERT_HOOKS,
    **POSITION_HOOKS,
}
_FORWARD_OF_CLASS = ATTENTION_FORWARD_OF | POSITION_FORWARD_OF


def hook_attention(model: nn.Module) -> list[str]:
    """Install the ops where attention, experts or positions bypass transformers' interfaces; returns the hooked classes."""
    hooked = set()
    for module in model.modules():
        name = type(module).__name__
        if name in _HOOKS_BY_CLASS:
            _HOOKS_BY_CLASS[name](module)
        elif name in _FORWARD_OF_CLASS:
            module.forward = types.MethodType(_FORWARD_OF_CLASS[name], module)
        else:
            continue
        hooked.add(name)
    return sorted(hooked)


def disable_padding_warnings(model: nn.Module) -> None:
    """Disable the check for padding tokens, which reads tensors on the host; the engine does not pad."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _do_nothing  # type: ignore[method-assign]


def _do_nothing(*_: Any) -> None:
    pass
