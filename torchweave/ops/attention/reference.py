"""Attention in plain torch: the eager reference of the ops, and padded rows for the torch backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torchweave.ops.attention.op import AttentionCall


def causal_attention(call: AttentionCall) -> None:
    """Eager reference of both attention ops: the tokens of the call are one sequence, and no cache is involved."""
    wide = call.with_rope_applied()
    positions = torch.arange(wide.q.shape[0], device=wide.q.device)[None]
    bias = None
    if wide.window or wide.chunk or wide.alibi_slopes is not None:
        bias = additive_mask(positions, positions, wide.window, wide.chunk, wide.q.dtype)
    if wide.alibi_slopes is not None:
        assert bias is not None
        bias = bias + alibi_bias(positions, positions, wide.alibi_slopes, wide.q.dtype)
    q, k, v = wide.q[None], wide.k[None], wide.v[None]
    result = padded_attention(q, k, v, bias, scale=wide.scale, softcap=wide.softcap, sinks=wide.sinks)[0]
    gated = call.apply_gate(result.flatten(1, 2).to(call.q.dtype))
    if call.quantized:
        call.quantize(gated)
    else:
        call.out.copy_(gated)


def additive_mask(q_pos: Tensor, k_pos: Tensor, window: int, chunk: int, dtype: torch.dtype) -> Tensor:
    """Additive mask `[rows, 1, N, L]` from positions `[rows, N]` and `[rows, L]`: 0 where a key is seen, else -inf."""
    q, k = q_pos[:, :, None], k_pos[:, None, :]
    visible = k <= q
    if window:
        visible = visible & (q - k < window)
    if chunk:
        visible = visible & (k >= q // chunk * chunk)
    return torch.where(visible, 0.0, float("-inf")).to(dtype)[:, None]


def alibi_bias(q_pos: Tensor, k_pos: Tensor, slopes: Tensor, dtype: torch.dtype) -> Tensor:
    """ALiBi `[rows, H, N, L]`: `-slope * (q_pos - k_pos)` from positions `[rows, N]` and `[rows, L]` and slopes `[H]`."""
    distance = q_pos[:, None, :, None] - k_pos[:, None, None, :]
    return (distance * -slopes.to(torch.promote_types(dtype, torch.float32))[None, :, None, None]).to(dtype)


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention of padded rows: `q [R, N, H, D]`, `k [R, L, KH, D]`, `v [R, L, KH, Dv]` to `[R, N, KH, H // KH, Dv]`.

    `bias` is `[R, 1 or H, N, L]`, -inf where a key is not seen; None if N == L and the rows are causal. The result may be a
    strided view, which the caller copies.
    """
    rows, queries, heads, _ = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if softcap == 0.0 and sinks is None:
        if queries == 1 and bias is not None and bias.shape[1] == 1:
            # Query heads that share a key head become queries of one head, which saves repeating the keys.
            packed = q.view(rows, kv_heads, group, -1)
            result = F.scaled_dot_product_attention(packed, k, v, attn_mask=bias, scale=scale)
            return result[:, None]
        result = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=group > 1
        )
        return result.transpose(1, 2).unflatten(2, (kv_heads, group))
    return _eager_attention(q, k, v, bias, scale, softcap, sinks)


def _eager_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """`padded_attention` with explicit scores; `k` and `v` are `[R, KH, L, .]`."""
    rows, queries, heads, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    wide = torch.promote_types(q.dtype, torch.float32)
    packed = (
        q.view(rows, queries, kv_heads, group, -1).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * queries, -1)
    )
    scores = torch.matmul(packed.to(wide) * scale, k.to(wide).transpose(-1, -2))
    scores = scores.view(rows, kv_heads, group, queries, keys)
    if softcap > 0.0:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is None:
        scores = scores + torch.full((queries, keys), float("-inf"), dtype=wide, device=q.device).triu(1)
    else:
        assert bias.shape[1] == 1, "ALiBi is not combined with a soft cap or sinks"
        scores = scores + bias[:, :, None]
    if sinks is not None:
        sink = sinks.to(wide).view(1, kv_heads, group, 1, 1).expand(rows, -1, -1, queries, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    result = torch.matmul(weights.reshape(rows, kv_heads, group * queries, keys), v.to(wide))
    return result.view(rows, kv_heads, group, queries, -1).permute(0, 3, 1, 2, 4)
