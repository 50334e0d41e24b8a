"""The Triton backend: kernels read every length, slot and block table on the device, so that any step can be captured whole.

A decode step is one launch a layer, or two where few rows need a rotary embedding. A mixed step is three: write the keys and
values, prefill rows, decode rows; the device finds which rows are which. In a capture the last two are branches of the graph:
neither fills a GPU, and neither reads the other's results.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from torchweave.ops.attention.kv_cache_dtype import kv_fp8_max
from torchweave.ops.attention.op import (
    AttentionCall,
    AttentionMetadata,
    AttentionStep,
    LayerKVCache,
    LayerSpec,
    forward_then_quantize,
)
from torchweave.ops.kernels.attention.paged_decode import paged_decode
from torchweave.ops.kernels.attention.paged_prefill import paged_prefill, write_kv
from torchweave.ops.kernels.dependent_launch import pdl_options, supports_pdl
from torchweave.ops.kernels.rope import CacheWrite, QKNorm, launch_rope
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2
from torchweave.ops.quant.fp8 import GROUP
from torchweave.ops.rope import Rotary
from torchweave.utils.cuda_streams import side_stream

MAX_SPLITS = 32
MAX_PARTIAL_SIZE = 1 << 15
"""Most numbers of the partial results that a program combines: more take longer than the splits save."""
LOAD_SIZE_PER_WARP = 1 << 12
"""Numbers of partial results that a warp loads at once."""
FEW_ROWS = 4
"""Up to this many rows contexts have fewer splits (`default_decode_config`), and a separate rotary kernel, which overlaps under
dependent launch, is faster than a longer decode kernel: Llama 1B on an H100 at one row 1.007 against 1.074 ms a token, 8B equal;
at 8 rows 1.206 against 1.199."""


@dataclass(frozen=True)
class DecodeConfig:
    """Launch configuration of the decode kernel.

    Attributes:
        block_n: keys of a tile.
        num_warps: of a program.
        num_stages: depth of the software pipeline.
        programs_per_sm: target number of programs when splitting the context; more splits cost more combining.
        min_tiles: largest context, in tiles, that is not split: combining costs as much.
        dot: scores by matrix product, the query heads padded to 16; else by multiply and sum, for small groups.
        dependent: programmatic dependent launch (`kernels/dependent_launch.py`), which lets the next kernel start 1: at once;
            2: at the end; 0: off, for GPUs without it.
    """

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    min_tiles: int = 4
    dot: bool = True
    dependent: int = 0


@dataclass(frozen=True)
class PrefillConfig:
    """Launch configuration of the prefill kernel: `block_m` packed query rows and `block_n` keys a tile."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3


def default_decode_config(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, num_rows: int) -> DecodeConfig:
    """Configuration for a step of `num_rows` rows that fits in shared memory and registers.

    Measured in bench/results/attention-splits_h100_202611.md: by whole layers for heads of 64 and 128, and for those of 256 by
    `bench/kernels/attention.py`. An FP8 cache takes more programs, since each converts what it reads.
    """
    few = num_rows <= FEW_ROWS
    if dtype == torch.float32:
        return DecodeConfig(block_n=32, num_stages=2)
    if head_dim > 128:
        return DecodeConfig(
            block_n=32, num_stages=3 if head_dim <= 256 else 2, programs_per_sm=1, min_tiles=4 if few else 8
        )
    return DecodeConfig(programs_per_sm=1 if few and cache_dtype.itemsize > 1 else 2)


def default_prefill_config(head_dim: int, group: int, dtype: torch.dtype) -> PrefillConfig:
    """As `default_decode_config`. A tile holds at least one token, so `block_m` is at least `group`."""
    least = next_power_of_2(group)
    if dtype == torch.float32:
        return PrefillConfig(max(32, least), 32, 4 if head_dim <= 64 else 8, 2)
    if head_dim > 128:
        return PrefillConfig(max(64, least), 32, 4, 2)
    return PrefillConfig(max(128, least), 64, 4 if head_dim <= 64 else 8, 3)


def shrink_prefill_tiles(config: PrefillConfig, group: int) -> PrefillConfig:
    """The configuration with smaller tiles, for a step whose tiles would not fill a GPU twice. A layer of Llama 1B at 16 and at
    1000 tokens takes 6.9 and 22.9 us instead of 7.8 and 26.5, of 8B 8.0 and 34.2 instead of 9.1 and 36.6 (H100)."""
    block_m = max(64, next_power_of_2(group))
    return replace(config, block_m=block_m, num_warps=4) if config.block_m > block_m else config


