"""Attention over a paged KV cache: the ops that models call, and the metadata of a step.

The model calls `torchweave::attention`, which writes into a tensor that the model allocated. It is a boundary op: the engine
intercepts it and a backend runs it over the cache (`run_attention_op`). Called directly, without an engine, the
tokens are one sequence and no cache is involved; that is its eager reference.

    step = backend.begin(meta)               once per step, before the model runs
    run_attention(step, call, cache)         once per layer, from the boundary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from torchweave.ops.attention.reference import causal_attention
from torchweave.ops.quant.fp8 import FP8, GROUP, PER_TOKEN, fp8_quant
from torchweave.ops.registry import define_boundary
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
        alibi_slopes: float32 `[H]`: add `-slope * (q_pos - k_pos)` to the scaled scores (ALiBi, arXiv 2108.12409); None for none.
            Not with `softcap`.
        gate: `[T, H, Dv]` of q's dtype: multiply the result, rounded to q's dtype, by its sigmoid; None for none.
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
    alibi_slopes: Tensor | None = None
    gate: Tensor | None = None
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

    def apply_gate(self, result: Tensor) -> Tensor:
        """`result` `[T, H, Dv]` of q's dtype, times the sigmoid of the gate if there is one."""
        return result if self.gate is None else result * self.gate.sigmoid()

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
        fuses_gate: `forward` takes calls with a gate.
    """

    fuses_rope: ClassVar[bool]
    fuses_quant: ClassVar[bool]
    fuses_gate: ClassVar[bool]

    def forward(self, call: AttentionCall, cache: LayerKVCache) -> None:
        """Write this step's keys and values into `cache`, then the attention of its queries into `call.out`.

        Rows of `out` that belong to padded tokens become zero, and padded tokens write nothing into the cache.
        """
        ...


def run_attention(step: AttentionStep, call: AttentionCall, cache: LayerKVCache) -> None:
    """Run one layer of a step; apply the rotary embedding before it, and gate and quantize after it, where the step does not fuse
    them."""
    quantized = call.quantized
    assert (call.out.dtype == FP8) == quantized, "attention writes e4m3 exactly where it is given a scale"
    if call.cos is not None and not step.fuses_rope:
        call = call.with_rope_applied()
    if quantized and not step.fuses_quant:
        forward_then_quantize(step, call, cache)
    elif call.gate is not None and not step.fuses_gate:
        step.forward(replace(call, gate=None), cache)
        call.out.copy_(call.apply_gate(call.out))
    else:
        step.forward(call, cache)


def forward_then_quantize(step: AttentionStep, call: AttentionCall, cache: LayerKVCache) -> None:
    """Run one layer in q's dtype and quantize its result by a kernel of its own."""
    wide = call.without_quantization()
    run_attention(step, wide, cache)
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


def with_layer_offset(op: Any, args: tuple[Any, ...], offset: int) -> tuple[Any, ...]:
    """The arguments of an intercepted call of either attention op, with another `layer`."""
    place = 5 if op is torch.ops.torchweave.attention_fp8.default else 4
    return (*args[:place], args[place] + offset, *args[place + 1 :])


_ARGUMENTS = [field.name for field in fields(AttentionCall) if field.name != "out_scale"]

attention = define_boundary("torchweave::attention", AttentionCall, causal_attention, ("out",), _ARGUMENTS)
"""Causal attention of T tokens, written into `out`; without an engine the T tokens are one sequence."""

# A separate op, because torch 2.11 cannot call an op that mutates an optional argument.
attention_fp8 = define_boundary(
    "torchweave::attention_fp8",
    AttentionCall,
    causal_attention,
    ("out", "out_scale"),
    [*_ARGUMENTS[:4], "out_scale", *_ARGUMENTS[4:-1]],
)
"""`torchweave::attention` into e4m3 with a scale for each 128 channels of a token, written into `out_scale`."""

