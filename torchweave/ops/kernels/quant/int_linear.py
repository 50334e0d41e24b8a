"""Triton kernels for products with weights in 4 or 8 bits: the layouts are those of `torchweave.ops.quant.int_linear`.

Few tokens and 4 bits are multiplied element by element (`int_rows.row_kernel`). `split_kernel` (4 bits) makes 16-bit numbers,
two by one LOP3, and multiplies on tensor cores: the warps of a program share its rows and divide K. `byte_kernel` is the same
for 8 bits. Of more tokens and 4 bits is `int_tiles.tile_kernel`. Several programs may divide K; then `add_kernel` adds their
sums.

Each starts under programmatic dependent launch while the previous kernel drains; the row kernel loads its first weights before it
waits. Without sm_90's instructions (and in Triton's interpreter) shifts and conversions replace the assembly (ASSEMBLY).
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportReturnType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait, supports_pdl
from torchweave.ops.kernels.quant.formats import FP8
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2

BLOCK: tl.constexpr = tl.constexpr(128)
WORDS: tl.constexpr = tl.constexpr(16)


_HALF = {"bf16x2": (0x43004300, 0x43084308), "f16x2": (0x64006400, 0x64086408)}
"""A magic exponent for nibbles below it, and the same with an 8, whose difference is q - 8."""
_E2M1 = {"bf16x2": (0x01C001C0, 6, 0x7E807E80), "f16x2": (0x0E000E00, 9, 0x74007400)}
"""Bits of an exponent and a mantissa, the first of them, and the power of two that they lack."""


def half_pair_code(kind: str, j: int) -> str:
    """Of two words, an even and an odd one: pair j of 16-bit numbers q - 8."""
    magic, offset = _HALF[kind]
    return (
        f"{{ .reg .b32 t, m, o; mov.b32 m, 0x000F000F; mov.b32 o, {offset:#x};\n"
        f"shr.u32 t, ${1 + j // 4}, {j % 4 * 4}; lop3.b32 t, t, m, {magic:#x}, 0xEA; sub.rn.{kind} $0, t, o;\n}}"
    )


def e2m1_pair_code(kind: str, j: int, scaled: bool = True) -> str:
    """Of two words, an even and an odd one: pair j of e2m1 numbers in 16 bits; not scaled: without the power of two."""
    mask, first, power = _E2M1[kind]
    word, left = f"${1 + j // 4}", first - j % 4 * 4
    bits = (
        f"{'shl' if left > 0 else 'shr'}.b32 t, {word}, {abs(left)}; shl.b32 u, {word}, {12 - j % 4 * 4}; "
        f"and.b32 t, t, {mask:#x}; lop3.b32 {'t' if scaled else '$0'}, u, 0x80008000, t, 0xEA;"
    )
    product = f" mul.rn.{kind} $0, t, f;" if scaled else ""
    return f"{{ .reg .b32 t, u, f; mov.b32 f, {power:#x};\n{bits}{product}\n}}"


INT_BFLOAT_PAIRS: tl.constexpr = tl.constexpr(tuple(half_pair_code("bf16x2", j) for j in range(8)))
INT_HALF_PAIRS: tl.constexpr = tl.constexpr(tuple(half_pair_code("f16x2", j) for j in range(8)))
E2M1_BFLOAT_PAIRS: tl.constexpr = tl.constexpr(tuple(e2m1_pair_code("bf16x2", j) for j in range(8)))
E2M1_HALF_PAIRS: tl.constexpr = tl.constexpr(tuple(e2m1_pair_code("f16x2", j) for j in range(8)))


@triton.jit
def shifted_pair(word, J: tl.constexpr):
    """Nibbles of input J of an even and the odd column, as int32."""
    return tl.join((word >> (4 * (J % 4))) & 15, (word >> (4 * (J % 4) + 16)) & 15)


@triton.jit
def parameter_group(block, part, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr):
    """Group of part `part` of PARTS of a block of 128 inputs."""
    if PARTS > 1:
        return block * PARTS + part
    elif GROUPS == 1:  # noqa: RET505
        return block * 0
    else:
        return block * BLOCK // GROUP


@triton.jit
def e2m1(code):
    """float32 value of the e2m1 code in the low 4 bits: exponent and mantissa as a float's, less its bias."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126


