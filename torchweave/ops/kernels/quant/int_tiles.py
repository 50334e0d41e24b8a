"""Triton kernel for products of many tokens with weights in 4 bits: blocks of 128 inputs, dequantized in registers.

Layouts: `torchweave.ops.quant.int_linear`. A warpgroup of sm_90 multiplies dequantized weights in its registers by activations in
shared memory. The order of packed integers is that of these registers: a thread loads the words whose integers it multiplies, and
dequantized weights pass through no shared memory. One product has depth 128; its eight instructions run while the next activations
are fetched. Weights are rounded to the activation's dtype before the product, as for the BLAS.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOptionalSubscript=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.dependent_launch import pdl_wait
from torchweave.ops.kernels.quant.int_linear import BLOCK, WORDS, e2m1_pair_code, input_numbers, nibbles, scale_value

UNSCALED_E2M1_PAIRS: tl.constexpr = tl.constexpr(tuple(e2m1_pair_code("bf16x2", j, False) for j in range(8)))


@triton.jit
def _after_products(tile):
    """The words `tile`, when no product of an earlier block reads its registers any more.

    Triton waits for the first part of a product only, of eight in Triton 3.6 and of two in Triton 3.8, before it writes the
    registers that all parts read (github.com/triton-lang/triton/issues/9433). Where programs share a
    multiprocessor, products were wrong.
    """
    code: tl.constexpr = "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;"
    return tl.inline_asm_elementwise(code, "=r,r", [tile], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def block_numbers(tile, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """`[BLOCK_N, 128]` of the words `tile [BLOCK_N, 16]` of a block: q - 8, or e2m1 numbers, in the order of the inputs."""
    a0, a1, a2, a3, a4, a5, a6, a7 = nibbles(tile, FORMAT, 1, BLOCK_N, WORDS, DTYPE, ASSEMBLY)
    even, odd = tl.join(tl.join(a0, a4), tl.join(a2, a6)), tl.join(tl.join(a1, a5), tl.join(a3, a7))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), [BLOCK_N, BLOCK])


@triton.jit
def part_numbers(
    tile, PART: tl.constexpr, PARTS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
    SCALED: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Part PART of PARTS of `block_numbers`: `[BLOCK_N, 128 / PARTS]`. Not SCALED: e2m1 numbers in bfloat16 times 2 ** -126."""
    if PARTS == 8:
        return _numbers(tile, PART, FORMAT, BLOCK_N, DTYPE, SCALED, ASSEMBLY)
    elif PARTS == 4:  # noqa: RET505
        pair = _two_numbers(tile, 2 * PART, 1, FORMAT, BLOCK_N, DTYPE, SCALED, ASSEMBLY)
        return tl.reshape(tl.permute(pair, (0, 2, 1)), [BLOCK_N, 2 * WORDS])
    elif PARTS == 2:
        even = _two_numbers(tile, 4 * PART, 2, FORMAT, BLOCK_N, DTYPE, SCALED, ASSEMBLY)
        odd = _two_numbers(tile, 4 * PART + 1, 2, FORMAT, BLOCK_N, DTYPE, SCALED, ASSEMBLY)
        return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), [BLOCK_N, 4 * WORDS])
    else:
        tl.static_assert(SCALED)
        return block_numbers(tile, FORMAT, BLOCK_N, DTYPE, ASSEMBLY)