@dataclass(frozen=True)
class _Workspace:
    """Partial results of splits, shared by all layers of one shape; sized for the largest launch."""

    partial: Tensor
    maxima: Tensor
    sums: Tensor
    counters: Tensor


class TritonBackend:
    """Triton kernels on one GPU. `num_sms`, `branches` and the configurations are for measurements and tests."""

    name = "triton"
    supports_mixed_cuda_graphs = True
    block_size = 64

    def __init__(
        self,
        device: torch.device,
        *,
        decode: DecodeConfig | None = None,
        prefill: PrefillConfig | None = None,
        num_sms: int | None = None,
        branches: bool = True,
    ) -> None:
        self.device = torch.device(device)
        self.decode = decode
        self.prefill = prefill
        self.num_sms = num_sms or torch.cuda.get_device_properties(self.device).multi_processor_count
        self.branch = side_stream(self, self.device) if branches and self.device.type == "cuda" else None
        self._workspaces: dict[int, _Workspace] = {}

    def allocate(
        self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKVCache:
        """See `AttentionBackend.allocate`. `block_size` is a power of two."""
        if block_size & (block_size - 1):
            raise ValueError(f"block_size {block_size} does not suit the triton backend; use a power of two, 16 to 128")
        self.workspace(spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.value_dim, dtype)
        shape, cache_dtype = (num_blocks, block_size, spec.num_kv_heads), spec.cache_dtype or dtype
        return LayerKVCache(
            torch.empty(*shape, spec.head_dim, dtype=cache_dtype, device=device),
            torch.empty(*shape, spec.value_dim, dtype=cache_dtype, device=device),
            spec.k_scale,
            spec.v_scale,
        )

    def begin(self, meta: AttentionMetadata) -> AttentionStep:
        """See `AttentionBackend.begin`; nothing is launched or read."""
        return TritonStep(self, meta)

    def decode_config(self, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, num_rows: int) -> DecodeConfig:
        """The decode configuration for a step of `num_rows` rows: the given one, or the default with dependent launch."""
        if self.decode is not None:
            return self.decode
        config = default_decode_config(head_dim, dtype, cache_dtype, num_rows)
        return replace(config, dependent=2 if supports_pdl(self.device) else 0)

    def prefill_config(
        self, head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype, tokens: int
    ) -> PrefillConfig:
        """The prefill configuration for a step of `tokens` tokens."""
        if self.prefill is not None:
            return self.prefill
        group = heads // kv_heads
        config = default_prefill_config(head_dim, group, dtype)
        tiles = cdiv(tokens * group, config.block_m) * kv_heads
        return config if tiles > 2 * self.num_sms else shrink_prefill_tiles(config, group)

    def num_splits(self, config: DecodeConfig, num_rows: int, kv_heads: int, max_seq_len: int, result_size: int) -> int:
        """Splits of the context, a power of two, bounded by the programs to launch, the tiles of the context, and the partial
        results of `result_size` numbers that one program combines."""
        by_programs = config.programs_per_sm * self.num_sms // max(num_rows * kv_heads, 1)
        by_tiles = cdiv(max_seq_len, config.block_n)
        wanted = max(min(by_programs, by_tiles, MAX_SPLITS, MAX_PARTIAL_SIZE // result_size), 1)
        return 1 << (wanted.bit_length() - 1)

    def workspace(self, group: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> _Workspace:
        """Workspace for the partial results of any launch with more than one split; allocated once, outside of captures."""
        workspace = self._workspaces.get(group * value_dim)
        if workspace is None:
            assert not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()), (
                "the workspace must exist before a capture: allocate the caches first"
            )
            configs = (self.decode_config(head_dim, dtype, dtype, rows) for rows in (FEW_ROWS, FEW_ROWS + 1))
            programs = max(config.programs_per_sm for config in configs) * self.num_sms

            def empty(*shape: int) -> Tensor:
                return torch.empty(*shape, dtype=torch.float32, device=self.device)

            counters = torch.zeros(programs, dtype=torch.int32, device=self.device)
            workspace = _Workspace(
                empty(programs, group, value_dim), empty(programs, group), empty(programs, group), counters
            )
            self._workspaces[group * value_dim] = workspace
        return workspace


@dataclass(frozen=True)
class TritonStep:
    """One step of the Triton backend."""

    backend: TritonBackend
    meta: AttentionMetadata

    fuses_rope: ClassVar[bool] = True
    fuses_quant: ClassVar[bool] = True
    fuses_gate: ClassVar[bool] = True

    def forward(self, call: AttentionCall, cache: LayerKVCache) -> None:
        """See `AttentionStep.forward`.

        The rotary embedding is applied by the decode kernel or by the kernel that writes the cache. The decode kernel
        quantizes where the scale is static or a head is a group of its scales.
        """
        meta = self.meta
        if call.quantized and not (meta.decode_only and (call.given_scale is not None or call.v.shape[2] == GROUP)):
            forward_then_quantize(self, call, cache)
            return
        assert call.out.is_contiguous(), "attention writes into a contiguous tensor"
        rotary = call.rotary
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
        if call.gate is not None and call.gate.stride(-1) != 1:
            call = replace(call, gate=call.gate.contiguous())
        if meta.decode_only:
            self._decode(call, rotary, q, k, v, cache)
            return
        if rotary is None:
            write_kv_cache(k, v, cache, meta)
        else:
            q, k = rope_and_write_kv(rotary, q, k, v, cache, meta)
        with self._on_side_stream():
            self._prefill(call, q, cache)
        self._decode(call, None, q, k, v, cache)
        self._join_side_stream()

    def _on_side_stream(self) -> AbstractContextManager[object]:
        """Make launches a branch of the graph under capture, until `_join_side_stream`. Outside of a capture the events cost
        more than they save."""
        branch = self.backend.branch
        if branch is None or not torch.cuda.is_current_stream_capturing():
            return nullcontext()
        branch.wait_stream(torch.cuda.current_stream(branch.device))
        return torch.cuda.stream(branch)

    def _join_side_stream(self) -> None:
        branch = self.backend.branch
        if branch is not None and torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(branch.device).wait_stream(branch)

    def _decode(
        self, call: AttentionCall, rotary: Rotary | None, q: Tensor, k: Tensor, v: Tensor, cache: LayerKVCache
    ) -> None:
        """Launch the decode kernel on q, k and v of the call, which still need `rotary`."""
        meta, backend, window, softcap = self.meta, self.backend, call.window, call.softcap
        sinks, slopes = call.sinks, call.alibi_slopes
        heads, kv_heads, head_dim, value_dim = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
        group = heads // kv_heads
        config = backend.decode_config(head_dim, q.dtype, cache.k.dtype, meta.num_rows)
        if rotary is not None and config.dependent and meta.num_rows <= FEW_ROWS:
            q, k = launch_rope(q, k, rotary.cos, rotary.sin, _qk_norm_from(rotary))
            rotary = None
        splits = backend.num_splits(config, meta.num_rows, kv_heads, meta.max_seq_len, group * value_dim)
        work = backend.workspace(group, head_dim, value_dim, q.dtype)
        rope_args = rotary or Rotary(meta.slots, meta.slots)
        optional = (rope_args.q_weight, rope_args.k_weight, rope_args.cos.contiguous(), rope_args.sin.contiguous())
        tensors = [q if tensor is None else tensor for tensor in optional]
        half = 0 if rotary is None else rotary.cos.shape[-1] // 2
        gate = q if call.gate is None else call.gate
        paged_decode[(kv_heads, splits, meta.num_rows)](
            q, k, v, call.out, cache.k, cache.v,
            meta.slots, meta.query_start, meta.seq_lens, meta.block_table, meta.slot_mapping, q if sinks is None else sinks,
            q if slopes is None else slopes,
            work.partial, work.maxima, work.sums, work.counters, *tensors,
            q if call.out_scale is None else call.out_scale, q if call.given_scale is None else call.given_scale, gate,
            call.scale * cache.k_scale, softcap, window, call.chunk, splits, config.min_tiles, rope_args.eps, rope_args.offset,
            cache.k_scale, cache.v_scale, meta.num_tokens,
            meta.block_table.stride(0), q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            *gate.stride()[:2], KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(next_power_of_2(group), 16 if config.dot else 1),
            HEAD_DIM=head_dim, HEAD_PAD=pad(head_dim), VALUE_DIM=value_dim, VALUE_PAD=pad(value_dim),
            BLOCK_SIZE=cache.k.shape[1], BLOCK_N=config.block_n,
            LOAD_SIZE=LOAD_SIZE_PER_WARP * config.num_warps if splits > 1 else 0,
            DECODE_ONLY=meta.decode_only, SOFTCAP=softcap > 0.0, SINKS=sinks is not None, ALIBI=slopes is not None,
            DOT=config.dot,
            HALF=half, NORM=rope_args.q_weight is not None, WIDE=rope_args.wide,
            QUANT=1 if call.given_scale is not None else 2 if call.out_scale is not None else 0,
            GATED=call.gate is not None, DEPENDENT=config.dependent, KV_FP8_MAX=kv_fp8_max(cache.k.dtype),
            num_warps=config.num_warps, num_stages=config.num_stages,
            enable_fp_fusion=half == 0 or q.dtype != torch.float32,  # the rotary embedding rounds every product
            **pdl_options(config.dependent),
        )  # fmt: skip

    def _prefill(self, call: AttentionCall, q: Tensor, cache: LayerKVCache) -> None:
        meta, out, window, softcap, chunk = self.meta, call.out, call.window, call.softcap, call.chunk
        sinks, slopes = call.sinks, call.alibi_slopes
        kv_heads, head_dim, value_dim = cache.k.shape[2], q.shape[2], out.shape[2]
        group = q.shape[1] // kv_heads
        config = self.backend.prefill_config(head_dim, q.shape[1], kv_heads, q.dtype, meta.num_tokens)
        if kv_fp8_max(cache.k.dtype) and pad(head_dim) != pad(value_dim):
            config = replace(config, block_n=32)  # with 64, Triton 3.6 reads the values of other keys from such a cache
        tiles = cdiv(meta.num_tokens, config.block_m // group) + meta.num_rows
        gate = q if call.gate is None else call.gate
        paged_prefill[(kv_heads, tiles)](
            q, out, cache.k, cache.v,
            meta.slots, meta.query_start, meta.seq_lens, meta.block_table, q if sinks is None else sinks,
            q if slopes is None else slopes, meta.slots if meta.lookahead is None else meta.lookahead, gate,
            meta.num_rows, meta.num_tokens, call.scale * cache.k_scale, cache.v_scale, softcap, window, chunk,
            meta.block_table.stride(0), q.stride(0), q.stride(1), *gate.stride()[:2],
            KV_HEADS=kv_heads, GROUP=group,
            HEAD_DIM=head_dim, HEAD_PAD=pad(head_dim), VALUE_DIM=value_dim, VALUE_PAD=pad(value_dim),
            BLOCK_SIZE=cache.k.shape[1], BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            SOFTCAP=softcap > 0.0, SINKS=sinks is not None, ALIBI=slopes is not None, LOCAL=window > 0 or chunk > 0,
            LOOKAHEAD=meta.lookahead is not None, GATED=call.gate is not None,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def pad(dim: int) -> int:
    """Power of two that a tile of `dim` channels takes."""
    return max(next_power_of_2(dim), 16)


def write_kv_cache(k: Tensor, v: Tensor, cache: LayerKVCache, meta: AttentionMetadata) -> None:
    """Write the step's keys and values to their cache slots; padded tokens have none."""
    kv_heads, head_dim, value_dim = k.shape[1], k.shape[2], v.shape[2]
    numbers = kv_heads * max(head_dim, value_dim)
    block = min(next_power_of_2(numbers), 2048)
    write_kv[(meta.num_tokens, cdiv(numbers, block))](
        k, v, cache.k, cache.v, meta.slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        cache.k_scale, cache.v_scale, KV_HEADS=kv_heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK=block,
        KV_FP8_MAX=kv_fp8_max(cache.k.dtype), num_warps=4,
    )  # fmt: skip


def rope_and_write_kv(
    rotary: Rotary, q: Tensor, k: Tensor, v: Tensor, cache: LayerKVCache, meta: AttentionMetadata
) -> tuple[Tensor, Tensor]:
    """q and k rotated, and `write_kv_cache` of the keys and values, in one launch."""
    target = CacheWrite(v, cache.k, cache.v, meta.slot_mapping, cache.k_scale, cache.v_scale, kv_fp8_max(cache.k.dtype))
    return launch_rope(q, k, rotary.cos, rotary.sin, _qk_norm_from(rotary), target)


def _qk_norm_from(rotary: Rotary) -> QKNorm | None:
    if rotary.q_weight is None or rotary.k_weight is None:
        return None
    return QKNorm(rotary.q_weight, rotary.k_weight, rotary.eps, rotary.offset, rotary.wide)
