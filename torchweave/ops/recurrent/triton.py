"""Launches of the Triton kernels of the recurrent ops.

Grids depend on the number of rows and tokens only, so that a CUDA graph may hold them for any rows. A decode step is one launch a
call. A mixed step of SSD is two: its chunked kernel skips rows with one token, which a step of the recurrence serves. A mixed
step of the gated delta rule is three: what chunks compute without states, the chunks, and the rows with few tokens. The other ops
serve all rows in one launch. A step with drafts, whose rows are short, is one launch a call to read the state, one to copy what
the state depends on, and one to advance it.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweave.ops.attention.op import AttentionMetadata
from torchweave.ops.kernels.dependent_launch import pdl_options, supports_pdl
from torchweave.ops.kernels.recurrent.conv import conv_decode, conv_mixed
from torchweave.ops.kernels.recurrent.copy import copy_tokens
from torchweave.ops.kernels.recurrent.gated_delta import delta_prefill, delta_scan, delta_solve
from torchweave.ops.kernels.recurrent.scan import lru_scan, selective_scan
from torchweave.ops.kernels.recurrent.ssd import (
    ssd_chunk_scan,
    ssd_chunk_states,
    ssd_decode,
    ssd_drafts,
    ssd_pass_states,
)
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2
from torchweave.ops.recurrent.call import ConvCall, DeltaCall, LruCall, RecurrentCall, ScanCall, SsdCall, StateAccess

CONV_CHUNK, CONV_BLOCK, CONV_WARPS = 8, 512, 4
CONV_DECODE_BLOCK = 32 * CONV_WARPS  # a channel a thread
SSD_CHUNK, SSD_BLOCK = 128, 128
SCAN_TILE, LRU_TILE = 16, 32
DELTA_FEW = 8  # tokens of a row that are walked one by one; a chunk takes as long
DELTA_CHUNK, DELTA_BLOCK, DELTA_WARPS, DELTA_STAGES = 64, 64, 4, 2
SOLVE_WARPS, SOLVE_REGISTERS = 4, 168  # three programs on a multiprocessor, where more registers admit two
ALL = 1 << 30  # for FEW: every row is walked token by token
COPY_BLOCK = 1024
_MAX_COPIES = 4
FEW_PROGRAMS = 512
"""Below this number of programs blocks are smaller: some waves over the multiprocessors hide the latency of one read."""
SHARED_FROM = 12
"""Programs share a step's chunks where a program for each possible chunk would be this many times those of one prompt."""


class Rows(NamedTuple):
    """The rows of a step, and what happens to their states; `position` is read by `StateAccess.COMMIT`."""

    meta: AttentionMetadata
    access: StateAccess
    position: Tensor

    @property
    def programs(self) -> int:
        """Rows, and one of padded tokens, which have results only."""
        return self.meta.num_rows + (not self.meta.decode_only and self.access != StateAccess.COMMIT)


def run_on_triton(
    call: RecurrentCall,
    state: Tensor,
    meta: AttentionMetadata,
    access: StateAccess = StateAccess.ADVANCE,
    position: Tensor | None = None,
) -> None:
    """Run a call over the rows of `meta` and advance their slots of `state` `[S, ...]` as `access` says; nothing is read by the
    host."""
    if meta.num_tokens == 0:
        return
    assert state.is_contiguous()
    assert access == StateAccess.ADVANCE or not meta.decode_only
    launch, rows = _LAUNCHES[type(call)], Rows(meta, access, meta.seq_lens if position is None else position)
    if call.out.stride(-1) == 1:
        launch(call, call.out, state, rows)
    else:
        out = torch.empty(call.out.shape, dtype=call.out.dtype, device=call.out.device)
        launch(call, out, state, rows)
        call.out.copy_(out)


