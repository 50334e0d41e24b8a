"""Triton kernel for products of few tokens with weights in 4 bits, element by element: one token times whole rows of the weight.

Layouts: `torchweave.ops.quant.int_linear`. An integer becomes a float by one LOP3: `1 + q * 2 ** (p - 23)` with the nibble at bit p
of the mantissa; the input is scaled by `2 ** (23 - p)` instead, and what the ones add is subtracted.

The kernel may normalise x at its input (RMSNorm), and add a residual to its output, or gate half of it by the other half, as those
of 16-bit weights (`torchweave.ops.kernels.linear`), and rounds where the separate operations round. Under programmatic dependent
launch it loads its first weights while the previous kernel drains.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.dependent_launch import pdl_wait
from torchweave.ops.kernels.linear import epilogue, inverse_rms, weight_rows
from torchweave.ops.kernels.norm import scale_rows
from torchweave.ops.kernels.quant.int_linear import (
    BLOCK,
    WORDS,
    e2m1,
    nibbles,
    parameter_group,
    scale_value,
    shifted_pair,
)

_EVEN_BITS, _ODD_BITS = (11, 15, 19, 12), (16, 11, 15, 19)
"""Bit of a float's mantissa at which nibble j % 4 of the even and of the odd input of a pair is placed."""
EVEN_SCALES: tl.constexpr = tl.constexpr(tuple(2.0 ** (23 - bit) for bit in _EVEN_BITS))
ODD_SCALES: tl.constexpr = tl.constexpr(tuple(2.0 ** (23 - bit) for bit in _ODD_BITS))


def _float_nibble(out: int, word: int, j: int, odd: int) -> str:
    bit = (_ODD_BITS if odd else _EVEN_BITS)[j]
    shift = bit - (4 * j + 16 * odd)
    source = {11: "u", -9: "d", 0: f"${word}"}[shift]
    return f"lop3.b32 ${out}, {source}, {0xF << bit}, 0x3F800000, 0xEA;\n"


def float_code() -> str:
    """Of two words, an even and an odd one, the 8 nibbles of each as floats, tensor j first."""
    lines = ["{ .reg .b32 u, d;\n"]
    for half in range(2):
        lines.append(f"shl.b32 u, ${16 + half}, 11; shr.u32 d, ${16 + half}, 9;\n")
        lines += [_float_nibble(2 * (4 * half + j) + odd, 16 + half, j, odd) for j in range(4) for odd in range(2)]
    return "".join(lines) + "}"


FLOATS: tl.constexpr = tl.constexpr(float_code())
_16_OUTPUTS: tl.constexpr = tl.constexpr(",".join(["=r"] * 16) + ",r,r")


