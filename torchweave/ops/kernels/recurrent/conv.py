"""Triton: depthwise causal convolution over the rows of a step, with the last inputs of each row as its state."""

# Triton's decorators and loops are untyped.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.dependent_launch import pdl_prefetch, pdl_wait
from torchweave.ops.kernels.recurrent.chunks import COMMIT, READ, find_chunk, row_end, silu


@triton.jit
def conv_decode(
    x, weight, bias, out, state, slots, seq_lens, channels, x_stride, out_stride, weight_stride, width_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Token `program_id(1)` of a step with one token a row; BLOCK channels.

    The previous kernel writes inputs, but neither the rows of the step nor states: both are loaded before the wait, bypassing L1.
    """
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = channel < channels
    slot = tl.load(slots + row, cache_modifier=".cg").to(tl.int64)
    target = out + row * out_stride + channel
    if slot < 0:
        pdl_wait(DEPENDENT)
        tl.store(target, tl.zeros([BLOCK], out.dtype.element_ty), mask=valid)
        return
    continued = valid & (tl.load(seq_lens + row, cache_modifier=".cg") > 1)
    inputs = state + (slot * channels + channel) * (WIDTH - 1)
    weights = weight + channel * weight_stride
    if row == 0:
        pdl_prefetch(tl.where(valid, weights, weight), DEPENDENT)
    window = ()
    for j in tl.static_range(WIDTH - 1):
        # Element j is read and element j - 1 is written by the thread of the channel.
        window += (tl.load(inputs + j, mask=continued, other=0.0, cache_modifier=".cg"),)
    pdl_wait(DEPENDENT)
    window += (tl.load(x + row * x_stride + channel, mask=valid, other=0.0),)
    result = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        result += tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
    for j in tl.static_range(WIDTH):
        factor = tl.load(weights + j * width_stride, mask=valid, other=0.0)
        result += window[j].to(tl.float32) * factor.to(tl.float32)
    if SILU:
        result = silu(result)
    tl.store(target, result.to(out.dtype.element_ty), mask=valid)
    for j in tl.static_range(1, WIDTH):
        tl.store(inputs + j - 1, window[j], mask=valid)


@triton.jit
def _write_inputs(x, inputs, first, end, continued, valid, x_stride, WIDTH: tl.constexpr):
    """Write the last WIDTH - 1 inputs of a row into its state, the older ones of which were there before."""
    for j in tl.static_range(WIDTH - 1):
        token = (end - (WIDTH - 1) + j).to(tl.int64)
        new = tl.load(x + token * x_stride, mask=valid & (token >= first), other=0.0)
        old = tl.load(inputs + (token - first + WIDTH - 1), mask=valid & (token < first) & continued, other=0.0)
        tl.store(inputs + j, tl.where(token < first, old, new), mask=valid)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_start"])
def conv_mixed(
    x, weight, bias, out, state, slots, query_start, seq_lens, position, num_rows, num_tokens, channels,
    x_stride, out_stride, weight_stride, width_stride,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    ACCESS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """CHUNK tokens of a row, BLOCK channels. The program of a row's first chunk alone reads and writes the row's state.

    All inputs are loaded before the first result, several channels a thread, and each once: results share them in registers.
    """
    pdl_wait(DEPENDENT)
    row, first, end, begin = find_chunk(query_start, tl.program_id(0), num_rows, num_tokens, CHUNK)
    if begin >= end:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = channel < channels
    target = out + begin.to(tl.int64) * out_stride + channel
    if row == num_rows:
        if ACCESS != COMMIT:
            for i in range(tl.minimum(end - begin, CHUNK)):
                tl.store(target + i * out_stride, tl.zeros([BLOCK], out.dtype.element_ty), mask=valid)
        return
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(seq_lens + row)
    continued = length > end - first
    inputs = state + (slot * channels + channel) * (WIDTH - 1)
    if ACCESS == COMMIT:
        if begin == first:
            end = row_end(end, length, position, slot, ACCESS)
            _write_inputs(x + channel, inputs, first, end, continued, valid, x_stride, WIDTH)
        return
    source = x + (begin.to(tl.int64) - (WIDTH - 1)) * x_stride + channel
    window = ()
    for j in tl.static_range(WIDTH - 1):
        if begin == first:
            value = tl.load(inputs + j, mask=valid & continued, other=0.0)
        else:
            value = tl.load(source + j * x_stride, mask=valid, other=0.0)
        window += (value,)
    for i in tl.static_range(CHUNK):
        window += (tl.load(source + (WIDTH - 1 + i) * x_stride, mask=valid & (begin + i < end), other=0.0),)
    factors = ()
    for j in tl.static_range(WIDTH):
        factor = tl.load(weight + channel * weight_stride + j * width_stride, mask=valid, other=0.0)
        factors += (factor.to(tl.float32),)
    added = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        added += tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
    for i in tl.static_range(CHUNK):
        result = added
        for j in tl.static_range(WIDTH):
            result += window[i + j].to(tl.float32) * factors[j]
        if SILU:
            result = silu(result)
        tl.store(target + i * out_stride, result.to(out.dtype.element_ty), mask=valid & (begin + i < end))
    if (ACCESS != READ) & (begin == first):
        tl.debug_barrier()  # every thread has read the state before it changes
        _write_inputs(x + channel, inputs, first, end, continued, valid, x_stride, WIDTH)