ATTENTION_OPS = frozenset({torch.ops.torchweave.attention.default, torch.ops.torchweave.attention_fp8.default})
"""The overloads of the ops above."""


@dataclass(frozen=True)
class LayerSpec:
    """Attention of one layer, as the cache and the backends read it.

    Attributes:
        num_kv_heads: KH.
        head_dim: D of queries and keys.
        value_dim: Dv of values.
        num_heads: H, a multiple of KH.
        window: sliding window in tokens; 0 for none.
        chunk: chunk length of chunked local attention; 0 for none.
        softcap: soft cap of the scores; 0 for none.
        sinks: whether the softmax has attention sinks.
        alibi: whether the scores have a bias by distance (ALiBi).
        lookahead: whether tokens may see keys after them (`AttentionMetadata.lookahead`).
        sparse: whether ops in plain torch attend (`torchweave.ops.attention.sparse`): an indexer selects the keys, or the scores
            have a bias by distance.
        index_keys: the cache holds an indexer's keys, or hidden states for a draft head, half of their channels as keys and half as
            values; no attention reads it.
        cache_dtype: FP8 dtype of the cache; None for the model's dtype.
        k_scale, v_scale: scales of an FP8 cache (`torchweave.ops.attention.kv_cache_dtype`).
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int
    num_heads: int
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    lookahead: bool = False
    sparse: bool = False
    index_keys: bool = False
    cache_dtype: torch.dtype | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of a token in this layer's cache, for a model of `dtype`."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * (self.cache_dtype or dtype).itemsize


def hidden_state_layer(hidden_size: int) -> LayerSpec:
    """A layer of the KV cache that holds a model's hidden state of each token, `[hidden_size]`, for a draft head."""
    half = hidden_size // 2
    return LayerSpec(1, half, hidden_size - half, 1, index_keys=True)


@dataclass(frozen=True)
class AttentionMetadata:
    """Rows, tokens and cache slots of one step. The tensors are device tensors, whose addresses a CUDA graph may hold.

    Rows are the sequences of the step: decode rows (one token) first, then prefill rows. Padding rows have slot -1 and sequence
    length 0. Except when `decode_only`, a padding row is empty (`query_start[i] == query_start[i + 1]`) and padded tokens lie
    after `query_start[R]`.

    Attributes:
        slots: int32 `[R]`, the row of the block table of each sequence; -1 for a padding row.
        query_start: int32 `[R + 1]`, the first token of each row. Not read when `decode_only`.
        seq_lens: int32 `[R]`, keys visible to the row's last token of this step: cached and new.
        block_table: int32 `[S, max_blocks_per_seq]`.
        slot_mapping: int64 `[T]`, `block * block_size + offset` of each token's key and value; -1 for a padded token, which
            writes nothing.
        num_rows: R.
        num_tokens: T.
        decode_only: every row has exactly one token, and row i's token is token i.
        max_seq_len: host bound, no less than any of `seq_lens`: kernels are chosen by it, and sparse attention reads so many keys.
        lookahead: int32 `[T]`, how many keys after its own position a token sees, none after its row's last token; the last key
            that a token of a row sees does not decrease from token to token. None: none sees any. Not read when `decode_only`.
    """

    slots: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_rows: int
    num_tokens: int
    decode_only: bool
    max_seq_len: int
    lookahead: Tensor | None = None


class AttentionBackend(Protocol):
    """Implementation of attention over the paged cache.

    Attributes:
        name: as in the configuration.
        supports_mixed_cuda_graphs: a CUDA graph may hold a whole mixed step: the host reads nothing back.
        block_size: preferred number of tokens in a block of the cache.
    """

    name: str
    supports_mixed_cuda_graphs: bool
    block_size: int

    def allocate(
        self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKVCache:
        """Allocate the cache of one layer, and the workspace that the kernels share; not during graph capture."""
        ...

    def begin(self, meta: AttentionMetadata) -> AttentionStep:
        """Prepare one step: compute once all that depends on the rows but not on the layer."""
        ...
