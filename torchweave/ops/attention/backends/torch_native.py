"""Paged attention in plain torch: the CPU path without a C++ compiler, and the reference of the kernels on any device.

The cost of a step on a CPU is mostly the number of torch calls. So rows are batched: all decode rows are one group, and prefill
rows of similar length are padded into few groups. The indices of a group are built once per step with numpy; a layer then takes
a fixed number of calls per group, whatever the number of rows:

    index_copy k, v -> index_select k, v -> scaled_dot_product_attention -> copy into out

Keys are gathered token by token, and places after a row's length repeat the row's own first visible token: no row reads memory
of another row or memory that was never written, so a NaN elsewhere cannot leak through a weight of zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from torchweave.ops.attention.kv_cache_dtype import as_indexable, dequantize_kv, quantize_kv
from torchweave.ops.attention.op import AttentionCall, AttentionMetadata, AttentionStep, LayerKVCache, LayerSpec
from torchweave.ops.attention.reference import additive_mask, alibi_bias, padded_attention

MAX_GROUP_SCORES = 1 << 22
"""Scores per head of a group of several prefill rows; bounds the mask and the padding of a group."""


@dataclass
class _RowGroup:
    """Rows of one batched attention, padded to N queries and L keys.

    Attributes:
        block_rows: int `[rows, max_blocks]`, the block table of the rows.
        tokens: `[rows, N]`, tokens of the step; places after a row's end repeat its last token.
        positions: `[rows, N]`, their positions in the sequence.
        last_visible: `[rows, N]`, the last key that each of them sees.
        span: `(start, stop)` of the tokens, where they are consecutive.
        token_index: index of the tokens, int64 `[rows * N]`; None if they are exactly `span`.
    """

    block_rows: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    last_visible: np.ndarray
    span: tuple[int, int]
    token_index: Tensor | None
    views: dict[tuple[int, int, torch.dtype], tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)


class TorchStep:
    """One step of the torch backend; holds the indices that its layers share.

    Rows of `skipped_rows`, bool `[R]`, are skipped: their keys and values are cached, their part of `out` is not written.
    """

    fuses_rope: ClassVar[bool] = False
    fuses_quant: ClassVar[bool] = False
    fuses_gate: ClassVar[bool] = False

    def __init__(self, meta: AttentionMetadata, skipped_rows: np.ndarray | None = None) -> None:
        self.device = meta.slot_mapping.device
        host = _HostMetadata(meta)
        padded = np.flatnonzero(host.slot_mapping < 0)
        real = np.flatnonzero(host.slot_mapping >= 0)
        self.padding = self._index(padded) if padded.size else None
        self.real_tokens = self._index(real) if padded.size else None
        self.slots = self._index(host.slot_mapping[real]) if padded.size else meta.slot_mapping
        if skipped_rows is not None:
            host.counts[skipped_rows] = 0
        self.groups = [self._build_group(host, rows) for rows in _group_rows(host)]

    def forward(self, call: AttentionCall, cache: LayerKVCache) -> None:
        """See `AttentionStep.forward`."""
        q, out, slopes = call.q, call.out, call.alibi_slopes
        k_cache, v_cache = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
        k = quantize_kv(call.k, k_cache.dtype, cache.k_scale)
        v = quantize_kv(call.v, v_cache.dtype, cache.v_scale)
        real_tokens = self.real_tokens
        for cached, new in ((as_indexable(k_cache), as_indexable(k)), (as_indexable(v_cache), as_indexable(v))):
            cached.index_copy_(0, self.slots, new if real_tokens is None else new.index_select(0, real_tokens))
        block_size = cache.k.shape[1]
        for group in self.groups:
            rows, queries = group.tokens.shape
            index, bias = self._keys_and_mask(group, call.window, call.chunk, block_size, q.dtype)
            if slopes is not None:
                bias = self._with_alibi(group, bias, slopes, call, q.dtype)
            token_index = group.token_index
            query_rows = q[slice(*group.span)] if token_index is None else q.index_select(0, token_index)
            if index is None:
                start, stop = group.span
                keys, values = k[None, start:stop], v[None, start:stop]
            else:
                keys = as_indexable(k_cache).index_select(0, index).view(k_cache.dtype).unflatten(0, (rows, -1))
                values = as_indexable(v_cache).index_select(0, index).view(v_cache.dtype).unflatten(0, (rows, -1))
            keys, values = dequantize_kv(keys, cache.k_scale, q.dtype), dequantize_kv(values, cache.v_scale, q.dtype)
            query_rows = query_rows.unflatten(0, (rows, queries))
            result = padded_attention(
                query_rows, keys, values, bias, scale=call.scale, softcap=call.softcap, sinks=call.sinks
            )
            if token_index is None:
                out[slice(*group.span)].view(result.shape).copy_(result)
            else:
                # A padded place holds its row's last token and computes the same result again.
                out.index_copy_(0, token_index, result.flatten(2, 3).flatten(0, 1).to(out.dtype))
        if self.padding is not None:
            out.index_fill_(0, self.padding, 0)

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device)

    def _build_group(self, host: _HostMetadata, rows: np.ndarray) -> _RowGroup:
        counts = host.counts[rows]
        offsets = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        tokens = host.starts[rows][:, None] + offsets
        positions = (host.seq_lens[rows] - counts)[:, None] + offsets
        last_visible = positions if host.lookahead is None else positions + host.lookahead[tokens]
        flat = tokens.ravel()
        span = (int(flat[0]), int(flat[0]) + flat.size)
        exact = np.array_equal(flat, np.arange(*span))
        return _RowGroup(
            host.block_table[host.slots[rows]],
            tokens,
            positions,
            last_visible,
            span,
            None if exact else self._index(flat),
        )

    def _keys_and_mask(
        self, group: _RowGroup, window: int, chunk: int, block_size: int, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Cache index of the group's keys and the mask, for layers with this window and chunk."""
        key = (window, chunk, dtype)
        if key not in group.views:
            group.views[key] = self._build_keys_and_mask(group, window, chunk, block_size, dtype)
        return group.views[key]

    def _with_alibi(
        self, group: _RowGroup, bias: Tensor | None, slopes: Tensor, call: AttentionCall, dtype: torch.dtype
    ) -> Tensor:
        """The mask with ALiBi, `[rows, H, N, L]`; keys are consecutive from each row's first visible one."""
        positions = torch.from_numpy(group.positions).to(self.device)
        if bias is None:  # one sequence from its beginning
            return additive_mask(positions, positions, 0, 0, dtype) + alibi_bias(positions, positions, slopes, dtype)
        first = torch.from_numpy(_first_visible(group.positions[:, :1], call.window, call.chunk)).to(self.device)
        keys = first + torch.arange(bias.shape[-1], device=self.device)
        return bias + alibi_bias(positions, keys, slopes, dtype)

    def _build_keys_and_mask(
        self, group: _RowGroup, window: int, chunk: int, block_size: int, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        positions = group.positions
        first_visible = _first_visible(positions, window, chunk)
        whole = len(positions) == 1 and positions[0, 0] == 0 and group.token_index is None
        whole = whole and (group.last_visible is positions or np.array_equal(group.last_visible, positions))
        if whole and not first_visible.any():
            return None, None  # one sequence from its beginning: all of its keys are in the step
        first, last = first_visible[:, :1], positions[:, -1:]
        key_positions = first + np.arange((last - first).max() + 1)
        padded_positions = np.where(key_positions <= last, key_positions, first)
        blocks = np.take_along_axis(group.block_rows, padded_positions // block_size, axis=1).astype(np.int64)
        index = self._index((blocks * block_size + padded_positions % block_size).ravel())
        visible = (key_positions[:, None] <= group.last_visible[:, :, None]) & (
            key_positions[:, None] >= first_visible[:, :, None]
        )
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))[:, None]
        return index, torch.from_numpy(bias).to(self.device, dtype)


