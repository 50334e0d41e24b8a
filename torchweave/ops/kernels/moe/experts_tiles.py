"""Triton kernels for routed experts with more tokens: pairs of token and expert are grouped by expert, see `sort_pairs`.

A program owns rows of one expert's weight and multiplies them by all of its tokens on tensor cores, BLOCK_M at a time: by
`wgmma`, or with fewer than four warps by `mma.sync`. Grids depend on sizes only, never on the routing, and every sum has a fixed
order, so CUDA graphs replay them with the same bits.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_prefetch, pdl_wait, supports_pdl
from torchweave.ops.kernels.moe.experts_gemv import activation, add_residual, add_shared, gated_activation
from torchweave.ops.kernels.moe.packing import PLAIN, Packing, fp8_scales, packed_arguments
from torchweave.ops.kernels.quant.int_linear import scale_value
from torchweave.ops.kernels.quant.int_tiles import add_tile, part_numbers
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def _product(
    weights, inputs, inside, real, k_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK_M] in float32: rows of a weight, the long side, times rows of inputs."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        here = start + k
        left = here < WIDTH
        a = tl.load(weights[:, None] + here[None, :] * k_stride, mask=inside[:, None] & left[None, :], other=0.0)
        b = tl.load(inputs[None, :] + here[:, None], mask=left[:, None] & real[None, :], other=0.0)
        total = tl.dot(a, b, total)
    return total


_FP8_PAIRS: tl.constexpr = tl.constexpr(
    "{ .reg .b32 s, f; mov.b32 f, 0x7B807B80;\n"
    "prmt.b32 s, $2, 0, 0x9180; shl.b32 s, s, 4; and.b32 s, s, 0x87F087F0; mul.rn.bf16x2 $0, s, f;\n"
    "prmt.b32 s, $2, 0, 0xB3A2; shl.b32 s, s, 4; and.b32 s, s, 0x87F087F0; mul.rn.bf16x2 $1, s, f; }"
)
"""Four e4m3 numbers as bfloat16: PRMT puts a byte of its sign above each, and the exponent's bias differs by a power of two."""