@triton.jit
def _nibble_pair(word, J: tl.constexpr, shape: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers of input J of an even and the odd column: q - 8, or of e2m1."""
    pair = tl.reshape(shifted_pair(word, J), shape)
    return (pair - 8).to(DTYPE) if FORMAT == "int" else e2m1(pair).to(DTYPE)


@triton.jit
def input_numbers(tile, J: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """16-bit numbers of input J of the words `tile`.

    An instruction of one result lets Triton choose the layout of its words. Where one instruction has eight results, Triton 3.8
    chooses the layout of one of them and copies the others through shared memory.
    """
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        code: tl.constexpr = INT_BFLOAT_PAIRS[J] if FORMAT == "int" else E2M1_BFLOAT_PAIRS[J]
        return tl.inline_asm_elementwise(code, "=r,r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:  # noqa: RET505
        code: tl.constexpr = INT_HALF_PAIRS[J] if FORMAT == "int" else E2M1_HALF_PAIRS[J]
        return tl.inline_asm_elementwise(code, "=r,r,r", [tile], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def nibbles(
    tile, FORMAT: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, COUNT: tl.constexpr, DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Eight tiles of the shape of `tile`, of q - 8 or of e2m1 numbers: of word c of a block, input `16 * j + c`."""
    if ASSEMBLY:
        a0, a1 = input_numbers(tile, 0, FORMAT, DTYPE), input_numbers(tile, 1, FORMAT, DTYPE)
        a2, a3 = input_numbers(tile, 2, FORMAT, DTYPE), input_numbers(tile, 3, FORMAT, DTYPE)
        a4, a5 = input_numbers(tile, 4, FORMAT, DTYPE), input_numbers(tile, 5, FORMAT, DTYPE)
        a6, a7 = input_numbers(tile, 6, FORMAT, DTYPE), input_numbers(tile, 7, FORMAT, DTYPE)
        return a0, a1, a2, a3, a4, a5, a6, a7
    else:  # noqa: RET505
        pairs: tl.constexpr = [SPLIT, BLOCK_N, COUNT // 2, 2] if SPLIT > 1 else [BLOCK_N, COUNT // 2, 2]
        shape: tl.constexpr = [SPLIT, BLOCK_N, COUNT] if SPLIT > 1 else [BLOCK_N, COUNT]
        even, odd = tl.split(tl.reshape(tile, pairs))
        return (
            _nibble_pair(even, 0, shape, FORMAT, DTYPE),
            _nibble_pair(even, 1, shape, FORMAT, DTYPE),
            _nibble_pair(even, 2, shape, FORMAT, DTYPE),
            _nibble_pair(even, 3, shape, FORMAT, DTYPE),
            _nibble_pair(odd, 0, shape, FORMAT, DTYPE),
            _nibble_pair(odd, 1, shape, FORMAT, DTYPE),
            _nibble_pair(odd, 2, shape, FORMAT, DTYPE),
            _nibble_pair(odd, 3, shape, FORMAT, DTYPE),
        )


@triton.jit
def parameter(pointer, rows, block, part, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr):
    """Scales or zero points of a part of each warp's block, of the shape of `rows + block`."""
    group = parameter_group(block, part, GROUP, GROUPS, PARTS)
    return tl.load(pointer + rows * GROUPS + group, mask=group < GROUPS, other=0.0)


@triton.jit
def _dots(
    sums, a0, a1, b0, b1, zero, rows, block, part, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
    """sums plus products of 32 inputs of each warp's block, which lie in one group, without its scale.

    The zero point multiplies the sum of the inputs.
    """
    if ZERO:
        point = parameter(zero, rows, block, part, GROUP, GROUPS, PARTS).to(tl.float32) - 8.0
        sums -= point * tl.sum(b0.to(tl.float32) + b1.to(tl.float32), len(b0.shape) - 2, keep_dims=True)
    return tl.dot(a1, b1, tl.dot(a0, b0, sums, input_precision="ieee"), input_precision="ieee")


@triton.jit
def scale_value(scale):
    """float32 of a scale: of MXFP4 the exponent of a power of two, of other formats a number."""
    if scale.dtype == tl.uint8:
        return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:  # noqa: RET505
        return scale.to(tl.float32)


@triton.jit
def _scaled_dot(
    total, a, b, scale, rows, block, J: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr
):
    """total plus products of input J of every word, times their scale, of which there is one for each 16 inputs."""
    by = parameter(scale, rows, block, J, GROUP, GROUPS, PARTS)
    return total + tl.dot(a, b, input_precision="ieee") * scale_value(by)


@triton.jit
def add_block(
    total, by, tile, here, k, left, real, scale, zero, rows, block,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, ZERO: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """total plus eight products of depth 16: the words `tile` of a block (of each warp) times its 128 inputs at `here`.

    `by`: scales of the first part of the block, by which products are multiplied in float32. Triton 3.6 generates wrong code for
    sm_90 where unpacked words of several warps' blocks meet a loaded scale or zero point before their product.
    """
    b0 = tl.load(here, mask=real & (k < left), other=0.0)
    b1 = tl.load(here + 16, mask=real & (k + 16 < left), other=0.0)
    b2 = tl.load(here + 32, mask=real & (k + 32 < left), other=0.0)
    b3 = tl.load(here + 48, mask=real & (k + 48 < left), other=0.0)
    b4 = tl.load(here + 64, mask=real & (k + 64 < left), other=0.0)
    b5 = tl.load(here + 80, mask=real & (k + 80 < left), other=0.0)
    b6 = tl.load(here + 96, mask=real & (k + 96 < left), other=0.0)
    b7 = tl.load(here + 112, mask=real & (k + 112 < left), other=0.0)
    a0, a1, a2, a3, a4, a5, a6, a7 = nibbles(tile, FORMAT, SPLIT, BLOCK_N, WORDS, DTYPE, ASSEMBLY)
    if PARTS == 8:
        total += tl.dot(a0, b0, input_precision="ieee") * scale_value(by)
        total = _scaled_dot(total, a1, b1, scale, rows, block, 1, GROUP, GROUPS, PARTS)
        total = _scaled_dot(total, a2, b2, scale, rows, block, 2, GROUP, GROUPS, PARTS)
        total = _scaled_dot(total, a3, b3, scale, rows, block, 3, GROUP, GROUPS, PARTS)
        total = _scaled_dot(total, a4, b4, scale, rows, block, 4, GROUP, GROUPS, PARTS)
        total = _scaled_dot(total, a5, b5, scale, rows, block, 5, GROUP, GROUPS, PARTS)
        total = _scaled_dot(total, a6, b6, scale, rows, block, 6, GROUP, GROUPS, PARTS)
        return _scaled_dot(total, a7, b7, scale, rows, block, 7, GROUP, GROUPS, PARTS)
    else:  # noqa: RET505
        quarter: tl.constexpr = PARTS // 4  # parts of a block before its second quarter
        half: tl.constexpr = PARTS // 2
        none = tl.zeros_like(total)
        sums = _dots(none, a0, a1, b0, b1, zero, rows, block, 0, GROUP, GROUPS, PARTS, ZERO)
        if PARTS == 4:
            total += sums * scale_value(by)
            by = parameter(scale, rows, block, quarter, GROUP, GROUPS, PARTS)
            sums = none
        sums = _dots(sums, a2, a3, b2, b3, zero, rows, block, quarter, GROUP, GROUPS, PARTS, ZERO)
        if PARTS > 1:
            total += sums * scale_value(by)
            by = parameter(scale, rows, block, half, GROUP, GROUPS, PARTS)
            sums = none
        sums = _dots(sums, a4, a5, b4, b5, zero, rows, block, half, GROUP, GROUPS, PARTS, ZERO)
        if PARTS == 4:
            total += sums * scale_value(by)
            by = parameter(scale, rows, block, PARTS - 1, GROUP, GROUPS, PARTS)
            sums = none
        sums = _dots(sums, a6, a7, b6, b7, zero, rows, block, PARTS - 1, GROUP, GROUPS, PARTS, ZERO)
        return total + sums * scale_value(by)


@triton.jit
def _store_products(total, bias, out, row, token, num_outputs, num_tokens, out_stride, HAS_BIAS: tl.constexpr):
    """Store `total [BLOCK_N, TOKENS]` of all warps."""
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < num_outputs, other=0.0).to(tl.float32)[:, None]
    at = out + token.to(tl.int64)[None, :] * out_stride + row[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < num_outputs)[:, None] & (token < num_tokens)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_outputs", "out_stride"])
def split_kernel(
    x, w, scale, zero, bias, out, row_scale, num_tokens, num_outputs, out_stride, FORMAT: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, BY_ROW: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr,
    ASSEMBLY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (N tiles, T tiles, programs): eight products of depth 16 for each block of 128 inputs.

    The blocks are dealt to the programs and, in each, to SPLIT warps. With several programs, out is float32 `[programs, T, N]`.
    """
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, c = tl.minimum(row, num_outputs - 1).to(tl.int64), tl.arange(0, WORDS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    warp = tl.arange(0, SPLIT)[:, None, None]
    k, row_of, real = warp * BLOCK + c[None, :, None], rows[None, :, None], (token < num_tokens)[None, None, :]
    words = w + row_of * (BLOCKS * WORDS) + warp * WORDS + c[None, None, :]
    inputs = x + token.to(tl.int64)[None, None, :] * WIDTH + k
    total = tl.zeros([SPLIT, BLOCK_N, TOKENS], tl.float32)
    begin, step = tl.program_id(2) * SPLIT, tl.num_programs(2) * SPLIT
    by = parameter(scale, row_of, begin + warp, 0, GROUP, GROUPS, PARTS)
    pdl_wait(DEPENDENT)
    for first in range(begin, BLOCKS, step):
        block = first + warp
        by_ahead = parameter(scale, row_of, block + step, 0, GROUP, GROUPS, PARTS)
        tile = tl.load(words + first * WORDS, mask=block < BLOCKS, other=0, eviction_policy="evict_first")
        total = add_block(
            total, by, tile, inputs + first * BLOCK, k, WIDTH - first * BLOCK, real, scale, zero, row_of, block,
            FORMAT, GROUP, GROUPS, PARTS, ZERO, SPLIT, BLOCK_N, x.dtype.element_ty, ASSEMBLY,
        )  # fmt: skip
        by = by_ahead
    total = tl.sum(total, 0)
    if BY_ROW:
        total *= tl.load(row_scale + row, mask=row < num_outputs, other=0.0)[:, None]
    out += tl.program_id(2).to(tl.int64) * num_tokens * out_stride
    _store_products(total, bias, out, row, token, num_outputs, num_tokens, out_stride, HAS_BIAS)


@triton.jit(do_not_specialize=["num_tokens", "num_outputs", "out_stride"])
def byte_kernel(
    x, w, scale, zero, bias, out, num_tokens, num_outputs, out_stride,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`split_kernel` for weights in 8 bits and SPLIT above 1; BLOCK_K divides GROUP, or there is one group."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(row, num_outputs - 1).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    begin = tl.arange(0, SPLIT)[:, None, None] * BLOCK_K
    along, down = begin + tl.arange(0, BLOCK_K)[None, None, :], begin + tl.arange(0, BLOCK_K)[None, :, None]
    weights = w + rows[None, :, None] * WIDTH + along
    inputs = x + token.to(tl.int64)[None, None, :] * WIDTH + down
    real = (token < num_tokens)[None, None, :]
    pdl_wait(DEPENDENT)
    total = tl.zeros([SPLIT, BLOCK_N, TOKENS], tl.float32)
    for first in range(tl.program_id(2) * SPLIT * BLOCK_K, WIDTH, tl.num_programs(2) * SPLIT * BLOCK_K):
        left = WIDTH - first
        a = tl.load(weights + first, mask=along < left, other=0, eviction_policy="evict_first").to(x.dtype.element_ty)
        b = tl.load(inputs + first, mask=(down < left) & real, other=0.0)
        group = (first + begin) // GROUP
        at, inside = rows[None, :, None] * GROUPS + group, group < GROUPS
        if ZERO:
            a -= (tl.load(zero + at, mask=inside, other=128).to(tl.float32) - 128.0).to(a.dtype)
        total += tl.dot(a, b, input_precision="ieee") * tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    out += tl.program_id(2).to(tl.int64) * num_tokens * out_stride
    _store_products(tl.sum(total, 0), bias, out, row, token, num_outputs, num_tokens, out_stride, HAS_BIAS)


@triton.jit(do_not_specialize=["programs", "num_outputs", "out_stride"])
def add_kernel(
    sums, bias, out, programs, num_outputs, out_stride, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, N tiles): out [T, N] = the sum of `sums [programs, T, N]` over programs, in order, plus bias."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < num_outputs
    at, step = tl.program_id(0).to(tl.int64) * num_outputs + n, tl.num_programs(0).to(tl.int64) * num_outputs
    pdl_wait(DEPENDENT)
    total = tl.load(sums + at, mask=mask, other=0.0)
    for program in range(1, programs):
        total += tl.load(sums + program * step + at, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0).to(tl.int64) * out_stride + n, total.to(out.dtype.element_ty), mask=mask)


def format_of(scale: Tensor) -> str:
    """FORMAT of the kernels: e2m1 numbers have scales that are exponents or in 8 bits."""
    return "e2m1" if scale.dtype in (torch.uint8, FP8) else "int"


def parts_of(scale: Tensor, group: int) -> int:
    """Groups in a block of 128 inputs."""
    return 128 // group if group < 128 and (scale.shape[1] > 1 or format_of(scale) == "e2m1") else 1


def launch(
    config: Any, x: Tensor, w: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group: int, out: Tensor,
    row_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """out [T, N] of x [T, K] and a weight as `torchweave::int_linear`, rows contiguous."""
    (tokens, width), (outputs, groups) = x.shape, scale.shape
    # Tiles on sm_90 must wait in assembly for products in flight.
    asked = config.hopper or (
        config.kernel == "tile" and x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
    )
    hopper = asked and (not x.is_cuda or supports_pdl(x.device))
    divided = config.programs > 1
    parts = parts_of(scale, group)
    tiles = cdiv(outputs, config.block_n)
    to = torch.empty(config.programs, tokens, outputs, device=x.device) if divided else out
    dependent = {"DEPENDENT": hopper, **pdl_options(hopper)}
    constants: dict[str, Any] = {
        "WIDTH": width, "GROUP": group, "GROUPS": groups, "ZERO": zero is not None, "BLOCK_N": config.block_n,
        "HAS_BIAS": bias is not None and not divided, "num_warps": config.num_warps, **dependent,
    }  # fmt: skip
    operands = (x, w, scale, scale if zero is None else zero, scale if bias is None else bias, to)
    by_row = scale if row_scale is None else row_scale
    in_words = {"FORMAT": format_of(scale), "BY_ROW": row_scale is not None, "PARTS": parts, "ASSEMBLY": hopper}
    if config.kernel == "row":
        from torchweave.ops.kernels.quant.int_rows import row_kernel  # imports this module

        words = min(config.depth, next_power_of_2(cdiv(width, 128) * 16))
        row_kernel[(tokens, tiles)](*operands, by_row, outputs, out.stride(0), BLOCK_W=words, **in_words, **constants)
        return
    grid, sizes = (tiles, cdiv(tokens, config.block_t), config.programs), (tokens, outputs, to.stride(-2))
    constants |= {"TOKENS": config.block_t, "num_stages": config.depth}
    if config.kernel == "tile":
        from torchweave.ops.kernels.quant.int_tiles import tile_kernel  # imports this module

        tile_kernel[grid[1], grid[0], grid[2]](*operands, by_row, *sizes, **in_words, **constants)
    elif w.dtype == torch.int32:
        split_kernel[grid](*operands, by_row, *sizes, SPLIT=config.num_warps, **in_words, **constants)
    else:
        depth = min(group, 128) if groups > 1 else 128
        byte_kernel[grid](*operands, *sizes, BLOCK_K=depth, SPLIT=config.num_warps, **constants)
    if divided:
        add_kernel[(tokens, cdiv(outputs, 512))](
            to, operands[4], out, config.programs, outputs, out.stride(0), HAS_BIAS=bias is not None, BLOCK_N=512, num_warps=4,
            **dependent,
        )  # fmt: skip