def _first_visible(positions: np.ndarray, window: int, chunk: int) -> np.ndarray:
    """First key that is visible at each position."""
    first_visible = np.zeros_like(positions)
    if window:
        first_visible = np.maximum(first_visible, positions - window + 1)
    if chunk:
        first_visible = np.maximum(first_visible, positions // chunk * chunk)
    return first_visible


class _HostMetadata:
    """The metadata as numpy arrays: views of a CPU tensor, one copy each from a GPU."""

    def __init__(self, meta: AttentionMetadata) -> None:
        rows = meta.num_rows
        self.slots = meta.slots[:rows].cpu().numpy()
        self.seq_lens = meta.seq_lens[:rows].cpu().numpy().astype(np.int64)
        self.block_table = meta.block_table.cpu().numpy()
        self.slot_mapping = meta.slot_mapping[: meta.num_tokens].cpu().numpy()
        if meta.decode_only:
            self.starts = np.arange(rows)
            self.counts = (self.slots >= 0).astype(np.int64)
        else:
            query_start = meta.query_start[: rows + 1].cpu().numpy().astype(np.int64)
            self.starts = query_start[:-1]
            self.counts = np.where(self.slots >= 0, np.diff(query_start), 0)
        self.lookahead = None
        if meta.lookahead is not None and not meta.decode_only:
            self.lookahead = meta.lookahead[: meta.num_tokens].cpu().numpy().astype(np.int64)


def _group_rows(host: _HostMetadata) -> list[np.ndarray]:
    """Rows by group: all decode rows, then prefill rows of similar size, padded to at most twice their scores."""
    decode = np.flatnonzero(host.counts == 1)
    groups = [decode] if decode.size else []
    prefill = np.flatnonzero(host.counts > 1)
    prefill = prefill[np.lexsort((host.seq_lens[prefill], host.counts[prefill]))]
    members: list[int] = []
    longest = exact = 0
    for row in prefill.tolist():
        count, length = int(host.counts[row]), int(host.seq_lens[row])
        padded = (len(members) + 1) * count * max(longest, length)
        if members and (padded > 2 * (exact + count * length) or padded > MAX_GROUP_SCORES):
            groups.append(np.array(members))
            members, longest, exact = [], 0, 0
        members.append(row)
        longest, exact = max(longest, length), exact + count * length
    if members:
        groups.append(np.array(members))
    return groups


class TorchBackend:
    """Plain torch on any device. It reads the metadata on the host once per step, so it cannot be captured."""

    name = "torch"
    supports_mixed_cuda_graphs = False
    block_size = 16

    def allocate(
        self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKVCache:
        """See `AttentionBackend.allocate`."""
        shape, cache_dtype = (num_blocks, block_size, spec.num_kv_heads), spec.cache_dtype or dtype
        return LayerKVCache(
            torch.zeros(*shape, spec.head_dim, dtype=cache_dtype, device=device),
            torch.zeros(*shape, spec.value_dim, dtype=cache_dtype, device=device),
            spec.k_scale,
            spec.v_scale,
        )

    def begin(self, meta: AttentionMetadata) -> AttentionStep:
        """See `AttentionBackend.begin`."""
        return TorchStep(meta)
