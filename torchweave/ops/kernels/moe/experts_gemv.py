"""Triton kernels for routed experts with one or two tokens: chosen rows of the weights times a token, element by element.

Each weight is read once and used once or twice, so memory bandwidth is the limit. `rows_up_kernel` and `rows_down_kernel` read
weights in 16 bits or FP8, `words_up_kernel` and `words_down_kernel` words of 4-bit numbers (`kernels.quant.int_rows`). All
support programmatic dependent launch (`dependent_launch.py`).
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_trigger, pdl_wait
from torchweave.ops.kernels.moe.packing import PLAIN, Packing, fp8_scales, packed_arguments
from torchweave.ops.kernels.quant.int_linear import BLOCK, WORDS
from torchweave.ops.kernels.quant.int_rows import add_row_words, row_parameter, row_words, runs_of_words
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def gated_activation(
    gate, up_value, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr
):
    """`act(gate) * up_value` in float32 of values of DTYPE, rounded as in the model: after the activation."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up_value = tl.maximum(tl.minimum(up_value, LIMIT), -LIMIT)
    if ALPHA > 0:
        gate = gate * tl.sigmoid(gate * ALPHA)
        up_value += 1
    else:
        gate = activation(gate, ACTIVATION)
    return gate.to(DTYPE).to(tl.float32) * up_value


@triton.jit
def activation(x, ACTIVATION: tl.constexpr):
    """One of `torchweave.ops.moe.experts.ACTIVATIONS`, in float32."""
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        x = tl.maximum(x, 0.0)
        if ACTIVATION == "relu2":
            x = x * x
    return x


