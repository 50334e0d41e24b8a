"""Rotary embeddings whose frequencies depend on the length: fixed for the longest sequence that is served."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torchweave.report import Report


def _length_dependent_rope(model: nn.Module) -> Iterator[tuple[str, Any, dict[str | None, str]]]:
    """(name, module, kind by layer type) of rotary embeddings whose frequencies depend on the length."""
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None or not hasattr(module, "config"):
            continue
        by_layer: dict[str | None, str] = dict(kinds) if isinstance(kinds, dict) else {None: kinds}
        varying = {layer: kind for layer, kind in by_layer.items() if "dynamic" in kind or kind == "longrope"}
        if varying:
            yield name, module, varying


def _phimoe_rope_forward(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Phi-3.5-MoE's cosines and sines, each `[1, T, D]`, with the frequencies of the module or those chosen by `freeze_rope`.

    The original forward computes frequencies on the CPU, a copy that a CUDA graph cannot record. With long RoPE it chooses the
    scale by the largest position of the batch and always uses the short factors; the model was published with long factors for
    the long scale.
    """
    angles = position_ids[..., None].float() * module.inv_freq.float()
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling
    return cos.to(x.dtype), sin.to(x.dtype)


def _has_own_scaling(module: nn.Module) -> bool:
    """Whether the module has its own scales (`short_mscale`, `long_mscale`), which its forward selects by position."""
    return type(module).__name__ == "PhimoeRotaryEmbedding"


def disable_dynamic_rope(model: nn.Module) -> None:
    """Stop rotary embeddings from choosing frequencies in each forward; `freeze_rope` sets those that depend on the length."""
    for _, module, _ in _length_dependent_rope(model):
        frozen_forward = _phimoe_rope_forward if _has_own_scaling(module) else inspect.unwrap(type(module).forward)
        module.forward = types.MethodType(frozen_forward, module)
    for module in filter(_has_own_scaling, model.modules()):
        if getattr(module, "rope_type", None) == "default":
            module.forward = types.MethodType(_phimoe_rope_forward, module)


def freeze_rope(model: nn.Module, max_model_len: int, report: Report) -> None:
    """Fix the frequencies of dynamic-NTK and long RoPE for sequences of `max_model_len` tokens.

    transformers chooses them in each forward by the longest sequence of the batch: one request would change another's
    results, and cached and new keys would be rotated by different frequencies.
    """
    short = 0
    for name, module, varying in _length_dependent_rope(model):
        if module.config.rope_parameters.get("alpha"):
            continue  # HunYuan: type "dynamic" with frequencies fixed by alpha
        for layer, kind in varying.items():
            prefix = f"{layer}_" if layer is not None else ""
            extra = {"layer_type": layer} if layer is not None else {}
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, torch.device("cpu"), seq_len=max_model_len, **extra
            )
            if kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer is None else parameters[layer]
                short = max(short, parameters["original_max_position_embeddings"])
                if _has_own_scaling(module):
                    scaling = parameters["long_mscale" if max_model_len > short else "short_mscale"]
            getattr(module, f"{prefix}inv_freq").copy_(frequencies)
            setattr(module, f"{prefix}attention_scaling", scaling)
        report.event("rope_frozen", module=name, kinds=sorted(set(varying.values())), max_model_len=max_model_len)
    if 0 < short < max_model_len:
        why = (
            f"prompts up to {short} tokens use the long factors, where transformers uses the short ones; set max_model_len to "
            f"at most {short} for the short factors"
        )
        report.event("warning", what="LongRoPE", why=why)
