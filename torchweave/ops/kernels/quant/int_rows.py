"""Triton kernel for products of few tokens with weights in 4 bits, element by element; layouts: `torchweave.ops.quant.int_linear`.

Integers become floats by one LOP3 each: `1 + q * 2 ** (p - 23)` with the nibble at bit p of the mantissa; the input is scaled by
`2 ** (23 - p)` instead, and what the ones add is subtracted. e2m1 numbers become floats `72 + v` by tables. The kernels of experts
in words (`kernels.moe.experts_gemv`) share this code.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from torchweave.ops.kernels.dependent_launch import pdl_wait
from torchweave.ops.kernels.quant.int_linear import BLOCK, WORDS, e2m1, parameter_group, scale_value, shifted_pair

_EVEN_BITS, _ODD_BITS = (11, 15, 19, 12), (16, 11, 15, 19)
"""Bit of a float's mantissa at which nibble j % 4 of the even and of the odd input of a pair is placed."""
EVEN_SCALES: tl.constexpr = tl.constexpr(tuple(2.0 ** (23 - bit) for bit in _EVEN_BITS))
ODD_SCALES: tl.constexpr = tl.constexpr(tuple(2.0 ** (23 - bit) for bit in _ODD_BITS))


def float_code() -> str:
    """Of two words, an even and an odd one, the 8 nibbles of each as floats, tensor j first."""
    lines = ["{ .reg .b32 u, d;\n"]
    for half in range(2):
        word = f"${16 + half}"
        lines.append(f"shl.b32 u, {word}, 11; shr.u32 d, {word}, 9;\n")
        for j in range(4):
            for odd in range(2):
                bit = (_ODD_BITS if odd else _EVEN_BITS)[j]
                source = {11: "u", -9: "d", 0: word}[bit - (4 * j + 16 * odd)]
                lines.append(f"lop3.b32 ${2 * (4 * half + j) + odd}, {source}, {0xF << bit}, 0x3F800000, 0xEA;\n")
    return "".join(lines) + "}"


_E2M1_BYTE = 0x90
"""Byte of an e2m1 number v: this plus 2 v. Behind a byte 0x42 it is the float 72 + v."""
E2M1_ONES: tl.constexpr = tl.constexpr((72.0, 72.0 + 0x4290 * 2.0**-17))
"""What the floats of even and of odd J have beside v."""


def e2m1_float_code() -> str:
    """Of a word the e2m1 numbers as floats `72 + v`, of its even and its odd column by turns.

    One PRMT looks up four positive numbers, another four negative ones. The float of an odd input keeps that of the one before it
    in its low bits, which saves an instruction; the error is 2 ** -16 of that number.
    """
    lines = ["{ .reg .b32 w, n, p, q, a, b, c; mov.b32 a, 0x03020100; mov.b32 b, 0x0C080604; mov.b32 c, 0x42;\n"]
    lines.append("mov.b32 w, $8; xor.b32 n, w, 0x88888888;\n")
    for odd in range(2):
        if odd:
            lines.append("shr.u32 w, w, 16; shr.u32 n, n, 16;\n")
        lines.append("prmt.b32 p, a, b, w; prmt.b32 q, a, b, n;\n")
        lines.append(f"add.u32 p, p, {_E2M1_BYTE * 0x01010101:#x}; sub.u32 p, p, q;\n")
        for j in (0, 2):
            low, high = f"${2 * j + odd}", f"${2 * j + 2 + odd}"
            lines.append(f"prmt.b32 {high}, p, c, {0x4040 | (j + 1) << 8 | j:#x}; mul.lo.u32 {low}, {high}, 65536;\n")
    return "".join(lines) + "}"


FLOATS: tl.constexpr = tl.constexpr(float_code())
E2M1_FLOATS: tl.constexpr = tl.constexpr(e2m1_float_code())
_8_OF_ONE: tl.constexpr = tl.constexpr(",".join(["=r"] * 8) + ",r")
_16_OUTPUTS: tl.constexpr = tl.constexpr(",".join(["=r"] * 16) + ",r,r")


