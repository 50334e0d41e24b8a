"""Sparse attention by an indexer, and attention with a bias by distance: boundary ops in plain torch on any device.

`torchweave::sparse_index` (DeepSeek Sparse Attention) scores every key of a request with a few small heads and selects the best
positions of each token, `torchweave::sparse_block_index` (MiniMax M3) the best blocks of keys of each token and KV head;
`torchweave::sparse_attention` attends to these. `torchweave::relative_attention` (Inkling) attends to all keys or a window.

The indexer's keys are one more layer of the paged KV cache (`LayerSpec.index_keys`): the first half of their channels as its keys,
the others as its values, so that blocks are shared, offloaded and reused as any.

Shapes depend on the step's sizes alone and nothing is read on the host, so all can be captured. Tokens are taken in parts of at
most `PART_BYTES` of gathered keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.attention.kv_cache_dtype import as_indexable, dequantize_kv, quantize_kv
from torchweave.ops.attention.op import AttentionMetadata, LayerKVCache
from torchweave.ops.registry import define_boundary

PART_BYTES = 64 << 20
"""Bytes of keys, in float32, that are gathered at once."""


@dataclass(frozen=True, slots=True)
class IndexCall:
    """Arguments of `torchweave::sparse_index`, for each token the positions of the K keys with the highest
    `sum_h weights[h] * relu(scale * q[h] . k)`.

    Attributes:
        q: `[T, H, D]`.
        k: `[T, D]`.
        weights: float32 `[T, H]`.
        indices: int32 `[T, K]`, written whole: positions in the request, -1 where it has fewer keys.
        layer: index of the KV cache that holds `k`.
        scale: factor of the products.
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    indices: Tensor
    layer: int
    scale: float


@dataclass(frozen=True, slots=True)
class BlockIndexCall:
    """Arguments of `torchweave::sparse_block_index`, for each token and head the positions of the blocks with the highest score.

    A block's score is the largest `q[h] . k` of its keys; the blocks next to the token come first.

    Attributes:
        q: `[T, H, D]`, a head for each KV head of the attention.
        k: `[T, D]`.
        indices: int32 `[T, H, B * keys_per_block]`, written whole: positions of the keys of B blocks, -1 where there is no key.
        layer: index of the KV cache that holds `k`.
        keys_per_block: block n has the positions from `n * keys_per_block` on. These are not blocks of the KV cache.
        local_blocks: number of blocks, the token's own and those before it, that are selected whatever their score.
    """

    q: Tensor
    k: Tensor
    indices: Tensor
    layer: int
    keys_per_block: int
    local_blocks: int


@dataclass(frozen=True, slots=True)
class SparseCall:
    """Arguments of `torchweave::sparse_attention`: attention of each token to the keys at `indices`.

    Attributes:
        q: `[T, H, D]`; k: `[T, KH, D]`; v: `[T, KH, Dv]`.
        indices: int32 `[T, K]`, or `[T, KH, K]` with keys of its own for each KV head: positions in the request; -1 is no key.
        out: `[T, H, Dv]`, written whole.
        layer: index of the KV cache that holds `k` and `v`.
        scale: factor of the scores.
        sinks: `[H]` logits added to the denominator of the softmax.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    out: Tensor
    layer: int
    scale: float
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RelativeCall:
    """Arguments of `torchweave::relative_attention`: causal attention with a bias of each token and head by the distance of a key
    (Inkling).

    Attributes:
        q: `[T, H, D]`; k: `[T, KH, D]`; v: `[T, KH, Dv]`.
        bias: `[T, H, E]`, added to the scaled scores of keys `0 .. E - 1` tokens back; 0 for keys farther away.
        out: `[T, H, Dv]`, written whole.
        layer: index of the KV cache that holds `k` and `v`.
        scale: factor of the scores.
        window: sliding window: keys less than so many tokens back; 0 for all.
        sinks: `[T, H]` logits added to the denominator of the softmax.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    out: Tensor
    layer: int
    scale: float
    window: int = 0
    sinks: Tensor | None = None


