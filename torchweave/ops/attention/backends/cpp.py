"""Paged attention on a CPU as one C++ function per layer.

Torch has no operator over a paged cache, so the torch backend gathers every key and value of the batch. Here each token walks
the blocks of its own sequence. Inductor's C++ code cache builds the function (`kernels/attention_cpu.cpp`) for a head size and
caches it on disk. Layers that are not float32, and rows with many new tokens or with tokens that see keys after them, run on the
torch backend.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from torchweave.ops.attention.backends.torch_native import TorchBackend, TorchStep
from torchweave.ops.attention.op import AttentionCall, AttentionMetadata, AttentionStep, LayerKVCache, LayerSpec
from torchweave.ops.kernels import cpp

LONG_PREFILL_TOKENS = 256
"""Rows with as many new tokens run on torch, whose matrix products are 1.5 times as fast at 1000 tokens."""

_CACHE_KINDS = {torch.float32: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
"""CACHE of the C++ source for each dtype of the cache."""
_PAIRS_PER_THREAD = 32
"""Least number of (token, key head) pairs for each further thread."""


class CppStep:
    """One step of the C++ backend."""

    fuses_rope: ClassVar[bool] = False
    fuses_quant: ClassVar[bool] = False
    fuses_gate: ClassVar[bool] = False

    def __init__(self, meta: AttentionMetadata) -> None:
        self._meta = meta
        self._threads = torch.get_num_threads()
        on_torch = None if meta.decode_only else _rows_on_torch(meta)
        self._slots, self._lengths = meta.slots, meta.seq_lens
        if on_torch is not None:
            self._slots, self._lengths = _per_token_lengths(meta, on_torch)
        self._torch_rows_step = TorchStep(meta, ~on_torch) if on_torch is not None and on_torch.any() else None
        self._fallback_step: TorchStep | None = None

    def forward(self, call: AttentionCall, cache: LayerKVCache) -> None:
        """See `AttentionStep.forward`."""
        torch_step = self._torch_rows_step
        if call.q.dtype != torch.float32:
            torch_step = self._fallback_step = self._fallback_step or TorchStep(self._meta)
        if torch_step is not None:
            torch_step.forward(call, cache)
        if call.q.dtype != torch.float32:
            return
        meta, out, sinks, slopes = self._meta, call.out, call.sinks, call.alibi_slopes
        q = call.q if call.q.stride(2) == 1 else call.q.contiguous()
        k = call.k if call.k.stride(2) == 1 else call.k.contiguous()
        v = call.v if call.v.stride(2) == 1 else call.v.contiguous()
        (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
        (q_token, q_head, _), (k_token, k_head, _), (v_token, v_head, _) = q.stride(), k.stride(), v.stride()
        assert out.is_contiguous()
        run = cpp.attention(head_dim, v.shape[2], heads // kv_heads, _CACHE_KINDS[cache.k.dtype])
        run(
            q, k, v, out, cache.k, cache.v, q if sinks is None else sinks.float(),
            q if slopes is None else slopes.float(), self._slots, self._lengths,
            meta.slot_mapping, meta.block_table, tokens, kv_heads, q_token, q_head, k_token, k_head, v_token, v_head,
            meta.block_table.shape[1], cache.k.shape[1], call.window, call.chunk, sinks is not None,
            slopes is not None, min(self._threads, tokens * kv_heads // _PAIRS_PER_THREAD or 1), call.scale, call.softcap,
            cache.k_scale, cache.v_scale,
        )  # fmt: skip


def _rows_on_torch(meta: AttentionMetadata) -> np.ndarray:
    """Rows that run on the torch backend, bool `[R]`: those with many new tokens, or with tokens that see keys after them."""
    starts = meta.query_start.numpy()
    on_torch = np.diff(starts) >= LONG_PREFILL_TOKENS
    if meta.lookahead is not None:
        tokens = np.flatnonzero(meta.lookahead[: int(starts[-1])].numpy())
        on_torch[np.searchsorted(starts, tokens, side="right") - 1] = True
    return on_torch


def _per_token_lengths(meta: AttentionMetadata, skipped_rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Row of the block table and number of visible keys of each token, int32 `[T]`.

    Tokens of skipped rows and padded tokens have 0 visible keys, so that the function skips them.
    """
    starts, lengths = meta.query_start.numpy(), meta.seq_lens.numpy()
    counts = np.diff(starts)
    real = int(starts[-1])
    slots, visible_keys = np.zeros(meta.num_tokens, np.int32), np.zeros(meta.num_tokens, np.int32)
    slots[:real] = np.repeat(meta.slots.numpy(), counts)
    visible_keys[:real] = np.arange(real) + np.repeat(lengths - starts[1:] + 1, counts)
    visible_keys[:real][np.repeat(skipped_rows, counts)] = 0
    return torch.from_numpy(slots), torch.from_numpy(visible_keys)


class CppBackend(TorchBackend):
    """Attention in C++ on a CPU, over the cache of the torch backend."""

    name = "cpp"

    def allocate(
        self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKVCache:
        """See `AttentionBackend.allocate`. Builds the layer's function."""
        if dtype == torch.float32:
            cache_kind = _CACHE_KINDS[spec.cache_dtype or dtype]
            cpp.attention(spec.head_dim, spec.value_dim, spec.num_heads // spec.num_kv_heads, cache_kind)
        return super().allocate(spec, num_blocks, block_size, dtype, device)

    def begin(self, meta: AttentionMetadata) -> AttentionStep:
        """See `AttentionBackend.begin`."""
        return CppStep(meta)
