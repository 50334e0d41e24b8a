"""Sparse attention by an indexer (DeepSeek Sparse Attention): two boundary ops, in plain torch on any device.

`torchweave::sparse_index` scores every key of a request with a few small heads and selects the best positions of each token;
`torchweave::sparse_attention` attends to these. The indexer's keys are one more layer of the paged KV cache
(`LayerSpec.index_keys`): the first half of their channels as its keys, the others as its values, so that blocks are shared,
offloaded and reused as any.

Shapes depend on the step's sizes alone and nothing is read on the host, so both can be captured. Tokens are taken in parts of at
most `PART_BYTES` of gathered keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchweave.ops.attention.kv_cache_dtype import as_indexable, dequantize_kv, quantize_kv
from torchweave.ops.attention.op import AttentionMetadata, LayerKVCache
from torchweave.ops.registry import define

PART_BYTES = 64 << 20
"""Bytes of keys, in float32, that are gathered at once."""


@dataclass(frozen=True, slots=True)
class IndexCall:
    """Arguments of `torchweave::sparse_index`."""

    q: Tensor
    k: Tensor
    weights: Tensor
    indices: Tensor
    layer: int
    scale: float


@dataclass(frozen=True, slots=True)
class SparseCall:
    """Arguments of `torchweave::sparse_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    out: Tensor
    layer: int
    scale: float
    sinks: Tensor | None = None


@define("torchweave::sparse_index", mutates=("indices",), boundary=True)
def sparse_index(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, layer: int, scale: float) -> None:
    """Positions of the K keys with the highest `sum_h weights[h] * relu(scale * q[h] . k)`, for each token.

    Args:
        q: `[T, H, D]`.
        k: `[T, D]`.
        weights: float32 `[T, H]`.
        indices: int32 `[T, K]`, written whole: positions in the request, -1 where it has fewer keys.
        layer: index of the KV cache that holds `k`.
        scale: factor of the products.
    """
    meta, cache = _one_sequence(k[:, None, : k.shape[1] // 2], k[:, None, k.shape[1] // 2 :])
    _run_index(IndexCall(q, k, weights, indices, layer, scale), meta, cache)


@define("torchweave::sparse_attention", mutates=("out",), boundary=True)
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, out: Tensor, layer: int, scale: float, sinks: Tensor | None = None
) -> None:
    """Attention of each token to the keys at `indices`.

    Args:
        q: `[T, H, D]`; k: `[T, KH, D]`; v: `[T, KH, Dv]`.
        indices: int32 `[T, K]`, positions in the request; -1 is no key.
        out: `[T, H, Dv]`, written whole.
        layer: index of the KV cache that holds `k` and `v`.
        scale: factor of the scores.
        sinks: `[H]` logits added to the denominator of the softmax.
    """
    meta, cache = _one_sequence(k, v)
    _run_attention(SparseCall(q, k, v, indices, out, layer, scale, sinks), meta, cache)


SPARSE_OPS = frozenset({torch.ops.torchweave.sparse_index.default, torch.ops.torchweave.sparse_attention.default})
"""The overloads of the ops above."""


def run_sparse_op(
    metas: Sequence[AttentionMetadata],
    caches: Sequence[LayerKVCache],
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Run an intercepted call over the rows of a step, with the metadata of the layer's cache group."""
    if op is torch.ops.torchweave.sparse_index.default:
        index = IndexCall(*args, **kwargs)
        _run_index(index, metas[caches[index.layer].group], caches[index.layer])
    else:
        call = SparseCall(*args, **kwargs)
        _run_attention(call, metas[caches[call.layer].group], caches[call.layer])


def _run_index(call: IndexCall, meta: AttentionMetadata, cache: LayerKVCache) -> None:
    half = cache.k.shape[3]
    _write(cache.k, call.k[:, None, :half], meta.slot_mapping)
    _write(cache.v, call.k[:, None, half:], meta.slot_mapping)
    block_size, num_blocks = cache.k.shape[1], -(-meta.max_seq_len // cache.k.shape[1])
    num_blocks = min(num_blocks, meta.block_table.shape[1])
    length, most = num_blocks * block_size, call.indices.shape[1]
    places = torch.arange(length, device=call.q.device)
    tokens = _TokenRows.of(meta)
    call.indices.fill_(-1)
    for part in _parts(meta.num_tokens, length * call.k.shape[1]):
        blocks = tokens.block_table(part)[:, :num_blocks].flatten()
        keys = torch.cat(
            [tensor.index_select(0, blocks).view(-1, length, tensor.shape[3]) for tensor in (cache.k, cache.v)], -1
        )
        scores = torch.matmul(call.q[part].float(), keys.float().transpose(1, 2)) * call.scale
        scores = torch.matmul(call.weights[part].float()[:, None], scores.relu())[:, 0]
        positions = tokens.positions[part, None]
        # Memory behind a row's keys was perhaps never written and may hold NaN.
        best = scores.masked_fill(places > positions, float("-inf")).topk(min(most, length)).indices
        call.indices[part, : best.shape[1]] = best.masked_fill(best > positions, -1).int()


def _run_attention(call: SparseCall, meta: AttentionMetadata, cache: LayerKVCache) -> None:
    _write(cache.k, quantize_kv(call.k, cache.k.dtype, cache.k_scale), meta.slot_mapping)
    _write(cache.v, quantize_kv(call.v, cache.v.dtype, cache.v_scale), meta.slot_mapping)
    block_size, kv_heads = cache.k.shape[1:3]
    group, tokens = call.q.shape[1] // kv_heads, _TokenRows.of(meta)
    for part in _parts(meta.num_tokens, call.indices.shape[1] * kv_heads * max(call.k.shape[2], call.v.shape[2])):
        indices = call.indices[part].long()
        places = indices.clamp(min=0)
        slots = tokens.block_table(part).gather(1, places // block_size) * block_size + places % block_size
        keys, values = (
            dequantize_kv(_gather(tensor, slots), scale, torch.float32)
            for tensor, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
        )
        queries = call.q[part].float().unflatten(1, (kv_heads, group))
        scores = torch.matmul(queries, keys.permute(0, 2, 3, 1)) * call.scale
        scores = scores.masked_fill((indices < 0)[:, None, None], float("-inf"))
        if call.sinks is not None:
            sinks = call.sinks.float().view(1, kv_heads, group, 1).expand(len(scores), -1, -1, -1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        result = torch.matmul(weights, values.transpose(1, 2)).flatten(1, 2)
        call.out[part] = result.masked_fill(~tokens.valid[part, None, None], 0.0).to(call.out.dtype)


# -- rows and caches ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TokenRows:
    """Row and position of each token of a step, on its device.

    Attributes:
        positions: `[T]`, in the request; 0 for padded tokens.
        slots: `[T]`, the row of the block table; 0 for padded tokens.
        valid: `[T]`, False for padded tokens.
    """

    positions: Tensor
    slots: Tensor
    valid: Tensor
    table: Tensor

    @staticmethod
    def of(meta: AttentionMetadata) -> _TokenRows:
        valid = meta.slot_mapping[: meta.num_tokens] >= 0
        if meta.decode_only:
            positions, slots = meta.seq_lens - 1, meta.slots
        else:
            tokens = torch.arange(meta.num_tokens, device=valid.device)
            ends = meta.query_start[1 : meta.num_rows + 1].long()
            row = torch.searchsorted(ends, tokens, right=True).clamp(max=meta.num_rows - 1)
            positions, slots = meta.seq_lens[row] - ends[row] + tokens, meta.slots[row]
        return _TokenRows(positions.long() * valid, slots.long().clamp(min=0) * valid, valid, meta.block_table)

    def block_table(self, part: slice) -> Tensor:
        """int64 `[n, max_blocks]`, the blocks of a part's tokens; a place without a block names any."""
        return self.table.index_select(0, self.slots[part]).long().clamp(min=0)


def _parts(tokens: int, numbers_per_token: int) -> Iterator[slice]:
    size = max(PART_BYTES // (4 * numbers_per_token), 1)
    return (slice(begin, min(begin + size, tokens)) for begin in range(0, tokens, size))


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Keys or values at cache slots: `[n, K]` -> `[n, K, KH, D]`."""
    flat = as_indexable(cache.flatten(0, 1))
    return flat.index_select(0, slots.flatten()).view(cache.dtype).unflatten(0, slots.shape)


def _write(cache: Tensor, new: Tensor, slot_mapping: Tensor) -> None:
    """Write `[T, KH, D]` to cache slots `[T]`. A padded token, slot -1, repeats the write of the first that is not padded."""
    flat = as_indexable(cache.flatten(0, 1))
    new = as_indexable(new.to(cache.dtype))
    valid = slot_mapping >= 0
    first = valid.int().argmax(0, keepdim=True)
    first_slot = slot_mapping.index_select(0, first).clamp(min=0)
    substitute = torch.where(valid.any(), new.index_select(0, first), flat.index_select(0, first_slot))
    flat.index_copy_(
        0, torch.where(valid, slot_mapping, first_slot), torch.where(valid[:, None, None], new, substitute)
    )


def _one_sequence(k: Tensor, v: Tensor) -> tuple[AttentionMetadata, LayerKVCache]:
    """Metadata and an empty cache of tokens that are one new sequence: one block of as many tokens."""
    tokens, device = k.shape[0], k.device

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    slots = torch.arange(tokens, device=device)
    meta = AttentionMetadata(
        numbers(0), numbers(0, tokens), numbers(tokens), numbers(0)[None], slots, 1, tokens, False, tokens
    )
    return meta, LayerKVCache(torch.zeros_like(k)[None], torch.zeros_like(v)[None])
