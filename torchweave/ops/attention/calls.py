"""From a call of an attention op that a boundary intercepted to the step of a backend that carries it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweave.ops.attention.op import (
    AttentionStep,
    AttentionVariant,
    FusedQuantStep,
    FusedRopeStep,
    LayerKVCache,
    QuantizedOutput,
    quantize_into,
    rotary_from_args,
)
from torchweave.ops.quant.fp8 import FP8
from torchweave.ops.rope import Rotary


def run_attention(
    step: AttentionStep,
    caches: Sequence[LayerKVCache],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    layer: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    chunk: int = 0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
    given_scale: Tensor | None = None,
    *,
    out_scale: Tensor | None = None,
) -> None:
    """Carry out one intercepted call of `torchweave::attention`, given as the op's own arguments; or, with `out_scale`, one of
    `torchweave::attention_fp8`."""
    variant = AttentionVariant(scale, window, softcap, sinks, chunk)
    rotary = rotary_from_args(cos, sin, q_weight, k_weight, norm_eps, norm_offset, norm_wide)
    if out.dtype != FP8:
        dispatch_forward(step, rotary, q, k, v, out, caches[layer], variant)
        return
    target = QuantizedOutput(out, out_scale, given_scale)
    if isinstance(step, FusedQuantStep):
        step.forward_quantized(target, rotary, q, k, v, caches[layer], variant)
    else:
        forward_then_quantize(step, target, rotary, q, k, v, caches[layer], variant)


def run_attention_op(
    steps: Sequence[AttentionStep],
    caches: Sequence[LayerKVCache],
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Carry out one intercepted call of either op, with the step of the layer's group."""
    before, rest, scales = args[:4], args[4:], {}
    if op is torch.ops.torchweave.attention_fp8.default:
        rest, scales = args[5:], {"out_scale": args[4]}
    layer = kwargs["layer"] if "layer" in kwargs else rest[0]
    run_attention(steps[caches[layer].group], caches, *before, *rest, **kwargs, **scales)


def dispatch_forward(
    step: AttentionStep,
    rotary: Rotary | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cache: LayerKVCache,
    variant: AttentionVariant,
) -> None:
    """One layer of a step, queries and keys turned by the step or before it."""
    if rotary is None:
        step.forward(q, k, v, out, cache, variant)
    elif isinstance(step, FusedRopeStep):
        step.forward_with_rope(rotary, q, k, v, out, cache, variant)
    else:
        step.forward(*rotary.apply_rotary(q, k), v, out, cache, variant)


def forward_then_quantize(
    step: AttentionStep,
    target: QuantizedOutput,
    rotary: Rotary | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: LayerKVCache,
    variant: AttentionVariant,
) -> None:
    """One layer of a step that does not quantise: its result in q's dtype, and that quantised."""
    wide = torch.empty(target.q.shape, dtype=q.dtype, device=q.device)
    dispatch_forward(step, rotary, q, k, v, wide, cache, variant)
    quantize_into(target, wide)