@triton.jit
def add_shared(result, own, share, DTYPE: tl.constexpr):
    """The sum of routed experts plus the output of a shared one times its weight, in float32, rounded as in the model."""
    own = own.to(DTYPE).to(tl.float32) * share
    # A product and a sum of numbers in 16 bits become one multiply-add, without the rounding between them. Limits keep them apart:
    # numbers beyond them are rounded to infinity.
    own = tl.clamp(own, -3.4028234663852886e38, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
    return result.to(DTYPE).to(tl.float32) + own.to(DTYPE).to(tl.float32)


@triton.jit
def add_residual(result, residual, DTYPE: tl.constexpr):
    """The sum of experts, rounded as in the model, plus the residual, in float32."""
    return result.to(DTYPE).to(tl.float32) + residual.to(tl.float32)


@triton.jit
def rows_up_kernel(
    x, index, up, scales, bias, h, num_experts, inner, x_stride, expert_stride, row_stride, scale_rows,
    SCALE_BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, TOP: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """h[pair, I]: a program computes BLOCK_N activated columns of one pair of token and expert.

    FP8 (GROUPS above 0): a scale for SCALE_BLOCK rows and, with GROUPS above 1, for 128 inputs; the rows of a program share it.
    SHARED: of gate and up in 16 bits and in one iteration. A token's last expert is a shared one, whose programs come first and
    load its weights before the wait, while the routing is computed.
    """
    pair = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < inner
    k = tl.arange(0, BLOCK_K)
    if SHARED:
        tl.static_assert(GATED and not INTERLEAVED and GROUPS == 0 and WIDTH <= BLOCK_K)
        own = pair % TOP == 0
        pair = pair // TOP * TOP + (pair + TOP - 1) % TOP
        own_weights = up + (num_experts - 1).to(tl.int64) * expert_stride + column[:, None] * row_stride + k[None, :]
        own_mask = (inside[:, None] & (k < WIDTH)[None, :]) & own
        own_gate = tl.load(own_weights, mask=own_mask, other=0.0)
        own_up = tl.load(own_weights + inner * row_stride, mask=own_mask, other=0.0)
    pdl_wait(DEPENDENT)
    expert = tl.load(index + pair)
    if expert < num_experts:
        gate_row = column * 2 if INTERLEAVED else column
        up_row = column * 2 + 1 if INTERLEAVED else column + inner
        weights = up + expert.to(tl.int64) * expert_stride
        gate_weights = weights + gate_row[:, None] * row_stride + k[None, :]
        up_weights = weights + up_row[:, None] * row_stride + k[None, :]
        inputs = x + (pair // TOP) * x_stride + k
        scales += expert.to(tl.int64) * scale_rows * GROUPS
        first = tl.program_id(0) * BLOCK_N
        gate_block = scales + (first * 2 if INTERLEAVED else first) // SCALE_BLOCK * GROUPS
        up_block = scales + (first * 2 if INTERLEAVED else first + inner) // SCALE_BLOCK * GROUPS
        gate_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up_sum = tl.zeros([BLOCK_N, BLOCK_K] if GATED else [1, 1], tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_K, loop_unroll_factor=UNROLL):
            left = k < WIDTH - start
            mask = inside[:, None] & left[None, :]
            if SHARED:
                mask = mask & (pair % TOP != TOP - 1)
                gate_tile = tl.load(gate_weights + start, mask=mask, other=own_gate, eviction_policy="evict_first")
                up_tile = tl.load(up_weights + start, mask=mask, other=own_up, eviction_policy="evict_first")
            else:
                gate_tile = tl.load(gate_weights + start, mask=mask, other=0.0, eviction_policy="evict_first")
                if GATED:
                    up_tile = tl.load(up_weights + start, mask=mask, other=0.0, eviction_policy="evict_first")
            value = tl.load(inputs + start, mask=left, other=0.0).to(tl.float32)[None, :]
            if GROUPS > 1:
                group = (start + k) // 128
                gate_value = value * tl.load(gate_block + group, mask=left, other=0.0)[None, :]
            else:
                gate_value = value
            gate_sum += gate_tile.to(tl.float32) * gate_value
            if GATED:
                if GROUPS > 1:
                    value *= tl.load(up_block + group, mask=left, other=0.0)[None, :]
                up_sum += up_tile.to(tl.float32) * value
        dtype = h.dtype.element_ty
        gate = tl.sum(gate_sum, axis=1)
        if GROUPS == 1:
            gate *= tl.load(scales + (gate_row if GATED else column) // SCALE_BLOCK, mask=inside, other=0.0)
        biases = bias + expert.to(tl.int64) * (inner * 2 if GATED else inner)
        if HAS_BIAS:
            gate += tl.load(biases + (gate_row if GATED else column), mask=inside, other=0.0).to(tl.float32)
        gate = gate.to(dtype).to(tl.float32)
        if GATED:
            up_value = tl.sum(up_sum, axis=1)
            if GROUPS == 1:
                up_value *= tl.load(scales + up_row // SCALE_BLOCK, mask=inside, other=0.0)
            if HAS_BIAS:
                up_value += tl.load(biases + up_row, mask=inside, other=0.0).to(tl.float32)
            gate = gated_activation(gate, up_value.to(dtype).to(tl.float32), ACTIVATION, ALPHA, LIMIT, dtype)
        else:
            gate = activation(gate, ACTIVATION)
        tl.store(h + pair.to(tl.int64) * inner + column, gate.to(dtype), mask=inside)


@triton.jit
def rows_down_kernel(
    h, index, weight, down, scales, bias, residual, out, num_experts, num_outputs, expert_stride, row_stride, residual_stride,
    out_stride, scale_rows,
    SCALE_BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    INNER: tl.constexpr, TOP: tl.constexpr, TOP_BLOCK: tl.constexpr, SHARED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[token, N], the weighted sum: a program reads BLOCK_N rows of each of the token's experts, all at once. ADD: plus the
    residual.

    The previous kernel only read the routing, so its writer has ended when this kernel starts: the routing and the residual are
    read, bypassing L1, and the first weights are loaded before the wait. SHARED: of weights in 16 bits; the last expert is a
    shared one.
    """
    tl.static_assert(GROUPS == 0 or not SHARED)
    ROUTED: tl.constexpr = TOP - 1 if SHARED else TOP
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, TOP_BLOCK)
    k = tl.arange(0, BLOCK_K)
    inside = n < num_outputs
    expert = tl.load(index + token * TOP + j, mask=j < ROUTED, other=num_experts, cache_modifier=".cg")
    chosen = expert < num_experts
    share = tl.load(weight + token * TOP + j, mask=chosen, other=0.0, cache_modifier=".cg").to(tl.float32)
    rows = expert.to(tl.int64)[:, None] * expert_stride + n[None, :] * row_stride
    weights = down + rows[:, :, None] + k[None, None, :]
    readable = (chosen[:, None] & inside[None, :])[:, :, None]
    first = readable & (k < INNER)[None, None, :]
    tile = tl.load(weights, mask=first, other=0.0, eviction_policy="evict_first")
    if SHARED:
        own_weights = down + (num_experts - 1).to(tl.int64) * expert_stride + n[:, None] * row_stride + k[None, :]
        own_tile = tl.load(own_weights, mask=inside[:, None] & (k < INNER)[None, :], other=0.0)
        own_share = tl.load(weight + token * TOP + ROUTED, cache_modifier=".cg").to(tl.float32)
        own_total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if ADD:
        added = tl.load(residual + token * residual_stride + n, mask=inside, other=0.0, cache_modifier=".cg")
    pdl_wait(DEPENDENT)
    inputs = h + (token * TOP + j).to(tl.int64)[:, None] * INNER + k[None, :]
    own_inputs = h + (token * TOP + ROUTED).to(tl.int64) * INNER + k
    scales += expert.to(tl.int64) * scale_rows * GROUPS
    block = tl.program_id(0) * BLOCK_N // SCALE_BLOCK * GROUPS
    total = tl.zeros([TOP_BLOCK, BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, INNER, BLOCK_K, loop_unroll_factor=UNROLL):
        in_next_tile = readable & (k < INNER - BLOCK_K - start)[None, None, :]
        following = tl.load(weights + start + BLOCK_K, mask=in_next_tile, other=0.0, eviction_policy="evict_first")
        here = chosen[:, None] & (k < INNER - start)[None, :]
        value = tl.load(inputs + start, mask=here, other=0.0).to(tl.float32)
        if GROUPS > 1:
            value *= tl.load(scales[:, None] + block + ((start + k) // 128)[None, :], mask=here, other=0.0)
        total += tile.to(tl.float32) * value[:, None, :]
        tile = following
        if SHARED:
            left = k < INNER - BLOCK_K - start
            own_following = tl.load(own_weights + start + BLOCK_K, mask=inside[:, None] & left[None, :], other=0.0)
            own_value = tl.load(own_inputs + start, mask=k < INNER - start, other=0.0).to(tl.float32)
            own_total += own_tile.to(tl.float32) * own_value[None, :]
            own_tile = own_following
    sums = tl.sum(total, axis=2)
    if GROUPS == 1:
        sums *= tl.load(
            scales[:, None] + (n // SCALE_BLOCK)[None, :], mask=chosen[:, None] & inside[None, :], other=0.0
        )
    if HAS_BIAS:
        biases = bias + expert.to(tl.int64)[:, None] * num_outputs + n[None, :]
        sums += tl.load(biases, mask=chosen[:, None] & inside[None, :], other=0.0).to(tl.float32)
    result = tl.sum(sums * share[:, None], axis=0)
    if SHARED:
        result = add_shared(result, tl.sum(own_total, axis=1), own_share, out.dtype.element_ty)
    if ADD:
        result = add_residual(result, added, out.dtype.element_ty)
    tl.store(out + token * out_stride + n, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _word_products(
    w, scales, zeros, inputs, rows, c, COUNT: tl.constexpr,
    FORMAT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    ZERO: tl.constexpr, ROWS: tl.constexpr, BLOCK_W: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Products `[ROWS]` of rows of w, COUNT words each, and the inputs."""
    words = w + rows[:, None] * COUNT + c[None, :]
    total = tl.zeros([ROWS, BLOCK_W // 4], tl.float32)
    for first in tl.static_range(0, COUNT, BLOCK_W):
        run = runs_of_words(first, BLOCK_W)
        by = row_parameter(scales, rows, run, 0, GROUP, GROUPS, PARTS, FORMAT == "e2m1")
        total = add_row_words(
            total, by, row_words(words, first, c, COUNT), inputs, run, scales, zeros, rows,
            FORMAT, WIDTH, GROUP, GROUPS, PARTS, ZERO, ROWS, BLOCK_W, ASSEMBLY,
        )  # fmt: skip
    return tl.sum(total, 1)


@triton.jit
def words_up_kernel(
    x, index, up, scales, zeros, row_scales, bias, h, num_experts, inner, x_stride,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, ZERO: tl.constexpr,
    BY_ROW: tl.constexpr, ASSEMBLY: tl.constexpr,
    WIDTH: tl.constexpr, TOP: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`rows_up_kernel` with words: the rows of gate and up are one tile of twice BLOCK_N rows, in the layout of the weight."""
    COUNT: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK * WORDS
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    pair, first_column = tl.program_id(1), tl.program_id(0) * BLOCK_N
    r, c = tl.arange(0, ROWS), tl.arange(0, BLOCK_W)
    column = first_column + tl.arange(0, BLOCK_N)
    # Scalars in 64 bits and offsets in 32, whose differences are constants: few registers address all loads of a thread.
    if GATED and INTERLEAVED:
        rows = r if EVEN else tl.minimum(r, (inner - first_column) * 2 - 1)
    else:
        rows = (r // BLOCK_N) * inner + (r % BLOCK_N if EVEN else tl.minimum(r % BLOCK_N, inner - first_column - 1))
    pdl_wait(DEPENDENT)
    expert = tl.load(index + pair)
    if expert < num_experts:
        first = expert.to(tl.int64) * (inner * 2 if GATED else inner)
        first += first_column * 2 if GATED and INTERLEAVED else first_column
        sums = _word_products(
            up + first * COUNT, scales + first * GROUPS, zeros + first * GROUPS, x + (pair // TOP).to(tl.int64) * x_stride,
            rows, c, COUNT, FORMAT, WIDTH, GROUP, GROUPS, PARTS, ZERO, ROWS, BLOCK_W, ASSEMBLY,
        )  # fmt: skip
        if BY_ROW:
            sums *= tl.load(row_scales + first + rows)
        if HAS_BIAS:
            sums += tl.load(bias + first + rows).to(tl.float32)
        dtype = h.dtype.element_ty
        sums = sums.to(dtype).to(tl.float32)
        if GATED:
            if INTERLEAVED:  # noqa: SIM108
                both = tl.reshape(sums, [BLOCK_N, 2])
            else:
                both = tl.permute(tl.reshape(sums, [2, BLOCK_N]), [1, 0])
            gate, up_value = tl.split(both)
            result = gated_activation(gate, up_value, ACTIVATION, ALPHA, LIMIT, dtype)
        else:
            result = activation(sums, ACTIVATION)
        pdl_trigger(DEPENDENT)
        tl.store(h + pair.to(tl.int64) * inner + column, result.to(dtype), mask=column < inner)


@triton.jit
def _experts_words(
    index, down, num_experts, num_outputs, rows, run, COUNT: tl.constexpr, TOP: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Words `[BLOCK_N, BLOCK_W]` of rows of a token's experts at index, one after the other; of each run which rows, if any."""
    j = run // COUNT
    expert = tl.load(index + j, mask=j < TOP, other=num_experts, cache_modifier=".cg")
    chosen = expert < num_experts
    start = tl.where(chosen, expert, 0).to(tl.int64) * num_outputs
    words = down + start * COUNT + run % COUNT
    at = tl.reshape(words[:, None] + tl.arange(0, 4)[None, :], [BLOCK_W])[None, :] + rows[:, None] * COUNT
    mask = tl.reshape(tl.broadcast_to(chosen[:, None], [BLOCK_W // 4, 4]), [BLOCK_W])[None, :]
    at = tl.max_contiguous(tl.multiple_of(at, [1, 16]), [1, 4])
    mask = tl.max_constancy(mask, [1, 4])
    tile = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
    return tile, start, chosen


@triton.jit
def words_down_kernel(
    h, index, weight, down, scales, zeros, row_scales, bias, residual, out, num_experts, num_outputs, residual_stride, out_stride,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, ZERO: tl.constexpr,
    BY_ROW: tl.constexpr, ASSEMBLY: tl.constexpr, INNER: tl.constexpr, TOP: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`rows_down_kernel` with words: a row is the words of all experts of the token, one after the other."""
    COUNT: tl.constexpr = (INNER + BLOCK - 1) // BLOCK * WORDS
    ALL: tl.constexpr = TOP * COUNT
    token = tl.program_id(1).to(tl.int64)
    n, first_row = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_N
    left = num_outputs - first_row
    rows = n if EVEN else tl.minimum(n, left - 1)
    # Offsets of rows, whose differences are constants, from one pointer for each run.
    down += first_row.to(tl.int64) * COUNT
    scales += first_row.to(tl.int64) * GROUPS
    zeros += first_row.to(tl.int64) * GROUPS
    row_scales += first_row
    index += token * TOP
    weight += token * TOP
    run = runs_of_words(0, BLOCK_W)
    tile, start, chosen = _experts_words(index, down, num_experts, num_outputs, rows, run, COUNT, TOP, BLOCK_W)
    by = row_parameter((scales + start * GROUPS)[None, :], rows, run % COUNT, 0, GROUP, GROUPS, PARTS, True)
    if ADD:
        places = residual + token * residual_stride + first_row + n
        added = tl.load(places, mask=n < left, other=0.0, cache_modifier=".cg")
    pdl_wait(DEPENDENT)
    total = tl.zeros([BLOCK_N, BLOCK_W // 4], tl.float32)
    for first in tl.static_range(0, ALL, BLOCK_W):
        run = runs_of_words(first, BLOCK_W)
        if first + BLOCK_W < ALL:
            following = runs_of_words(first + BLOCK_W, BLOCK_W)
            tile_ahead, start_ahead, chosen_ahead = _experts_words(
                index, down, num_experts, num_outputs, rows, following, COUNT, TOP, BLOCK_W
            )
            scales_ahead = (scales + start_ahead * GROUPS)[None, :]
            by_ahead = row_parameter(scales_ahead, rows, following % COUNT, 0, GROUP, GROUPS, PARTS, True)
        inputs = h + (token * TOP + run % ALL // COUNT)[:, None] * INNER
        products = add_row_words(
            tl.zeros([BLOCK_N, BLOCK_W // 4], tl.float32), by, tile, inputs, run % COUNT,
            (scales + start * GROUPS)[None, :], (zeros + start * GROUPS)[None, :], rows,
            FORMAT, INNER, GROUP, GROUPS, PARTS, ZERO, BLOCK_N, BLOCK_W, ASSEMBLY,
        )  # fmt: skip
        if BY_ROW:
            products *= tl.load((row_scales + start)[None, :] + rows[:, None])
        share = tl.load(weight + run // COUNT, mask=chosen, other=0.0, cache_modifier=".cg").to(tl.float32)
        total += tl.where(chosen[None, :], products * share[None, :], 0.0)  # h of other ranks' experts may be NaN
        if first + BLOCK_W < ALL:
            tile, start, chosen, by = tile_ahead, start_ahead, chosen_ahead, by_ahead
    result = tl.sum(total, 1)
    if HAS_BIAS:
        for j in tl.static_range(TOP):
            expert = tl.load(index + j)
            if expert < num_experts:
                biases = bias + expert.to(tl.int64) * num_outputs + first_row + rows
                result += tl.load(weight + j).to(tl.float32) * tl.load(biases).to(tl.float32)
    if ADD:
        result = add_residual(result, added, out.dtype.element_ty)
    pdl_trigger(DEPENDENT)
    tl.store(out + token * out_stride + first_row + n, result.to(out.dtype.element_ty), mask=n < left)


def _words(block: int, width: int) -> int:
    """Words of a row per iteration: at most `block` inputs, and no more than the row has."""
    return min(block // 8, next_power_of_2(cdiv(width, BLOCK.value) * WORDS.value))


def launch_rows_up(
    x: Tensor, index: Tensor, up: Tensor, bias: Tensor | None, h: Tensor, scales: Tensor | None = None,
    packing: Packing = PLAIN, *, gated: bool, interleaved: bool, activation: str, alpha: float, limit: float,
    block_n: int, block_k: int, num_warps: int, depth: int, dependent: int, shared: bool = False,
) -> None:  # fmt: skip
    """x [T, K], index [T, k], up [E, 2 I or I, K], h [T k, I]; rows contiguous.

    shared: load the last expert's weights, which every token's last column names, before the wait.

    scales, packing: of up if it is quantized, to FP8 or to 4 bits in words, and then contiguous; see
    `torchweave::quantized_experts`. With scales by block, `block_n`, twice if interleaved, divides 128.
    """
    (_, width), inner, pairs = x.shape, h.shape[1], index.numel()
    grid = (cdiv(inner, block_n), pairs)
    arguments: dict[str, Any] = {
        "x": x, "index": index, "up": up, "bias": x if bias is None else bias, "h": h, "num_experts": up.shape[0],
        "inner": inner, "x_stride": x.stride(0), "WIDTH": width, "TOP": index.shape[1], "GATED": gated,
        "INTERLEAVED": interleaved, "HAS_BIAS": bias is not None, "ACTIVATION": activation, "ALPHA": alpha, "LIMIT": limit,
        "BLOCK_N": block_n, "DEPENDENT": dependent, "num_warps": num_warps, **pdl_options(dependent),
    }  # fmt: skip
    if scales is not None and up.dtype == torch.int32:
        words_up_kernel[grid](
            **arguments,
            BLOCK_W=_words(block_k, width),
            EVEN=inner % block_n == 0,
            **packed_arguments(up, scales, packing, width),
        )
    else:
        rows_up_kernel[grid](
            **arguments, expert_stride=up.stride(0), row_stride=up.stride(1), SHARED=shared, BLOCK_K=block_k, UNROLL=depth,
            **fp8_scales(up, scales),
        )  # fmt: skip


def launch_rows_down(
    h: Tensor, index: Tensor, weight: Tensor, down: Tensor, bias: Tensor | None, out: Tensor, scales: Tensor | None = None,
    residual: Tensor | None = None,
    *, shared: bool = False, block_n: int, block_k: int, num_warps: int, depth: int, dependent: int,
) -> None:  # fmt: skip
    """h [T k, I], index and weight [T, k], down [E, K, I], residual and out [T, K]; the rest as `launch_rows_up`, without words."""
    tokens, top = index.shape
    rows_down_kernel[(cdiv(down.shape[1], block_n), tokens)](
        h, index, weight, down, bias=down if bias is None else bias,
        residual=out if residual is None else residual, out=out, num_experts=down.shape[0], num_outputs=down.shape[1],
        expert_stride=down.stride(0), row_stride=down.stride(1), out_stride=out.stride(0),
        residual_stride=0 if residual is None else residual.stride(0), ADD=residual is not None,
        INNER=down.shape[2], TOP=top, TOP_BLOCK=next_power_of_2(top - shared), SHARED=shared, HAS_BIAS=bias is not None,
        BLOCK_N=block_n, BLOCK_K=block_k, UNROLL=depth, DEPENDENT=dependent, num_warps=num_warps, **fp8_scales(down, scales),
        **pdl_options(dependent),
    )  # fmt: skip


def launch_words_down(
    h: Tensor, index: Tensor, weight: Tensor, down: Tensor, bias: Tensor | None, out: Tensor, scales: Tensor, packing: Packing,
    residual: Tensor | None = None, *, block_n: int, block_k: int, num_warps: int, depth: int, dependent: int,
) -> None:  # fmt: skip
    """As `launch_rows_down`, down [E, K, .] in words of 4-bit numbers; `block_k` counts inputs of all experts of a token."""
    (tokens, top), inner = index.shape, h.shape[1]
    width = top * cdiv(inner, BLOCK.value) * BLOCK.value
    words_down_kernel[(cdiv(down.shape[1], block_n), tokens)](
        h, index, weight, down, bias=scales if bias is None else bias, residual=out if residual is None else residual, out=out,
        num_experts=down.shape[0], num_outputs=down.shape[1], residual_stride=0 if residual is None else residual.stride(0),
        out_stride=out.stride(0), ADD=residual is not None, INNER=inner, TOP=top, HAS_BIAS=bias is not None, BLOCK_N=block_n,
        BLOCK_W=_words(block_k, width), EVEN=down.shape[1] % block_n == 0, DEPENDENT=dependent, num_warps=num_warps,
        num_stages=depth, **packed_arguments(down, scales, packing, inner), **pdl_options(dependent),
    )  # fmt: skip