@triton.jit
def _two_numbers(
    tile, J: tl.constexpr, STEP: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
    SCALED: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_N, 16, 2]`: inputs J and J + STEP of the words `tile`."""
    first = _numbers(tile, J, FORMAT, BLOCK_N, DTYPE, SCALED, ASSEMBLY)
    return tl.join(first, _numbers(tile, J + STEP, FORMAT, BLOCK_N, DTYPE, SCALED, ASSEMBLY))


@triton.jit
def _numbers(
    tile, J: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_N, 16]`: input J of the words `tile`."""
    if not ASSEMBLY:
        return nibbles(tile, FORMAT, 1, BLOCK_N, WORDS, DTYPE, ASSEMBLY)[J]
    elif SCALED:  # noqa: RET505
        return input_numbers(tile, J, FORMAT, DTYPE)
    else:
        code: tl.constexpr = UNSCALED_E2M1_PAIRS[J]
        return tl.inline_asm_elementwise(code, "=r,r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def of_blocks(
    pointer, rows, block, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Scales or zero points of a block of each row: `[BLOCK_N, 1]`, or `[BLOCK_N, 128]` where a block has several groups."""
    if PARTS == 1:
        group = block * BLOCK // GROUP if GROUPS > 1 else 0
        return tl.load(pointer + rows * GROUPS + group)[:, None]
    else:  # noqa: RET505
        group = (rows * 0 + block * PARTS)[:, None] + tl.arange(0, PARTS)[None, :]
        found = tl.load(pointer + rows[:, None] * GROUPS + group, mask=group < GROUPS, other=0.0)
        return tl.reshape(tl.broadcast_to(found[:, :, None], [BLOCK_N, PARTS, BLOCK // PARTS]), [BLOCK_N, BLOCK])


@triton.jit
def add_tile(
    total, tile, b, scale, zero, rows, block,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """total plus one product of depth 128: the words `tile [BLOCK_N, 16]` of a block of rows times its inputs b `[128, TOKENS]`."""
    dtype: tl.constexpr = b.dtype
    by = of_blocks(scale, rows, block, GROUP, GROUPS, PARTS, BLOCK_N)
    if ASSEMBLY:
        tile = _after_products(tile)
    a = block_numbers(tile, FORMAT, BLOCK_N, dtype, ASSEMBLY)
    if ZERO:
        point = of_blocks(zero, rows, block, GROUP, GROUPS, PARTS, BLOCK_N)
        a -= (point.to(tl.float32) - 8.0).to(dtype)
    if FORMAT == "int" and by.dtype != dtype:
        a = (a.to(tl.float32) * by.to(tl.float32)).to(dtype)
    else:
        a *= by if by.dtype == dtype else scale_value(by).to(dtype)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens", "num_outputs", "out_stride"])
def tile_kernel(
    x, w, scale, zero, bias, out, row_scale, num_tokens, num_outputs, out_stride, FORMAT: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, BY_ROW: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T tiles, N tiles, programs): programs of one N tile share its words in the L2 cache; blocks are dealt to programs.

    With several programs, out is float32 `[programs, T, N]`.
    """
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    EVEN: tl.constexpr = WIDTH == BLOCKS * BLOCK
    # Scalars in 64 bits and offsets in 32, whose differences are constants: one register addresses all loads of a thread.
    first_row, first_token = tl.program_id(1).to(tl.int64) * BLOCK_N, tl.program_id(0).to(tl.int64) * TOKENS
    n, t, k, c = tl.arange(0, BLOCK_N), tl.arange(0, TOKENS), tl.arange(0, BLOCK), tl.arange(0, WORDS)
    left_rows, left_tokens = (num_outputs - first_row).to(tl.int32), (num_tokens - first_token).to(tl.int32)
    w += first_row * (BLOCKS * WORDS)
    x += first_token * WIDTH
    scale += first_row * GROUPS
    zero += first_row * GROUPS
    words, inputs = n[:, None] * (BLOCKS * WORDS) + c[None, :], t[None, :] * WIDTH + k[:, None]
    rows, real = tl.minimum(n, left_rows - 1), (t < left_tokens)[None, :]
    pdl_wait(DEPENDENT)
    total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    tl.assume(tl.program_id(2) < BLOCKS)  # ptxas runs products one by one if the loop may be skipped
    for block in range(tl.program_id(2), BLOCKS, tl.num_programs(2)):
        tile = tl.load(w + block * WORDS + words, mask=(n < left_rows)[:, None], other=0)
        inside = real if EVEN else real & (k < WIDTH - block * BLOCK)[:, None]
        b = tl.load(x + block * BLOCK + inputs, mask=inside, other=0.0)
        total = add_tile(
            total, tile, b, scale, zero, rows, block, FORMAT, GROUP, GROUPS, PARTS, ZERO, BLOCK_N, ASSEMBLY
        )
    inside = n < left_rows
    if BY_ROW:
        total *= tl.load(row_scale + first_row + n, mask=inside, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + first_row + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    out += (tl.program_id(2).to(tl.int64) * num_tokens + first_token) * out_stride + first_row
    at = t.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside[:, None] & real)
