"""One call of an attention op as a value, and its dispatch to the backend step that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from torchweave.ops.quant.fp8 import FP8, GROUP, PER_TOKEN, fp8_quant
from torchweave.ops.rope import Rotary


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments of `torchweave::attention`, in the order of its schema, and `out_scale` of `torchweave::attention_fp8`.

    Attributes:
        q: `[T, H, D]`. Query head h reads key head `h // (H // KH)`.
        k: `[T, KH, D]`.
        v: `[T, KH, Dv]`; Dv may differ from D.
        out: contiguous `[T, H, Dv]`, written whole; of q's dtype, or e4m3: then the result is rounded to q's dtype and
            quantized as by `torchweave::fp8_quant`, with `given_scale` or into `out_scale`.
        layer: index of the engine's KV cache for this call; the eager reference ignores it.
        scale: factor of the scores.
        window: sliding window: a query attends to keys with `q_pos - k_pos < window`; 0 for all keys.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.
        sinks: `[H]` logits added to the denominator of the softmax.
        chunk: chunked attention (Llama 4): keys with `k_pos // chunk == q_pos // chunk`; 0 for all keys.
        cos, sin: `[..., T, R]`: apply `torchweave::rope` to q and k first; None if q and k are rotated already.
        q_weight, k_weight, norm_eps, norm_offset, norm_wide: the RMSNorm before it, as in `torchweave::qk_norm_rope`.
        given_scale: float32 `[1]`, the static scale of an e4m3 `out`.
        out_scale: float32 `[ceil(H * Dv / 128), T]`, written whole: the group scales of an e4m3 `out`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunk: int = 0
    cos: Tensor | None = None
    sin: Tensor | None = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    norm_wide: bool = False
    given_scale: Tensor | None = None
    out_scale: Tensor | None = None

    @property
    def rotary(self) -> Rotary | None:
        """Rotary embedding, with its norm, that q and k still need; None if they are rotated already."""
        assert (self.cos is None) == (self.sin is None), "attention takes both cos and sin, or neither"
        if self.cos is None or self.sin is None:
            return None
        norm = (self.q_weight, self.k_weight, self.norm_eps, self.norm_offset, self.norm_wide)
        return Rotary(self.cos, self.sin, *norm)

    @property
    def quantized(self) -> bool:
        """Whether the result is quantized, with a static scale or with group scales."""
        return self.given_scale is not None or self.out_scale is not None

    def with_rope_applied(self) -> AttentionCall:
        """The same call with q and k rotated, and normed where it has weights."""
        rotary = self.rotary
        if rotary is None:
            return self
        q, k = rotary.apply_rotary(self.q, self.k)
        return replace(self, q=q, k=k, cos=None, sin=None)

    def without_quantization(self) -> AttentionCall:
        """The same call into a new `out` of q's dtype."""
        out = torch.empty(self.out.shape, dtype=self.q.dtype, device=self.q.device)
        return replace(self, out=out, given_scale=None, out_scale=None)

    def quantize(self, result: Tensor) -> None:
        """Quantize `result` `[T, H, Dv]` into `out`, as `torchweave::fp8_quant` does."""
        assert (self.out_scale is None) != (self.given_scale is None), "a quantized result has one kind of scale"
        group = PER_TOKEN if self.out_scale is None else GROUP
        q, scale = fp8_quant(result.reshape(result.shape[0], -1), group, self.given_scale)
        self.out.flatten(1).copy_(q)
        if self.out_scale is not None:
            self.out_scale.copy_(scale)


class LayerKVCache(NamedTuple):
    """KV cache of one layer: `k` is `[num_blocks, block_size, KH, D]`, `v` is `[num_blocks, block_size, KH, Dv]`.

    `k_scale` and `v_scale` are those of an FP8 cache. `group` is the index of the layer's block table: layers with the same
    attention window share it.
    """

    k: Tensor
    v: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    group: int = 0

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.k, self.v


class AttentionStep(Protocol):
    """A backend prepared for the metadata of one step; `forward` is called once per layer.

    Attributes:
        fuses_rope: `forward` takes calls with `cos` and `sin` and applies the rotary embedding itself.
        fuses_quant: `forward` takes calls with a quantized result.
    """

    fuses_rope: ClassVar[bool]
    fuses_quant: ClassVar[bool]

    def forward(self, call: AttentionCall, cache: LayerKVCache) -> None:
        """Write this step's keys and values into `cache`, then the attention of its queries into `call.out`.

        Rows of `out` that belong to padded tokens become zero, and padded tokens write nothing into the cache.
        """
        ...


def run_attention(step: AttentionStep, call: AttentionCall, cache: LayerKVCache) -> None:
    """Run one layer of a step; apply the rotary embedding before it and quantize after it where the step does not fuse them."""
    assert (call.out.dtype == FP8) == call.quantized, "attention writes e4m3 exactly where it is given a scale"
    if call.cos is not None and not step.fuses_rope:
        call = call.with_rope_applied()
    if call.quantized and not step.fuses_quant:
        forward_then_quantize(step, call, cache)
    else:
        step.forward(call, cache)


def forward_then_quantize(step: AttentionStep, call: AttentionCall, cache: LayerKVCache) -> None:
    """Run one layer in q's dtype and quantize its result by a kernel of its own."""
    wide = call.without_quantization()
    step.forward(wide, cache)
    call.quantize(wide.out)


def run_attention_op(
    steps: Sequence[AttentionStep],
    caches: Sequence[LayerKVCache],
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Run an intercepted call of either attention op, by the step of the layer's cache group."""
    if op is torch.ops.torchweave.attention_fp8.default:
        call = AttentionCall(*args[:4], *args[5:], **kwargs, out_scale=args[4])
    else:
        call = AttentionCall(*args, **kwargs)
    cache = caches[call.layer]
    run_attention(steps[cache.group], call, cache)