@triton.jit
def _input(
    x, k, odd, norm, norm_scale, offset, J: tl.constexpr, WIDTH: tl.constexpr, AS_FLOATS: tl.constexpr, NORM: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Input J of every word as float32, and the same scaled for its nibble where nibbles are mantissas of floats."""
    here = k + J * 16
    loaded = tl.load(x + here, mask=here < WIDTH, other=0.0)
    value = loaded.to(tl.float32)
    if NORM:
        weight = tl.load(norm + here, mask=here < WIDTH, other=0.0)
        value = scale_rows(value, norm_scale, weight, offset, True, WIDE, loaded.dtype)
    if AS_FLOATS:
        return value, value * tl.where(odd, ODD_SCALES[J % 4], EVEN_SCALES[J % 4])
    else:  # noqa: RET505
        return value, value


@triton.jit
def row_words(words, first, c, count):
    """Words `[first, first + BLOCK_W)` of rows at `words [BLOCK_N, BLOCK_W]`, which have `count` words."""
    return tl.load(words + first, mask=(first + c < count)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _row_nibbles(tile, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Eight float32 tiles: of word c of a block, input `16 * j + c`."""
    if ASSEMBLY and FORMAT == "int":
        return tl.inline_asm_elementwise(FLOATS, _16_OUTPUTS, [tile], dtype=(tl.float32,) * 8, is_pure=True, pack=2)
    elif ASSEMBLY:  # noqa: RET505
        a0, a1, a2, a3, a4, a5, a6, a7 = nibbles(tile, FORMAT, 1, BLOCK_N, BLOCK_W, tl.bfloat16, ASSEMBLY)
        return (
            a0.to(tl.float32), a1.to(tl.float32), a2.to(tl.float32), a3.to(tl.float32),
            a4.to(tl.float32), a5.to(tl.float32), a6.to(tl.float32), a7.to(tl.float32),
        )  # fmt: skip
    else:
        even, odd = tl.split(tl.reshape(tile, [BLOCK_N, BLOCK_W // 2, 2]))
        shape: tl.constexpr = [BLOCK_N, BLOCK_W]
        return (
            _row_nibble(even, 0, shape, FORMAT),
            _row_nibble(even, 1, shape, FORMAT),
            _row_nibble(even, 2, shape, FORMAT),
            _row_nibble(even, 3, shape, FORMAT),
            _row_nibble(odd, 0, shape, FORMAT),
            _row_nibble(odd, 1, shape, FORMAT),
            _row_nibble(odd, 2, shape, FORMAT),
            _row_nibble(odd, 3, shape, FORMAT),
        )


@triton.jit
def _row_nibble(word, J: tl.constexpr, shape: tl.constexpr, FORMAT: tl.constexpr):
    """Numbers of input J as float32: q, or of e2m1."""
    pair = tl.reshape(shifted_pair(word, J), shape)
    return pair.to(tl.float32) if FORMAT == "int" else e2m1(pair)


@triton.jit
def row_parameter(
    pointer, rows, first, part, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Scales or zero points `[BLOCK_N, BLOCK_W / 4]` of each run of four words."""
    block = (first + tl.arange(0, BLOCK_W // 4) * 4) // WORDS
    group = parameter_group(block, part, GROUP, GROUPS, PARTS)
    return tl.load(pointer + rows[:, None] * GROUPS + group[None, :], mask=(group < GROUPS)[None, :], other=0.0)


@triton.jit
def _add_row_input(
    total, part, ones, inputs, by, value, given, scaled, scale, zero, rows, first, J: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, AS_FLOATS: tl.constexpr,
):  # fmt: skip
    """The sums with input J of every word; after the last input of a group, `total` with its products times their scale.

    part `[BLOCK_N, BLOCK_W]` sums products of a group, ones `[BLOCK_W]` what the ones of floats add to each row of it, and inputs
    `[BLOCK_W]` its inputs, which the zero point multiplies, 8 where there is none. given, scaled: of `_input`.
    """
    part += value * scaled[None, :]
    if AS_FLOATS:
        ones += scaled
    if FORMAT == "int":
        inputs += given
    if (J + 1) * PARTS % 8 == 0:
        GROUP_OF_BLOCK: tl.constexpr = J * PARTS // 8
        if FORMAT == "int":
            part -= (ones if ZERO else ones + 8.0 * inputs)[None, :]
        runs = tl.sum(tl.reshape(part, [BLOCK_N, BLOCK_W // 4, 4]), 2)
        if ZERO:
            point = row_parameter(zero, rows, first, GROUP_OF_BLOCK, GROUP, GROUPS, PARTS, BLOCK_W).to(tl.float32)
            runs -= point * tl.sum(tl.reshape(inputs, [BLOCK_W // 4, 4]), 1)[None, :]
        total += runs * scale_value(by)
        if J < 7:
            by = row_parameter(scale, rows, first, GROUP_OF_BLOCK + 1, GROUP, GROUPS, PARTS, BLOCK_W)
        part, ones, inputs = tl.zeros_like(part), tl.zeros_like(ones), tl.zeros_like(inputs)
    return total, part, ones, inputs, by


@triton.jit
def add_row_words(
    total, by, tile, x, first, c, scale, zero, rows,
    FORMAT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ASSEMBLY: tl.constexpr,
    norm=None, norm_scale=0.0, offset=0.0, NORM: tl.constexpr = False, WIDE: tl.constexpr = False,
):  # fmt: skip
    """total `[BLOCK_N, BLOCK_W / 4]` plus products of the words `tile`, from word `first` of each row, and the inputs at x.

    `by`: scales of the first group of each block (`row_parameter`). NORM: inputs are normalised by `norm_scale`, the token's
    inverse RMS, and the weight at `norm`.
    """
    AS_FLOATS: tl.constexpr = ASSEMBLY and FORMAT == "int"
    k, odd = (first + c) // WORDS * BLOCK + c % WORDS, c % 2 == 1
    part, ones = tl.zeros([BLOCK_N, BLOCK_W], tl.float32), tl.zeros([BLOCK_W], tl.float32)
    inputs = tl.zeros([BLOCK_W], tl.float32)
    values = _row_nibbles(tile, FORMAT, BLOCK_N, BLOCK_W, ASSEMBLY)
    for J in tl.static_range(8):
        given, scaled = _input(x, k, odd, norm, norm_scale, offset, J, WIDTH, AS_FLOATS, NORM, WIDE)
        total, part, ones, inputs, by = _add_row_input(
            total, part, ones, inputs, by, values[J], given, scaled, scale, zero, rows, first, J, FORMAT, GROUP, GROUPS, PARTS,
            ZERO, BLOCK_N, BLOCK_W, AS_FLOATS,
        )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["num_outputs", "out_stride", "residual_stride"])
def row_kernel(
    x, w, scale, zero, bias, out, row_scale, norm, residual, num_outputs, out_stride, residual_stride, eps, offset,
    FORMAT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, BY_ROW: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr,
    NORM_BLOCK: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    ASSEMBLY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, N tiles): one token times BLOCK_N whole rows of w; programs of one tile share its rows in the L2 cache.

    With an ACTIVATION half of the rows are gates (`weight_rows`), and num_outputs is half of w's rows. NORM_BLOCK: inputs that are
    loaded at a time for their norm.
    """
    COUNT: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK * WORDS
    token = tl.program_id(0).to(tl.int64)
    row, inside = weight_rows(tl.program_id(1), num_outputs, BLOCK_N, ACTIVATION is not None)
    rows, c = tl.where(inside, row, 0), tl.arange(0, BLOCK_W)
    x += token * WIDTH
    words = w + rows.to(tl.int64)[:, None] * COUNT + c[None, :]
    tile = row_words(words, 0, c, COUNT)
    by = row_parameter(scale, rows, 0, 0, GROUP, GROUPS, PARTS, BLOCK_W)
    pdl_wait(DEPENDENT)
    norm_scale = inverse_rms(x, eps, True, WIDTH, NORM_BLOCK) if NORM else 0.0
    total = tl.zeros([BLOCK_N, BLOCK_W // 4], tl.float32)
    for first in tl.static_range(0, COUNT, BLOCK_W):
        if first + BLOCK_W < COUNT:
            ahead = row_words(words, first + BLOCK_W, c, COUNT)
            by_ahead = row_parameter(scale, rows, first + BLOCK_W, 0, GROUP, GROUPS, PARTS, BLOCK_W)
        total = add_row_words(
            total, by, tile, x, first, c, scale, zero, rows, FORMAT, WIDTH, GROUP, GROUPS, PARTS, ZERO, BLOCK_N, BLOCK_W, ASSEMBLY,
            norm, norm_scale, offset, NORM, WIDE,
        )  # fmt: skip
        if first + BLOCK_W < COUNT:
            tile, by = ahead, by_ahead
    result = tl.sum(total, 1)
    if BY_ROW:
        result *= tl.load(row_scale + rows)
    epilogue(
        result[:, None], bias, residual + token * residual_stride, out + token * out_stride, tl.program_id(1), row, inside,
        1, num_outputs, 0, 0, 1, BLOCK_N, HAS_BIAS, ADD, ACTIVATION, DEPENDENT,
    )  # fmt: skip