def copy_on_triton(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copies of up to four tensors `[T, ...]` of a step's tokens, by one launch."""
    sources = [_flat_tokens(each) for each in tensors]
    targets = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in tensors]
    widths, strides = [each.shape[1] for each in sources], [each.stride(0) for each in sources]
    unused = _MAX_COPIES - len(sources)
    grid = (cdiv(max(widths), COPY_BLOCK), sources[0].shape[0])
    copy_tokens[grid](
        *sources, *sources[:1] * unused, *targets, *targets[:1] * unused, *widths, *[0] * unused, *strides, *[0] * unused,
        COUNT=len(sources), BLOCK=COPY_BLOCK,
    )  # fmt: skip
    return targets


def _flat_tokens(x: Tensor) -> Tensor:
    """`[T, elements]` of `[T, ...]`: a view of slices of a merged projection."""
    flat = x.reshape(x.shape[0], -1)
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def _dense(x: Tensor) -> Tensor:
    """`x`, or a copy of it, whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _options(device: torch.device, num_warps: int, num_stages: int = 1) -> dict[str, Any]:
    """Launch options, and the argument DEPENDENT."""
    dependent = supports_pdl(device)
    return {"num_warps": num_warps, "num_stages": num_stages, "DEPENDENT": int(dependent), **pdl_options(dependent)}


def _precision(dtype: torch.dtype) -> str:
    """Precision of products of float32 numbers for inputs of `dtype`: float32's own takes minutes to build."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _block(size: int, programs: int, large: int, small: int) -> int:
    """Channels of a program: `large`, or down to `small` where `programs` times the blocks of `size` are few."""
    block = min(large, 1 << (size - 1).bit_length())
    while block > small and programs * cdiv(size, block) < FEW_PROGRAMS:
        block //= 2
    return block