def _run_index(call: IndexCall, meta: AttentionMetadata, cache: LayerKVCache) -> None:
    tokens, most = _TokenRows.of(meta), call.indices.shape[1]
    call.indices.fill_(-1)
    for part, keys in _index_keys(call.k, tokens, meta, cache):
        scores = torch.matmul(call.q[part].float(), keys.transpose(1, 2)) * call.scale
        scores = torch.matmul(call.weights[part].float()[:, None], scores.relu())[:, 0]
        places, positions = torch.arange(keys.shape[1], device=keys.device), tokens.positions[part, None]
        # Memory after a row's keys was perhaps never written and may hold NaN.
        best = scores.masked_fill(places > positions, float("-inf")).topk(min(most, keys.shape[1])).indices
        call.indices[part, : best.shape[1]] = best.masked_fill(best > positions, -1).int()


def _run_block_index(call: BlockIndexCall, meta: AttentionMetadata, cache: LayerKVCache) -> None:
    tokens, size = _TokenRows.of(meta), call.keys_per_block
    within = torch.arange(size, device=call.q.device)
    call.indices.fill_(-1)
    for part, keys in _index_keys(call.k, tokens, meta, cache):
        keys = F.pad(keys, (0, 0, 0, -keys.shape[1] % size))
        places, positions = torch.arange(keys.shape[1], device=keys.device), tokens.positions[part, None, None]
        scores = torch.matmul(call.q[part].float(), keys.transpose(1, 2))
        scores = scores.masked_fill(places > positions, float("-inf")).unflatten(2, (-1, size)).amax(-1)
        behind = positions // size - torch.arange(scores.shape[2], device=keys.device)
        scores = scores.masked_fill((behind >= 0) & (behind < call.local_blocks), float("inf"))
        blocks = scores.topk(min(call.indices.shape[2] // size, scores.shape[2])).indices
        best = (blocks[..., None] * size + within).flatten(2)
        call.indices[part, :, : best.shape[2]] = best.masked_fill(best > positions, -1).int()


def _index_keys(
    new: Tensor, tokens: _TokenRows, meta: AttentionMetadata, cache: LayerKVCache
) -> Iterator[tuple[slice, Tensor]]:
    """Write the indexer's keys `[T, D]` of a step; parts of its tokens, and the keys of their requests, float32 `[n, L, D]`."""
    write_vectors(cache, new, meta.slot_mapping)
    block_size = cache.k.shape[1]
    num_blocks = min(-(-meta.max_seq_len // block_size), meta.block_table.shape[1])
    length = num_blocks * block_size
    for part in _parts(meta.num_tokens, length * new.shape[1]):
        blocks = tokens.block_table(part)[:, :num_blocks].flatten()
        halves = (tensor.index_select(0, blocks).view(-1, length, tensor.shape[3]) for tensor in (cache.k, cache.v))
        yield part, torch.cat(list(halves), -1).float()


def _run_attention(call: SparseCall, meta: AttentionMetadata, cache: LayerKVCache) -> None:
    _write(cache.k, quantize_kv(call.k, cache.k.dtype, cache.k_scale), meta.slot_mapping)
    _write(cache.v, quantize_kv(call.v, cache.v.dtype, cache.v_scale), meta.slot_mapping)
    tokens = _TokenRows.of(meta)
    by_head = call.indices if call.indices.ndim == 3 else call.indices[:, None]
    sinks = None if call.sinks is None else call.sinks.expand(meta.num_tokens, -1)
    for part in _parts(meta.num_tokens, by_head.shape[2] * call.k.shape[1] * max(call.k.shape[2], call.v.shape[2])):
        result = _attend(call.q, by_head[part].long(), tokens, part, cache, call.scale, sinks, None)
        call.out[part] = result.to(call.out.dtype)


def _run_relative(call: RelativeCall, meta: AttentionMetadata, cache: LayerKVCache) -> None:
    _write(cache.k, quantize_kv(call.k, cache.k.dtype, cache.k_scale), meta.slot_mapping)
    _write(cache.v, quantize_kv(call.v, cache.v.dtype, cache.v_scale), meta.slot_mapping)
    tokens, length = _TokenRows.of(meta), min(meta.max_seq_len, cache.k.shape[1] * meta.block_table.shape[1])
    distances = torch.arange(call.window or length, device=call.q.device)
    for part in _parts(meta.num_tokens, len(distances) * call.k.shape[1] * max(call.k.shape[2], call.v.shape[2])):
        indices = (tokens.positions[part, None, None] - distances).clamp(min=-1)
        bias = F.pad(call.bias[part].float(), (0, len(distances) - call.bias.shape[2]))
        result = _attend(call.q, indices, tokens, part, cache, call.scale, call.sinks, bias)
        call.out[part] = result.to(call.out.dtype)


def _attend(
    q: Tensor,
    indices: Tensor,
    tokens: _TokenRows,
    part: slice,
    cache: LayerKVCache,
    scale: float,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Attention of a part's tokens, float32 `[n, H, Dv]`: indices `[n, 1 or KH, K]`, sinks `[T, H]`, bias of a key `[n, H, K]`."""
    block_size, kv_heads = cache.k.shape[1:3]
    group, places = q.shape[1] // kv_heads, indices.clamp(min=0)
    blocks = tokens.block_table(part).gather(1, places.flatten(1) // block_size).view(places.shape)
    heads = torch.arange(kv_heads, device=q.device)[:, None]
    slots = (blocks * block_size + places % block_size) * kv_heads + heads
    keys, values = (
        dequantize_kv(_gather(tensor, slots), scale, torch.float32).float()
        for tensor, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    )
    scores = torch.matmul(q[part].float().unflatten(1, (kv_heads, group)), keys.transpose(2, 3)) * scale
    if bias is not None:
        scores = scores + bias.view(scores.shape)
    scores = scores.masked_fill((indices < 0)[:, :, None], float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat([scores, sinks[part].float().view(*scores.shape[:3], 1)], -1).softmax(-1)[..., :-1]
    return torch.matmul(weights, values).flatten(1, 2).masked_fill(~tokens.valid[part, None, None], 0.0)


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
    """Keys or values by cache slot and head, `slot * KH + head`: `[n, KH, K]` -> `[n, KH, K, D]`."""
    flat = as_indexable(cache.flatten(0, 2))
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


def write_vectors(cache: LayerKVCache, vectors: Tensor, slot_mapping: Tensor) -> None:
    """Write `[T, D]` into a layer with `LayerSpec.index_keys`, half of the channels as keys and half as values."""
    half = cache.k.shape[3]
    _write(cache.k, vectors[:, None, :half], slot_mapping)
    _write(cache.v, vectors[:, None, half:], slot_mapping)


def read_vectors(cache: LayerKVCache, slot_mapping: Tensor) -> Tensor:
    """The vectors `[T, D]` at cache slots `[T]`; any for slot -1."""
    slots = slot_mapping.clamp(min=0)
    return torch.cat([half.flatten(0, 1).index_select(0, slots)[:, 0] for half in cache.tensors], -1)


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


# -- the ops -----------------------------------------------------------------------------------------------------------


def _index_alone(call: IndexCall | BlockIndexCall) -> None:
    """Run an index op whose tokens are one new sequence."""
    keys, values = call.k[:, None, : call.k.shape[1] // 2], call.k[:, None, call.k.shape[1] // 2 :]
    _RUNS[type(call)](call, *_one_sequence(keys, values))


def _attend_alone(call: SparseCall | RelativeCall) -> None:
    """Run an attention op whose tokens are one new sequence."""
    _RUNS[type(call)](call, *_one_sequence(call.k, call.v))


_RUNS: dict[type[Any], Callable[[Any, AttentionMetadata, LayerKVCache], None]] = {
    IndexCall: _run_index,
    BlockIndexCall: _run_block_index,
    SparseCall: _run_attention,
    RelativeCall: _run_relative,
}

define_boundary("torchweave::sparse_index", IndexCall, _index_alone, ("indices",))
define_boundary("torchweave::sparse_block_index", BlockIndexCall, _index_alone, ("indices",))
define_boundary("torchweave::sparse_attention", SparseCall, _attend_alone, ("out",))
define_boundary("torchweave::relative_attention", RelativeCall, _attend_alone, ("out",))

_CALLS: dict[Any, type[Any]] = {
    torch.ops.torchweave.sparse_index.default: IndexCall,
    torch.ops.torchweave.sparse_block_index.default: BlockIndexCall,
    torch.ops.torchweave.sparse_attention.default: SparseCall,
    torch.ops.torchweave.relative_attention.default: RelativeCall,
}
SPARSE_OPS = frozenset(_CALLS)
"""The overloads of the ops."""


def run_sparse_op(
    metas: Sequence[AttentionMetadata],
    caches: Sequence[LayerKVCache],
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Run an intercepted call over the rows of a step, with the metadata of the layer's cache group."""
    call = _CALLS[op](*args, **kwargs)
    cache = caches[call.layer]
    _RUNS[type(call)](call, metas[cache.group], cache)