@triton.jit
def _fp8_numbers(tile, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Finite e4m3 numbers in 16 bits; NaN as well in float16.

    sm_90's instruction for one bfloat16 runs for 16 threads a cycle on a multiprocessor, to which memory delivers 13 bytes.
    """
    if ASSEMBLY and DTYPE == tl.bfloat16:  # noqa: SIM300
        return tl.inline_asm_elementwise(_FP8_PAIRS, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:  # noqa: RET505
        return tile.to(DTYPE)


@triton.jit
def _fp8_product(
    weights, scales, inputs, inside, real,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`_product` of rows in e4m3 with a scale, or (GROUPS above 1) one for each 128 inputs; BLOCK_K divides 128."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        here = start + k
        left = here < WIDTH
        tile = tl.load(weights[:, None] + here[None, :], mask=inside[:, None] & left[None, :], other=0.0)
        b = tl.load(inputs[None, :] + here[:, None], mask=left[:, None] & real[None, :], other=0.0)
        a = _fp8_numbers(tile, b.dtype, ASSEMBLY)
        scale = tl.load(scales + (start // 128 if GROUPS > 1 else 0), mask=inside, other=0.0)
        total += tl.dot(a, b, input_precision="ieee") * scale[:, None]
    return total


@triton.jit
def _word_product(
    weights, scales, zeros, row_scales, rows, inputs, real,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr, BY_ROW: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`_product` of rows in words of 4-bit numbers, see `torchweave.ops.quant.int_linear`; rows: their numbers among all."""
    PARTS: tl.constexpr = 128 // GROUP if GROUP < 128 and (GROUPS > 1 or FORMAT == "e2m1") else 1
    c, k = tl.arange(0, 16), tl.arange(0, 128)
    words, here = weights[:, None] + c[None, :], inputs[None, :] + k[:, None]
    total = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for block in range((WIDTH + 127) // 128):
        b = tl.load(here + block * 128, mask=real[None, :] & (k < WIDTH - block * 128)[:, None], other=0.0)
        tile = tl.load(words + block * 16)
        total = add_tile(total, tile, b, scales, zeros, rows, block, FORMAT, GROUP, GROUPS, PARTS, ZERO, ROWS, ASSEMBLY)
    if BY_ROW:
        total *= tl.load(row_scales + rows)[:, None]
    return total


_SCALE_LOADS: tl.constexpr = tl.constexpr({8: "u8", 16: "u16", 32: "u32"})


@triton.jit
def _row_scales(places, ASSEMBLY: tl.constexpr):
    """A scale of each row in float32, loaded by the threads that have the sums of the row.

    Triton gives a load of at least as many numbers as a program has threads another layout, and exchanges them in shared memory.
    """
    SCALE: tl.constexpr = places.dtype.element_ty
    if not ASSEMBLY:
        return scale_value(tl.load(places))
    else:  # noqa: RET505
        code: tl.constexpr = "ld.global.nc." + _SCALE_LOADS[SCALE.primitive_bitwidth] + " $0, [$1];"
        bits = tl.inline_asm_elementwise(code, "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1)
        if SCALE.primitive_bitwidth == 8:
            bits = bits.to(tl.uint8)
        elif SCALE.primitive_bitwidth == 16:
            bits = bits.to(tl.int16)
        return scale_value(bits.to(SCALE, bitcast=True))


@triton.jit
def _narrow_word_product(
    weights, scales, zeros, row_scales, rows, inputs, real,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr, BY_ROW: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, UNROLL: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`_word_product` for few tokens by fewer than four warps: a product for each group of a block, whose scale follows it.

    Products by `mma.sync` end before their registers are written, so nothing waits, and a scale of a few sums takes fewer
    instructions than one of the weights. Scales do not meet the weights, which keeps the words in the layout of the products.
    Where e2m1 numbers in bfloat16 lack a factor of 2 ** 126, the inputs have 2 ** 96 of it and the sums the rest: both are
    exact, and there are fewer of them than weights.
    """
    PARTS: tl.constexpr = 128 // GROUP if GROUP < 128 and (GROUPS > 1 or FORMAT == "e2m1") else 1
    SIZE: tl.constexpr = 128 // PARTS
    SCALED: tl.constexpr = not ASSEMBLY or FORMAT == "int" or inputs.dtype.element_ty != tl.bfloat16
    c, k = tl.arange(0, 16), tl.arange(0, SIZE)
    words, here = weights[:, None] + c[None, :], inputs[None, :] + k[:, None]
    total = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for block in tl.range(0, (WIDTH + 127) // 128, loop_unroll_factor=UNROLL):
        tile = tl.load(words + block * 16)
        for part in tl.static_range(PARTS):
            first = block * 128 + part * SIZE
            # Behind the last group inputs are zeros, which any finite scale leaves.
            group = tl.minimum(first // GROUP, GROUPS - 1) if GROUPS > 1 else 0
            by = _row_scales(scales + rows * GROUPS + group, ASSEMBLY)
            b = tl.load(here + first, mask=real[None, :] & (k < WIDTH - first)[:, None], other=0.0)
            a = part_numbers(tile, part, PARTS, FORMAT, ROWS, b.dtype, SCALED, ASSEMBLY)
            sums = tl.dot(a, b if SCALED else b * 7.92281625142643e28, input_precision="ieee")
            if ZERO:
                point = tl.load(zeros + rows * GROUPS + group).to(tl.float32) - 8.0
                sums -= point[:, None] * tl.sum(b.to(tl.float32), 0, keep_dims=True)
            total += sums * by[:, None]
    if not SCALED:
        total *= 1073741824.0  # 2 ** 30
    if BY_ROW:
        total *= tl.load(row_scales + rows)[:, None]
    return total


@triton.jit
def _byte_product(
    weights, scales, zeros, rows, inputs, real,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`_product` of rows of 8-bit integers; BLOCK_K divides GROUP, or there is one group."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        left = start + k < WIDTH
        b = tl.load(inputs[None, :] + (start + k)[:, None], mask=left[:, None] & real[None, :], other=0.0)
        a = tl.load(weights[:, None] + (start + k)[None, :], mask=left[None, :], other=0).to(b.dtype)
        at = rows * GROUPS + start // GROUP
        if ZERO:
            a -= (tl.load(zeros + at).to(tl.float32) - 128.0).to(b.dtype)[:, None]
        total += tl.dot(a, b, input_precision="ieee") * tl.load(scales + at).to(tl.float32)[:, None]
    return total


@triton.jit
def _fetch_ahead(rows, row_stride, wanted, AHEAD: tl.constexpr, LINE: tl.constexpr, DEPENDENT: tl.constexpr):
    """Bring the first AHEAD lines of rows of a weight into the L2 cache: their addresses do not depend on the pairs' numbers."""
    if AHEAD > 0:
        line = tl.minimum(tl.arange(0, AHEAD) * LINE, row_stride - 1)
        if wanted:
            pdl_prefetch(rows[:, None] + line[None, :], DEPENDENT)


@triton.jit
def _tile_product(
    weights, weight_scales, packed, scales, zeros, row_scales, packed_row, inputs, inside, real, k_stride,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr, BY_ROW: tl.constexpr,
    ASSEMBLY: tl.constexpr, NARROW: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK_M] in float32: rows of an expert's weight in any format times its tokens."""
    if FORMAT == "fp8":
        total = _fp8_product(
            weights, weight_scales, inputs, inside, real, GROUPS, WIDTH, ROWS, BLOCK_M, BLOCK_K, ASSEMBLY
        )
    elif FORMAT == "byte":
        total = _byte_product(
            packed, scales, zeros, packed_row, inputs, real, GROUP, GROUPS, ZERO, WIDTH, ROWS, BLOCK_M, BLOCK_K
        )
    elif FORMAT != "" and NARROW:
        total = _narrow_word_product(
            packed, scales, zeros, row_scales, packed_row, inputs, real, FORMAT, GROUP, GROUPS, ZERO, BY_ROW, WIDTH, ROWS,
            BLOCK_M, BLOCK_K // 128, ASSEMBLY,
        )  # fmt: skip
    elif FORMAT != "":
        total = _word_product(
            packed, scales, zeros, row_scales, packed_row, inputs, real, FORMAT, GROUP, GROUPS, ZERO, BY_ROW, WIDTH, ROWS,
            BLOCK_M, ASSEMBLY,
        )  # fmt: skip
    else:
        total = _product(weights, inputs, inside, real, k_stride, WIDTH, ROWS, BLOCK_M, BLOCK_K)
    return total


@triton.jit
def tiles_up_kernel(
    x, up, scales, zeros, row_scales, bias, h, ends, rows, inner, x_stride, expert_stride, row_stride, k_stride, scale_rows,
    FORMAT: tl.constexpr, SCALE_BLOCK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr,
    BY_ROW: tl.constexpr, ASSEMBLY: tl.constexpr, NARROW: tl.constexpr,
    WIDTH: tl.constexpr, TOP: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, LINE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """h[position, I]: a program computes BLOCK_N activated columns of all pairs of one expert.

    Gate and up rows share a tile of twice BLOCK_N rows, in the layout of the weight: two blocks, or alternating.
    """
    expert = tl.program_id(1).to(tl.int64)
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    r = tl.arange(0, ROWS)
    first_column = tl.program_id(0) * BLOCK_N
    if GATED and INTERLEAVED:
        inside = first_column * 2 + r < inner * 2
        weight_row = first_column * 2 + r
    else:
        inside = first_column + r % BLOCK_N < inner
        weight_row = (r // BLOCK_N) * inner + first_column + r % BLOCK_N
    packed_row = expert * (inner * 2 if GATED else inner) + tl.where(inside, weight_row, 0)
    pdl_wait(DEPENDENT)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    _fetch_ahead(up + packed_row * row_stride, row_stride, begin < end, AHEAD, LINE, DEPENDENT)
    weights = up + expert * expert_stride + weight_row * row_stride
    weight_scales = scales + (expert * scale_rows + weight_row // SCALE_BLOCK) * GROUPS
    dtype = h.dtype.element_ty
    column = first_column + tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_M):
        position = start + tl.arange(0, BLOCK_M)
        real = position < end
        token = tl.load(rows + position, mask=real, other=0) // TOP
        inputs = x + token.to(tl.int64) * x_stride
        total = _tile_product(
            weights, weight_scales, up + packed_row * row_stride, scales, zeros, row_scales, packed_row, inputs, inside, real,
            k_stride, FORMAT, GROUP, GROUPS, ZERO, BY_ROW, ASSEMBLY, NARROW, WIDTH, ROWS, BLOCK_M, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            biases = bias + expert * (inner * 2 if GATED else inner) + weight_row
            total += tl.load(biases, mask=inside, other=0.0).to(tl.float32)[:, None]
        total = total.to(dtype).to(tl.float32)
        if GATED:
            if INTERLEAVED:
                pairs = tl.permute(tl.reshape(total, [BLOCK_N, 2, BLOCK_M]), [0, 2, 1])
            else:
                pairs = tl.permute(tl.reshape(total, [2, BLOCK_N, BLOCK_M]), [1, 2, 0])
            gate, up_value = tl.split(pairs)
            result = gated_activation(gate, up_value, ACTIVATION, ALPHA, LIMIT, dtype)
        else:
            result = activation(total, ACTIVATION)
        at = h + position.to(tl.int64)[None, :] * inner + column[:, None]
        tl.store(at, result.to(dtype), mask=(column < inner)[:, None] & real[None, :])


@triton.jit
def tiles_down_kernel(
    h, down, scales, zeros, row_scales, y, ends, rows, num_outputs, expert_stride, row_stride, k_stride, scale_rows,
    FORMAT: tl.constexpr, SCALE_BLOCK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr,
    BY_ROW: tl.constexpr, ASSEMBLY: tl.constexpr, NARROW: tl.constexpr,
    INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, LINE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y[pair, N], unweighted: a program computes BLOCK_N columns of all pairs of one expert."""
    expert = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < num_outputs
    # Sorted before the direct predecessor started.
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0, cache_modifier=".cg")
    end = tl.load(ends + expert, cache_modifier=".cg")
    weights = down + expert * expert_stride + n * row_stride
    weight_scales = scales + (expert * scale_rows + n // SCALE_BLOCK) * GROUPS
    packed_row = expert * num_outputs + tl.minimum(n, num_outputs - 1)
    _fetch_ahead(down + packed_row * row_stride, row_stride, begin < end, AHEAD, LINE, DEPENDENT)
    pdl_wait(DEPENDENT)
    for start in range(begin, end, BLOCK_M):
        position = start + tl.arange(0, BLOCK_M)
        real = position < end
        inputs = h + position.to(tl.int64) * INNER
        total = _tile_product(
            weights, weight_scales, down + packed_row * row_stride, scales, zeros, row_scales, packed_row, inputs, inside, real,
            k_stride, FORMAT, GROUP, GROUPS, ZERO, BY_ROW, ASSEMBLY, NARROW, INNER, BLOCK_N, BLOCK_M, BLOCK_K,
        )  # fmt: skip
        pair = tl.load(rows + position, mask=real, other=0).to(tl.int64)
        at = y + pair[None, :] * num_outputs + n[:, None]
        tl.store(at, total.to(y.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit
def combine_kernel(
    y, index, weight, bias, own, residual, out, num_experts, num_outputs, y_stride, own_stride, residual_stride,
    out_stride,
    TOP: tl.constexpr, TOP_BLOCK: tl.constexpr, SHARED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[token] = sum_j weight[token, j] * (y[pair (token, j)] + bias of its expert), in float32, rounded once.

    SHARED: a token's last pair is the shared expert's, whose output is own[token]. ADD: plus residual[token].
    """
    ROUTED: tl.constexpr = TOP - 1 if SHARED else TOP
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < num_outputs
    j = tl.arange(0, TOP_BLOCK)
    pair = token * TOP + j
    # The routing and the residual are older than the direct predecessor's output.
    expert = tl.load(index + pair, mask=j < ROUTED, other=num_experts, cache_modifier=".cg")
    chosen = expert < num_experts
    share = tl.load(weight + pair, mask=chosen, other=0.0, cache_modifier=".cg").to(tl.float32)
    if ADD:
        places = residual + token.to(tl.int64) * residual_stride + n
        added = tl.load(places, mask=inside, other=0.0, cache_modifier=".cg")
    pdl_wait(DEPENDENT)
    valid = chosen[:, None] & inside[None, :]
    value = tl.load(y + pair.to(tl.int64)[:, None] * y_stride + n[None, :], mask=valid, other=0.0).to(tl.float32)
    if HAS_BIAS:
        biases = bias + expert.to(tl.int64)[:, None] * num_outputs + n[None, :]
        value += tl.load(biases, mask=valid, other=0.0).to(tl.float32)
    result = tl.sum(value * share[:, None], axis=0)
    if SHARED:
        own_value = tl.load(own + token.to(tl.int64) * own_stride + n, mask=inside, other=0.0).to(tl.float32)
        own_share = tl.load(weight + token * TOP + ROUTED).to(tl.float32)
        result = add_shared(result, own_value, own_share, out.dtype.element_ty)
    if ADD:
        result = add_residual(result, added, out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * out_stride + n, result.to(out.dtype.element_ty), mask=inside)


def _format(weight: Tensor, scales: Tensor | None, packing: Packing, width: int, block_k: int) -> dict[str, Any]:
    """Arguments of the tile kernels for a weight `[E, rows, .]` and its scales, if it has any; width: its inputs."""
    if scales is not None and weight.dtype in (torch.int32, torch.int8):
        packed = packed_arguments(weight, scales, packing, width)
        del packed["PARTS"]
        packed["ASSEMBLY"] = packed["ASSEMBLY"] and torch.cuda.get_device_capability(weight.device)[0] == 9
        if weight.dtype == torch.int8:
            packed |= {"FORMAT": "byte"}
            block_k = block_k if packed["GROUPS"] == 1 else min(block_k, packed["GROUP"])
        return packed | {"scale_rows": 0, "SCALE_BLOCK": 1, "BLOCK_K": block_k}
    return fp8_scales(weight, scales) | {
        "zeros": weight, "row_scales": weight, "FORMAT": "" if scales is None else "fp8", "GROUP": 1, "ZERO": False,
        "BY_ROW": False, "ASSEMBLY": weight.is_cuda and supports_pdl(weight.device), "BLOCK_K": block_k,
    }  # fmt: skip


def _strides(weight: Tensor) -> dict[str, int]:
    return dict(zip(("expert_stride", "row_stride", "k_stride"), weight.stride(), strict=True))


def launch_tiles_up(
    x: Tensor, up: Tensor, bias: Tensor | None, h: Tensor, ends: Tensor, rows: Tensor, top: int, scales: Tensor | None = None,
    packing: Packing = PLAIN, *, gated: bool, interleaved: bool, activation: str, alpha: float, limit: float,
    block_m: int, block_n: int, block_k: int, num_warps: int, depth: int, ahead: int, dependent: bool,
) -> None:  # fmt: skip
    """x [T, K], up as [E, 2 I or I, K] with any strides, h [T k, I] by position; rows of x and h contiguous.

    scales, packing: of up if it is quantized, and then contiguous; see `torchweave::quantized_experts`.
    """
    inner = h.shape[1]
    tiles_up_kernel[(cdiv(inner, block_n), up.shape[0])](
        x, up, bias=x if bias is None else bias, h=h, ends=ends, rows=rows, inner=inner, x_stride=x.stride(0),
        **_strides(up), **_format(up, scales, packing, x.shape[1], block_k),
        WIDTH=x.shape[1], TOP=top, GATED=gated, INTERLEAVED=interleaved, HAS_BIAS=bias is not None,
        ACTIVATION=activation, ALPHA=alpha, LIMIT=limit, BLOCK_M=block_m, BLOCK_N=block_n, NARROW=num_warps < 4,
        AHEAD=ahead, LINE=128 // up.element_size(), DEPENDENT=dependent, num_warps=num_warps, num_stages=depth,
        **pdl_options(dependent),
    )  # fmt: skip


def launch_tiles_down(
    h: Tensor, down: Tensor, y: Tensor, ends: Tensor, rows: Tensor, scales: Tensor | None = None,
    packing: Packing = PLAIN, *, block_m: int, block_n: int, block_k: int, num_warps: int, depth: int, ahead: int,
    dependent: bool,
) -> None:  # fmt: skip
    """h [T k, I] by position, down as [E, K, I] with any strides, y [T k, K] by pair."""
    tiles_down_kernel[(cdiv(down.shape[1], block_n), down.shape[0])](
        h, down, y=y, ends=ends, rows=rows, num_outputs=down.shape[1], **_strides(down),
        **_format(down, scales, packing, h.shape[1], block_k), INNER=h.shape[1], BLOCK_M=block_m, BLOCK_N=block_n,
        NARROW=num_warps < 4, AHEAD=ahead, LINE=128 // down.element_size(),
        DEPENDENT=dependent, num_warps=num_warps, num_stages=depth, **pdl_options(dependent),
    )  # fmt: skip


def launch_combine(
    y: Tensor, index: Tensor, weight: Tensor, num_experts: int, bias: Tensor | None, out: Tensor, own: Tensor | None = None,
    residual: Tensor | None = None, *, dependent: bool = False,
) -> None:  # fmt: skip
    """y [T k, K] by pair; index and weight [T, k]; out [T, K].

    own: `[T, K]`, rows contiguous: the output of a shared expert, the last of each token.
    residual: `[T, K]`, rows contiguous.
    """
    tokens, top = index.shape
    width = out.shape[1]
    # Few tokens need small blocks to fill the device.
    block = min(256 if tokens <= 64 else 1024, next_power_of_2(width))
    combine_kernel[(tokens, cdiv(width, block))](
        y, index, weight, y if bias is None else bias, y if own is None else own, out if residual is None else residual, out,
        num_experts, width, y.stride(0), 0 if own is None else own.stride(0), 0 if residual is None else residual.stride(0),
        out.stride(0), TOP=top, TOP_BLOCK=next_power_of_2(top if own is None else top - 1), SHARED=own is not None,
        HAS_BIAS=bias is not None, ADD=residual is not None, BLOCK_N=block, DEPENDENT=dependent, num_warps=4,
        **pdl_options(dependent),
    )  # fmt: skip