def _most_rows(meta: AttentionMetadata, few: int) -> int:
    """The most rows of more than `few` tokens that a step can have, at least 1."""
    return max(1, min(meta.num_rows, meta.num_tokens // (few + 1)))


def _chunk_programs(meta: AttentionMetadata, chunk: int, others: int) -> tuple[int, bool]:
    """Programs for a step's chunks, times `others`, and whether they share the chunks.

    They do where a program for each possible chunk would nearly always find none: as many programs as one prompt has chunks, or,
    where that is few, some waves over the multiprocessors. Short rows have more chunks, of which a program takes several.
    """
    chunks, of_prompt = meta.num_tokens // chunk + meta.num_rows + 1, meta.num_tokens // chunk + 2
    if chunks < SHARED_FROM * of_prompt or chunks * others < 8 * FEW_PROGRAMS:
        return chunks, False
    return min(chunks, max(of_prompt, cdiv(FEW_PROGRAMS, others))), True


def _launch_conv(call: ConvCall, out: Tensor, state: Tensor, rows: Rows) -> None:
    meta = rows.meta
    x, weight = _dense(call.x), call.weight
    channels, width = weight.shape
    shared = {"WIDTH": width, "BIAS": call.bias is not None, "SILU": bool(call.activation)}
    bias = weight if call.bias is None else call.bias
    strides = (x.stride(0), out.stride(0), *weight.stride())
    if meta.decode_only:
        conv_decode[cdiv(channels, CONV_DECODE_BLOCK), meta.num_rows](
            x, weight, bias, out, state, meta.slots, meta.seq_lens, channels, *strides,
            **shared, BLOCK=CONV_DECODE_BLOCK, **_options(x.device, CONV_WARPS),
        )  # fmt: skip
        return
    chunk = max(CONV_CHUNK, next_power_of_2(width))  # the first chunk of a row alone reads its state
    block = min(CONV_BLOCK, next_power_of_2(channels))
    chunks = meta.num_tokens // chunk + meta.num_rows + 1
    conv_mixed[chunks, cdiv(channels, block)](
        x, weight, bias, out, state, meta.slots, meta.query_start, meta.seq_lens, rows.position, meta.num_rows,
        meta.num_tokens, channels, *strides, **shared, CHUNK=chunk, BLOCK=block, ACCESS=int(rows.access),
        **_options(x.device, CONV_WARPS),
    )  # fmt: skip


def _launch_delta(call: DeltaCall, out: Tensor, state: Tensor, rows: Rows) -> None:
    meta = rows.meta
    q, k, v, beta = _dense(call.q), _dense(call.k), _dense(call.v), call.beta
    by_channel = call.g.ndim == 3
    g = _dense(call.g) if by_channel else call.g
    assert call.A_log is None or not by_channel, "gates are computed for a decay a head"
    gates = [beta if each is None else each.contiguous() for each in (call.A_log, call.dt_bias)]
    heads, key_dim = k.shape[1:]
    value_heads, value_dim = v.shape[1:]
    strides = [stride for each in (q, k, v, g, beta, out) for stride in each.stride()[:2]]
    sizes = {
        "VALUE_HEADS": value_heads, "GROUP": value_heads // heads, "KEY_DIM": key_dim,
        "KEY_PAD": max(16, next_power_of_2(key_dim)),
    }  # fmt: skip
    gated = {"NORMALIZE": call.normalize, "GATES": call.A_log is not None}
    chunked = not meta.decode_only and not by_channel and rows.access == StateAccess.ADVANCE
    sizes["FEW"] = DELTA_FEW if chunked else ALL
    if chunked:
        _launch_delta_chunks((q, k, v, g, beta, *gates), out, state, meta, sizes, gated)
    block = _block(value_dim, value_heads * meta.num_rows, 32, 16)
    delta_scan[cdiv(value_dim, block), value_heads, rows.programs](
        q, k, v, g, beta, *gates, out, state, meta.slots, meta.query_start, meta.seq_lens, rows.position, meta.num_rows,
        meta.num_tokens, key_dim**-0.5, *strides, **sizes, **gated, VALUE_DIM=value_dim, BLOCK=block, BY_CHANNEL=by_channel,
        DECODE_ONLY=meta.decode_only, ACCESS=int(rows.access), **_options(q.device, 2 if block > 16 else 1),
    )  # fmt: skip


def _launch_delta_chunks(
    inputs: Sequence[Tensor],
    out: Tensor,
    state: Tensor,
    meta: AttentionMetadata,
    sizes: dict[str, int],
    gated: dict[str, bool],
) -> None:
    """Rows of more than DELTA_FEW tokens: what does not depend on states, then the states and results."""
    q, k, v, g, beta, *gates = inputs
    value_heads, value_dim = v.shape[1:]
    key_dim = k.shape[2]
    narrow = q.element_size() == 2 and gated["NORMALIZE"]  # then entries of the matrices are small
    chunk = DELTA_CHUNK if narrow else 32
    stages = DELTA_STAGES if narrow and q.dtype == torch.bfloat16 else 1  # float32 fills the shared memory
    chunks = meta.num_tokens // chunk + meta.num_rows + 1
    matrices = torch.empty(
        2, chunks, value_heads, chunk, chunk, device=q.device, dtype=torch.float16 if narrow else torch.float32
    )
    factors = torch.empty(chunks, value_heads, 4, chunk, device=q.device)
    strides = {
        name: each.stride()[:2] for name, each in {"q": q, "k": k, "v": v, "g": g, "beta": beta, "out": out}.items()
    }
    programs, shared = _chunk_programs(meta, chunk, value_heads)
    delta_solve[value_heads, programs](
        q, k, g, beta, *gates, *matrices, factors, meta.query_start, meta.num_rows, meta.num_tokens, key_dim**-0.5,
        *strides["q"], *strides["k"], *strides["g"], *strides["beta"], **sizes, **gated, CHUNK=chunk, SHARED=shared,
        **_options(q.device, SOLVE_WARPS), **({"maxnreg": SOLVE_REGISTERS} if narrow else {}),
    )  # fmt: skip
    block = max(16, min(DELTA_BLOCK, next_power_of_2(value_dim)))
    delta_prefill[cdiv(value_dim, block), value_heads, _most_rows(meta, DELTA_FEW)](
        q, k, v, *matrices, factors, out, state, meta.slots, meta.query_start, meta.seq_lens, meta.num_rows, meta.num_tokens,
        *strides["q"], *strides["k"], *strides["v"], *strides["out"], **sizes, VALUE_DIM=value_dim, BLOCK=block, CHUNK=chunk,
        STAGES=stages, **_options(q.device, DELTA_WARPS),
    )  # fmt: skip


def _launch_ssd(call: SsdCall, out: Tensor, state: Tensor, rows: Rows) -> None:
    meta = rows.meta
    x, B, C, dt = _dense(call.x), _dense(call.B), _dense(call.C), call.dt
    _, heads, head_dim = x.shape
    groups, width = B.shape[1:]
    shared = {
        "HEADS": heads, "GROUP": heads // groups, "HEAD_DIM": head_dim, "STATE": width,
        "STATE_PAD": max(16, next_power_of_2(width)), "SKIP": call.D is not None, "BIAS": call.dt_bias is not None,
        "SOFTPLUS": call.softplus, "LOG_RATE": call.log_rate, "GATE": call.z is not None,
    }  # fmt: skip
    z = x if call.z is None else _dense(call.z)
    rate = call.A.contiguous()
    skip, bias = (rate if each is None else each.contiguous() for each in (call.D, call.dt_bias))
    inputs = (x, dt, rate, B, C, skip, z, bias, out, state, meta.slots, meta.query_start, meta.seq_lens)
    strides = [stride for each in (x, dt, B, C, z, out) for stride in each.stride()[:2]]
    block = _block(head_dim, heads * meta.num_rows, 32, 8)
    # With two warps, 32 channels of 256 state columns spill: 436 us for 128 rows of 24 heads of 128 on an H100, with four 274.
    options = _options(x.device, max(2, width // 64) if block > 8 else 1)
    if rows.access != StateAccess.ADVANCE:
        ssd_drafts[cdiv(head_dim, block), heads, rows.programs](
            *inputs, rows.position, meta.num_rows, meta.num_tokens, call.dt_min, call.dt_max, *strides,
            **shared, BLOCK=block, ACCESS=int(rows.access), **options,
        )  # fmt: skip
        return
    if not meta.decode_only:
        _launch_ssd_chunks(call, (x, dt, rate, B, C, skip, z, bias), out, state, meta)
    ssd_decode[cdiv(head_dim, block), heads, meta.num_rows](
        *inputs, call.dt_min, call.dt_max, *strides,
        **shared, BLOCK=block, DECODE_ONLY=meta.decode_only, **options,
    )  # fmt: skip


def _launch_ssd_chunks(
    call: SsdCall, inputs: Sequence[Tensor], out: Tensor, state: Tensor, meta: AttentionMetadata
) -> None:
    """Rows with several tokens: what each chunk adds to the state, the states before the chunks, and the chunks' results."""
    x, dt, rate, B, C, skip, z, bias = inputs
    B, C = B.to(x.dtype), C.to(x.dtype)  # as the products round them; wider ones take too much shared memory
    _, heads, head_dim = x.shape
    groups, width = B.shape[1:]
    wide = x.dtype == torch.float32
    chunk = 32 if wide else SSD_CHUNK
    tile = 128 // x.element_size()  # rows of 128 bytes: with 64, states of 32 came out wrong (decision 0208)
    block = max(16, min(32 if wide else SSD_BLOCK, next_power_of_2(head_dim)))
    blocks = cdiv(head_dim, block)
    programs, shared_chunks = _chunk_programs(meta, chunk, blocks * heads)
    options = _options(x.device, 8, 3) if block == SSD_BLOCK else _options(x.device, 8 if wide else 4, 2)
    shared = {
        "HEADS": heads, "GROUP": heads // groups, "HEAD_DIM": head_dim, "STATE": width, "BLOCK": block, "TILE": tile,
        "CHUNK": chunk, "BIAS": call.dt_bias is not None, "SOFTPLUS": call.softplus, "LOG_RATE": call.log_rate,
        "PRECISION": _precision(x.dtype), "SHARED": shared_chunks,
    }  # fmt: skip
    strides = [stride for each in (x, dt, B, C, z, out) for stride in each.stride()[:2]]
    grid = (blocks, heads, programs)
    before = x  # not read
    if meta.num_tokens > chunk:
        places = (meta.num_tokens // chunk + 1, heads)
        added = torch.empty(*places, head_dim, width, device=x.device)
        before, decay = torch.empty_like(added, dtype=x.dtype), torch.empty(places, device=x.device)
        ssd_chunk_states[grid](
            x, dt, rate, B, bias, added, decay, meta.query_start, meta.num_rows, meta.num_tokens, call.dt_min,
            call.dt_max, *strides[:6], **shared, **options,
        )  # fmt: skip
        ssd_pass_states[cdiv(head_dim * width, 1024), heads, _most_rows(meta, chunk)](
            added, decay, before, state, meta.slots, meta.query_start, meta.seq_lens, meta.num_rows, meta.num_tokens,
            HEADS=heads, SIZE=head_dim * width, BLOCK=1024, CHUNK=chunk, **_options(x.device, 4),
        )  # fmt: skip
    ssd_chunk_scan[grid](
        x, dt, rate, B, C, skip, z, bias, out, state, before, meta.slots, meta.query_start, meta.seq_lens, meta.num_rows,
        meta.num_tokens, call.dt_min, call.dt_max, *strides, **shared, SKIP=call.D is not None, GATE=call.z is not None,
        **options,
    )  # fmt: skip


def _launch_scan(call: ScanCall, out: Tensor, state: Tensor, rows: Rows) -> None:
    meta = rows.meta
    x, dt, B, C = (_dense(each) for each in (call.x, call.dt, call.B, call.C))
    z = x if call.z is None else _dense(call.z)
    channels, width = call.A.shape
    rate = call.A.contiguous()
    skip, bias = (rate if each is None else each.contiguous() for each in (call.D, call.dt_bias))
    tile = 1 if meta.decode_only else SCAN_TILE
    block = min(64 if meta.decode_only else 16, next_power_of_2(channels))
    selective_scan[cdiv(channels, block), rows.programs](
        x, dt, rate, B, C, skip, z, bias, out, state, meta.slots, meta.query_start, meta.seq_lens, rows.position,
        meta.num_rows, meta.num_tokens, channels, *(each.stride(0) for each in (x, dt, B, C, z, out)),
        STATE=width, STATE_PAD=next_power_of_2(width), BLOCK=block, TILE=tile, SKIP=call.D is not None,
        GATE=call.z is not None, BIAS=call.dt_bias is not None, LOG_RATE=call.log_rate, DECODE_ONLY=meta.decode_only,
        ACCESS=int(rows.access), **_options(x.device, 4),
    )  # fmt: skip


def _launch_lru(call: LruCall, out: Tensor, state: Tensor, rows: Rows) -> None:
    meta = rows.meta
    a, x = _dense(call.a), _dense(call.x)
    channels = x.shape[1]
    block = min(256 if meta.decode_only else 64, next_power_of_2(channels))
    lru_scan[cdiv(channels, block), rows.programs](
        a, x, out, state, meta.slots, meta.query_start, meta.seq_lens, rows.position, meta.num_rows, meta.num_tokens,
        channels, a.stride(0), x.stride(0), out.stride(0), BLOCK=block, TILE=1 if meta.decode_only else LRU_TILE,
        DECODE_ONLY=meta.decode_only, ACCESS=int(rows.access), **_options(x.device, 4),
    )  # fmt: skip


_LAUNCHES: dict[type, Callable[[Any, Tensor, Tensor, Rows], None]] = {
    ConvCall: _launch_conv,
    DeltaCall: _launch_delta,
    SsdCall: _launch_ssd,
    ScanCall: _launch_scan,
    LruCall: _launch_lru,
}