@triton.jit
def row_words(words, first, c, count):
    """Words `[first, first + BLOCK_W)` of rows at `words [BLOCK_N, BLOCK_W]`, which have `count` words."""
    return tl.load(words + first, mask=(first + c < count)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _e2m1_numbers(word, ASSEMBLY: tl.constexpr):
    """Eight float32 tensors of a word: numbers of four inputs, each of the even and of the odd column."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(E2M1_FLOATS, _8_OF_ONE, [word], dtype=(tl.float32,) * 8, is_pure=True, pack=1)
    else:  # noqa: RET505
        return (
            e2m1(word & 15), e2m1(word >> 16 & 15), e2m1(word >> 4 & 15), e2m1(word >> 20 & 15),
            e2m1(word >> 8 & 15), e2m1(word >> 24 & 15), e2m1(word >> 12 & 15), e2m1(word >> 28 & 15),
        )  # fmt: skip


@triton.jit
def _integers(tile, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Eight float32 tiles of q: of word c of a block, input `16 * j + c`."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(FLOATS, _16_OUTPUTS, [tile], dtype=(tl.float32,) * 8, is_pure=True, pack=2)
    else:  # noqa: RET505
        even, odd = tl.split(tl.reshape(tile, [BLOCK_N, BLOCK_W // 2, 2]))
        shape: tl.constexpr = [BLOCK_N, BLOCK_W]
        return (
            _integer(even, 0, shape), _integer(even, 1, shape), _integer(even, 2, shape), _integer(even, 3, shape),
            _integer(odd, 0, shape), _integer(odd, 1, shape), _integer(odd, 2, shape), _integer(odd, 3, shape),
        )  # fmt: skip


@triton.jit
def _integer(word, J: tl.constexpr, shape: tl.constexpr):
    return tl.reshape(shifted_pair(word, J), shape).to(tl.float32)


@triton.jit
def runs_of_words(first, BLOCK_W: tl.constexpr):
    """Of BLOCK_W words from word `first` of a row: the first word of each run of four."""
    return first + tl.arange(0, BLOCK_W // 4) * 4


@triton.jit
def row_parameter(
    pointer, rows, run, part, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, FLAT: tl.constexpr
):
    """Scales or zero points `[BLOCK_N, BLOCK_W / 4]` of each run of four words; pointer: one, or one for each run.

    FLAT: loaded in one dimension, they come to the threads of their words. In two Triton exchanges them between threads, which
    takes fewer registers where there is one scale for each block.
    """
    group = parameter_group(run // WORDS, part, GROUP, GROUPS, PARTS)
    at = pointer + rows[:, None] * GROUPS + group[None, :]
    mask = (group < GROUPS)[None, :]
    if FLAT:
        SIZE: tl.constexpr = at.shape[0] * at.shape[1]
        mask = tl.reshape(tl.broadcast_to(mask, at.shape), [SIZE])
        return tl.reshape(tl.load(tl.reshape(at, [SIZE]), mask=mask, other=0.0), at.shape)
    else:  # noqa: RET505
        return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _four(tile, FIRST: tl.constexpr, RUNS: tl.constexpr):
    """The four last entries of `tile [.., RUNS, 4]`; FIRST: its size before RUNS, 0 if it has no such dimension."""
    shape: tl.constexpr = [FIRST, RUNS, 2, 2] if FIRST else [RUNS, 2, 2]
    even, odd = tl.split(tl.reshape(tile, shape))
    t0, t2 = tl.split(even)
    t1, t3 = tl.split(odd)
    return t0, t1, t2, t3


@triton.jit
def _row_inputs(x, run, J: tl.constexpr, WIDTH: tl.constexpr):
    """float32 `[runs, 4]`: input J of each word of each run."""
    k = (run // WORDS * BLOCK + run % WORDS)[:, None] + tl.arange(0, 4)[None, :] + J * 16
    k = tl.max_contiguous(tl.multiple_of(k, [1, 4]), [1, 4])
    return tl.load(x + k, mask=k < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def add_row_words(
    total, by, tile, x, run, scale, zero, rows,
    FORMAT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """total `[BLOCK_N, BLOCK_W / 4]` plus products of the words `tile` and the inputs at x.

    run: the place of each run of four words in its row; x, scale and zero: one pointer, or one for each run (x: `[runs, 1]`, others
    `[1, runs]`); `by`: scales of the first group of each block (`row_parameter`).
    """
    if FORMAT == "int":
        return _add_integers(
            total, by, tile, x, run, scale, zero, rows, WIDTH, GROUP, GROUPS, PARTS, ZERO, BLOCK_N, BLOCK_W, ASSEMBLY
        )
    else:  # noqa: RET505
        return _add_e2m1(total, by, tile, x, run, scale, rows, WIDTH, GROUP, GROUPS, PARTS, BLOCK_N, BLOCK_W, ASSEMBLY)


@triton.jit
def _add_integers(
    total, by, tile, x, run, scale, zero, rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The products of integers, summed by words, and for each group by runs: so all words of a program are loaded at once."""
    RUNS: tl.constexpr = BLOCK_W // 4
    FLAT: tl.constexpr = len(scale.shape) > 0
    numbers = _integers(tile, BLOCK_N, BLOCK_W, ASSEMBLY)
    part = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
    ones, inputs = tl.zeros([RUNS], tl.float32), tl.zeros([RUNS], tl.float32)
    for J in tl.static_range(8):
        value = _row_inputs(x, run, J, WIDTH)
        inputs += tl.sum(value, 1)
        if ASSEMBLY:
            value *= tl.where(tl.arange(0, 4) % 2 == 1, ODD_SCALES[J % 4], EVEN_SCALES[J % 4])[None, :]
            ones += tl.sum(value, 1)
        part += numbers[J] * tl.reshape(value, [BLOCK_W])[None, :]
        if (J + 1) * PARTS % 8 == 0:
            sums = tl.sum(tl.reshape(part, [BLOCK_N, RUNS, 4]), 2)
            sums -= (ones if ZERO else ones + 8.0 * inputs)[None, :]
            if ZERO:
                point = row_parameter(zero, rows, run, J * PARTS // 8, GROUP, GROUPS, PARTS, FLAT).to(tl.float32)
                sums -= point * inputs[None, :]
            total += sums * scale_value(by)
            if J < 7:
                by = row_parameter(scale, rows, run, J * PARTS // 8 + 1, GROUP, GROUPS, PARTS, FLAT)
            part = tl.zeros_like(part)
            ones, inputs = tl.zeros_like(ones), tl.zeros_like(inputs)
    return total


@triton.jit
def _add_e2m1(
    total, by, tile, x, run, scale, rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The products of e2m1 numbers, whose instructions are the limit: those of a run one after the other, which saves its sums."""
    RUNS: tl.constexpr = BLOCK_W // 4
    w0, w1, w2, w3 = _four(tile, BLOCK_N, RUNS)
    first_left, first_right = _e2m1_numbers(w0, ASSEMBLY), _e2m1_numbers(w2, ASSEMBLY)
    last_left, last_right = _e2m1_numbers(w1, ASSEMBLY), _e2m1_numbers(w3, ASSEMBLY)
    part, ones = tl.zeros([BLOCK_N, RUNS], tl.float32), tl.zeros([RUNS], tl.float32)
    for J in tl.static_range(8):
        x0, x1, x2, x3 = _four(_row_inputs(x, run, J, WIDTH), 0, RUNS)
        if ASSEMBLY:
            ones += ((x0 + x1) + (x2 + x3)) * E2M1_ONES[J % 2]
        if J < 4:
            left, right = first_left, first_right
        else:
            left, right = last_left, last_right
        part += left[2 * (J % 4)] * x0[None, :]
        part += left[2 * (J % 4) + 1] * x1[None, :]
        part += right[2 * (J % 4)] * x2[None, :]
        part += right[2 * (J % 4) + 1] * x3[None, :]
        if (J + 1) * PARTS % 8 == 0:
            total += (part - ones[None, :]) * scale_value(by)
            if J < 7:
                by = row_parameter(scale, rows, run, J * PARTS // 8 + 1, GROUP, GROUPS, PARTS, True)
            part, ones = tl.zeros_like(part), tl.zeros_like(ones)
    return total


@triton.jit
def _add_row_integers(
    total, by, tile, x, first, c, scale, zero, rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`_add_integers` of one row of inputs x, from word `first` of each row; inputs are summed by words, too.

    Down of Llama 8B, one token, on an H100: 14.2 us, against 16.5 by `_add_integers`.
    """
    k, odd = (first + c) // WORDS * BLOCK + c % WORDS, c % 2 == 1
    numbers = _integers(tile, BLOCK_N, BLOCK_W, ASSEMBLY)
    part, ones = tl.zeros([BLOCK_N, BLOCK_W], tl.float32), tl.zeros([BLOCK_W], tl.float32)
    inputs = tl.zeros([BLOCK_W], tl.float32)
    for J in tl.static_range(8):
        value = tl.load(x + k + J * 16, mask=k + J * 16 < WIDTH, other=0.0).to(tl.float32)
        scaled = value
        if ASSEMBLY:
            scaled = value * tl.where(odd, ODD_SCALES[J % 4], EVEN_SCALES[J % 4])
        part += numbers[J] * scaled[None, :]
        if ASSEMBLY:
            ones += scaled
        inputs += value
        if (J + 1) * PARTS % 8 == 0:
            part -= (ones if ZERO else ones + 8.0 * inputs)[None, :]
            sums = tl.sum(tl.reshape(part, [BLOCK_N, BLOCK_W // 4, 4]), 2)
            run = runs_of_words(first, BLOCK_W)
            if ZERO:
                point = row_parameter(zero, rows, run, J * PARTS // 8, GROUP, GROUPS, PARTS, False).to(tl.float32)
                sums -= point * tl.sum(tl.reshape(inputs, [BLOCK_W // 4, 4]), 1)[None, :]
            total += sums * scale_value(by)
            if J < 7:
                by = row_parameter(scale, rows, run, J * PARTS // 8 + 1, GROUP, GROUPS, PARTS, False)
            part, ones, inputs = tl.zeros_like(part), tl.zeros_like(ones), tl.zeros_like(inputs)
    return total


@triton.jit(do_not_specialize=["num_outputs", "out_stride"])
def row_kernel(
    x, w, scale, zero, bias, out, row_scale, num_outputs, out_stride, FORMAT: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, BY_ROW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, N tiles): one token times BLOCK_N whole rows of w; programs of one tile share its rows in the L2 cache."""
    COUNT: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK * WORDS
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, c = tl.minimum(row, num_outputs - 1), tl.arange(0, BLOCK_W)
    x += tl.program_id(0).to(tl.int64) * WIDTH
    words = w + rows.to(tl.int64)[:, None] * COUNT + c[None, :]
    tile = row_words(words, 0, c, COUNT)
    by = row_parameter(scale, rows, runs_of_words(0, BLOCK_W), 0, GROUP, GROUPS, PARTS, FORMAT == "e2m1")
    pdl_wait(DEPENDENT)
    total = tl.zeros([BLOCK_N, BLOCK_W // 4], tl.float32)
    for first in tl.static_range(0, COUNT, BLOCK_W):
        if first + BLOCK_W < COUNT:
            ahead = row_words(words, first + BLOCK_W, c, COUNT)
            run = runs_of_words(first + BLOCK_W, BLOCK_W)
            by_ahead = row_parameter(scale, rows, run, 0, GROUP, GROUPS, PARTS, FORMAT == "e2m1")
        if FORMAT == "int":
            total = _add_row_integers(
                total,
                by,
                tile,
                x,
                first,
                c,
                scale,
                zero,
                rows,
                WIDTH,
                GROUP,
                GROUPS,
                PARTS,
                ZERO,
                BLOCK_N,
                BLOCK_W,
                ASSEMBLY,
            )
        else:
            total = _add_e2m1(
                total, by, tile, x, runs_of_words(first, BLOCK_W), scale, rows, WIDTH, GROUP, GROUPS, PARTS, BLOCK_N, BLOCK_W,
                ASSEMBLY,
            )  # fmt: skip
        if first + BLOCK_W < COUNT:
            tile, by = ahead, by_ahead
    result = tl.sum(total, 1)
    if BY_ROW:
        result *= tl.load(row_scale + rows)
    if HAS_BIAS:
        result += tl.load(bias + rows).to(tl.float32)
    at = out + tl.program_id(0).to(tl.int64) * out_stride + row
    tl.store(at, result.to(out.dtype.element_ty), mask=row < num_outputs)
