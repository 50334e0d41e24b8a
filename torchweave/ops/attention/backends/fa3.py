"""FlashAttention 3 for steps with prefill rows, from the optional wheel `fa3-fwd` (Hopper, bf16); Triton runs decode steps.

The wheel supports the paged cache by bulk copies only: pages of 128 tokens, heads of 64 or 128, no window. It selects the paged
kernel for long queries only, so the longest query is declared as at least 256; real lengths are on the device, and a CUDA graph
may hold a whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchweave.ops.attention.backends.triton import TritonBackend, rope_and_write_kv, write_kv_cache
from torchweave.ops.attention.op import AttentionCall, AttentionMetadata, AttentionStep, LayerKVCache, LayerSpec

PAGE_SIZE = 128
LONG_QUERY = 256


class Fa3Backend(TritonBackend):
    """Prefill and mixed steps by FlashAttention 3, decode steps by the Triton kernel, over one cache."""

    name = "fa3"
    block_size = PAGE_SIZE

    @staticmethod
    def unsupported_reason(spec: LayerSpec, dtype: torch.dtype) -> str | None:
        """Why the wheel's FlashAttention 3 cannot run a layer; None if it can."""
        if dtype != torch.bfloat16:
            return f"FlashAttention 3 is built for bfloat16, not {str(dtype).removeprefix('torch.')}"
        if spec.head_dim not in (64, 128) or spec.value_dim != spec.head_dim:
            return f"FlashAttention 3 takes heads of 64 or 128, not {spec.head_dim} with values of {spec.value_dim}"
        if spec.cache_dtype is not None:
            return "FlashAttention 3 reads a cache in FP8 only with queries in FP8"
        if spec.window or spec.chunk or spec.softcap or spec.sinks or spec.alibi or spec.lookahead:
            return "FlashAttention 3 is built without windows, chunks, soft caps, sinks, ALiBi and images that see both ways"
        return None

    def allocate(
        self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKVCache:
        """See `AttentionBackend.allocate`. Zeroes the cache: slots after a sequence's end have weight 0 but must be finite."""
        reason = self.unsupported_reason(spec, dtype)
        if reason is not None:
            raise ValueError(f"attention_backend 'fa3' cannot run this model: {reason}; choose triton")
        if block_size != PAGE_SIZE:
            raise ValueError(f"attention_backend 'fa3' needs block_size {PAGE_SIZE}, not {block_size}")
        layer = super().allocate(spec, num_blocks, block_size, dtype, device)
        for tensor in layer.tensors:
            tensor.zero_()
        return layer

    def begin(self, meta: AttentionMetadata) -> AttentionStep:
        """See `AttentionBackend.begin`; gathers the rows' pages on the device, so that a capture records it."""
        if meta.decode_only:
            return super().begin(meta)
        return Fa3Step(meta, meta.block_table.index_select(0, meta.slots.clamp(min=0)))


@dataclass(frozen=True)
class Fa3Step:
    """A step with prefill rows; `pages` is int32 `[R, max_blocks_per_seq]`."""

    meta: AttentionMetadata
    pages: Tensor

    fuses_rope: ClassVar[bool] = True
    fuses_quant: ClassVar[bool] = False
    fuses_gate: ClassVar[bool] = False

    def forward(self, call: AttentionCall, cache: LayerKVCache) -> None:
        """See `AttentionStep.forward`; the kernel that writes the cache applies the rotary embedding."""
        assert not call.window and not call.softcap and call.sinks is None and not call.chunk, (
            "`allocate` refuses these"
        )
        meta, q, out, rotary = self.meta, call.q, call.out, call.rotary
        if rotary is None:
            write_kv_cache(call.k, call.v, cache, meta)
        else:
            q, _ = rope_and_write_kv(rotary, q, call.k, call.v, cache, meta)
        out.zero_()  # the op does not write padded tokens
        _flash_attention(
            q, cache, out, meta.query_start, meta.seq_lens, max(meta.num_tokens, LONG_QUERY), self.pages, call.scale
        )


def _flash_attention(
    q: Tensor,
    cache: LayerKVCache,
    out: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_query: int,
    pages: Tensor,
    scale: float,
) -> None:
    """Call the wheel's op by position, since its Python functions cannot write into a given tensor."""
    import fa3_fwd_interface  # noqa: F401 # pyright: ignore[reportMissingImports] (registers the op)

    torch.ops.fa3_fwd.fwd(
        q, cache.k, cache.v, None, None, None, out,  # k_new, v_new, qv, out
        query_start, None, None,  # of queries, keys, new keys
        None, seq_lens,  # lengths in use: of queries, of keys
        max_query, None,  # longest query, longest keys
        pages, None, None,  # page table, batch index, left padding
        None, None, None,  # rotary cosines, sines, lengths
        None, None, None,  # scales of q, k, v
        scale, True, -1, -1, 0, 0.0, True,  # causal, window left and right, chunk, softcap, rotary interleaved
        None, 1, None, 0,  # scheduler metadata, splits, pack GQA, SM margin
    )  # fmt: skip
