"""Instance hooks by the name of a module's class, and the padding check of transformers.

Each hook sets a bound method on one module. Classes, and so other models of the process, stay unchanged.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchweave.models.hooks.attention import ATTENTION_FORWARD_OF, ATTENTION_HOOKS
from torchweave.models.hooks.experts import EXPERT_HOOKS
from torchweave.models.hooks.positions import POSITION_FORWARD_OF, POSITION_HOOKS
from torchweave.plug_points import MODEL_HOOKS


def _gaussian_topk(module: Any, inputs: Tensor) -> Tensor:
    """Gemma 3n's activations above a quantile of a normal distribution; the original computes the quantile in each forward."""
    mean, std = torch.mean(inputs, dim=-1, keepdim=True), torch.std(inputs, dim=-1, keepdim=True, unbiased=False)
    return torch.relu(inputs - (mean + std * module.torchweave_quantile))


def _hook_gemma3n_mlp(module: Any) -> None:
    if module.activation_sparsity > 0.0:
        quantile = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(module.activation_sparsity))
        module.torchweave_quantile = float(quantile.to(module.gate_proj.weight.dtype))
        module._gaussian_topk = types.MethodType(_gaussian_topk, module)


def _set_forward(forward: Callable[..., Any], module: Any) -> None:
    module.forward = types.MethodType(forward, module)


_HOOKS_BY_CLASS: dict[str, Callable[[Any], None]] = {
    "Gemma3nTextMLP": _hook_gemma3n_mlp,
    **{name: partial(_set_forward, forward) for name, forward in (ATTENTION_FORWARD_OF | POSITION_FORWARD_OF).items()},
    **ATTENTION_HOOKS,
    **EXPERT_HOOKS,
    **POSITION_HOOKS,
}
for _name, _hook in _HOOKS_BY_CLASS.items():
    MODEL_HOOKS.register(_name, _hook)


def hook_attention(model: nn.Module, plugins: Sequence[str] | None = None) -> list[str]:
    """Install the ops where attention, experts or positions bypass transformers' interfaces; returns the hooked classes.

    A package's hook replaces Torchweave's for the same class. `plugins`: see `EngineConfig.plugins`.
    """
    hooks, hooked = dict(MODEL_HOOKS.installed(plugins)), set()
    for module in model.modules():
        name = type(module).__name__
        if name in hooks:
            hooks[name](module)
            hooked.add(name)
    return sorted(hooked)


def disable_padding_warnings(model: nn.Module) -> None:
    """Disable the check for padding tokens, which reads tensors on the host; the engine does not pad."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _do_nothing  # type: ignore[method-assign]


def _do_nothing(*_: Any) -> None:
    pass
