"""`torchweave::int_linear`: product of a 16-bit activation and a weight in 4 or 8 bits, by a kernel chosen by the number of tokens.

A weight `[N, K]` is unsigned integers q of 4 or 8 bits with a scale s, and optionally a zero point z, for each row and each group
of `group` inputs. It has the value `(q - z) * s`; without zero points z is the middle, 8 or 128.

Numbers of MXFP4 and NVFP4 are e2m1 codes `c` instead (`torchweave.ops.quant.nvfp4`), 4 bits with the value `c * s`: s is uint8, the
exponent of MXFP4 (`2 ** (s - 127)`, 32 inputs), or e4m3 with another scale for each row (NVFP4, 16 inputs).

    w      4 bits: int32 `[N, ceil(K / 128) * 16]`, see `pack_int4`; 8 bits: int8 `[N, K]`, q - 128
    scale  a floating-point dtype, or uint8, `[N, ceil(K / group)]`
    zero   uint8, of the same shape, or none
    order  int32 `[K]`: column k of w multiplies input order[k] (checkpoints with activation order), or none
    row_scale  float32 `[N]`, of NVFP4, or none

All leading dimensions are N: weights that read one input can be stacked. On a GPU, up to `MAX_TOKENS` tokens run in kernels that
read the packed weight; above, the weight is dequantized to x's dtype and multiplied by the BLAS. Products are exact and summed in
float32; above 16 tokens in 4 bits and 64 in 8, weights are rounded to x's dtype when they are dequantized.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.kernels.quant.formats import FP8
from torchweave.ops.quant.nvfp4 import VALUES
from torchweave.ops.registry import define

BLOCK = 128
"""Inputs of a block of 16 words of w."""
WORDS = 16
MAX_TOKENS = {4: 512, 8: 64}
"""Above this many tokens the BLAS runs, by bits."""
ROW_KERNEL_MAX_TOKENS = 2
E2M1_SCALES = (torch.uint8, FP8)
"""Dtypes of scales of e2m1 numbers: MXFP4, NVFP4."""
_CHUNK = 1 << 22  # weights that are dequantized at once on a CPU
_HALVES = (torch.bfloat16, torch.float16)


def num_groups(width: int, group: int) -> int:
    """Scales of a row."""
    return -(-width // group)


def bits_of(w: Tensor) -> int:
    """4 or 8: bits of an integer of a weight."""
    return 4 if w.dtype == torch.int32 else 8


def pack_int4(q: Tensor) -> Tensor:
    """q uint8 `[N, K]` of values 0 to 15 -> int32 `[N, ceil(K / 128) * 16]`, in the order that the kernels unpack.

    Nibble i of word c of a block of 128 inputs is input `16 * j + m` with `j = i % 4 + 4 * (c % 2)` and
    `m = c - c % 2 + i // 4`: so `w & 0x000F000F` is a pair of neighboring inputs, and two neighboring words give all j.
    """
    rows, width = q.shape
    blocks = F.pad(q, (0, -width % BLOCK)).view(rows, -1, 2, 4, WORDS // 2, 2)  # j = (half, quarter), m = (pair, odd)
    nibbles = blocks.permute(0, 1, 4, 2, 5, 3).reshape(rows, -1, 8)
    packed = torch.zeros(nibbles.shape[:2], dtype=torch.int32, device=q.device)
    for index in range(8):
        packed |= nibbles[..., index].to(torch.int32) << (4 * index)
    return packed


def unpack_int4(w: Tensor, width: int) -> Tensor:
    """The uint8 `[N, width]` that `pack_int4` packed."""
    rows = w.shape[0]
    nibbles = torch.stack([((w >> (4 * index)) & 15).to(torch.uint8) for index in range(8)], -1)
    blocks = nibbles.view(rows, -1, WORDS // 2, 2, 2, 4).permute(0, 1, 3, 5, 2, 4)
    return blocks.reshape(rows, -1)[:, :width]


def dequantize_int(
    w: Tensor, scale: Tensor, zero: Tensor | None, width: int, group: int, dtype: torch.dtype, row_scale: Tensor | None = None
) -> Tensor:  # fmt: skip
    """The values `[N, width]` of a weight, computed in float32 and rounded to `dtype`; columns in the order of w."""
    if scale.dtype in E2M1_SCALES:
        q = torch.tensor((*VALUES, *(-value for value in VALUES)), device=w.device)[unpack_int4(w, width).int()]
        by = (
            torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - 127)
            if scale.dtype == torch.uint8
            else scale.float()
        )
    else:
        q = unpack_int4(w, width).float() - 8 if bits_of(w) == 4 else w.float()
        by = scale.float()
    groups = F.pad(q, (0, -width % group)).unflatten(1, (-1, group))
    if zero is not None:
        groups = groups - (zero.float() - (8 if bits_of(w) == 4 else 128))[..., None]
    values = groups * by[..., None]
    if row_scale is not None:
        values = values * row_scale[:, None, None]
    return values.flatten(1)[:, :width].to(dtype)


@dataclass(frozen=True)
class IntConfig:
    """Launch configuration of the product.

    Attributes:
        kernel: "row" multiplies element by element in float32, a program per token; "split" uses tensor cores, and the warps of a
            program share its rows and divide K; "tile" (4 bits) uses tensor cores, its warps share inputs and divide the rows, and
            weights are rounded to 16 bits.
        block_n: rows of the weight per program.
        num_warps: warps of a program.
        depth: words of a row per iteration for "row", pipeline stages for the others.
        block_t: tokens of a program, not for "row".
        programs: programs that divide K, not for "row"; above 1, a second kernel adds their sums.
        hopper: use what sm_90 has: programmatic dependent launch, which starts a kernel while the previous one drains, and
            arithmetic on pairs of 16-bit numbers. Tiles always use it there.
    """

    kernel: Literal["row", "split", "tile"]
    block_n: int
    num_warps: int
    depth: int
    block_t: int = 16
    programs: int = 1
    hopper: bool = True

    def run(
        self, x: Tensor, w: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group: int, out: Tensor,
        row_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """out [T, N] from x [T, K] and the rest as `int_linear`, all on one GPU, rows contiguous."""
        from torchweave.ops.kernels.quant.int_linear import launch

        launch(self, x, w, scale, zero, bias, group, out, row_scale)


_ROW = IntConfig("row", 8, num_warps=2, depth=256)
_ROW_FEW_ROWS = IntConfig("row", 4, num_warps=2, depth=256)
_ROW_WIDE = IntConfig("row", 8, num_warps=4, depth=512)
_SPLIT = IntConfig("split", 64, num_warps=2, depth=4)
_SPLIT_BYTES = IntConfig("split", 64, num_warps=4, depth=2)
_TILES = {
    32: (
        IntConfig("tile", 64, num_warps=4, depth=4, block_t=32),
        IntConfig("tile", 128, num_warps=8, depth=4, block_t=32),
    ),
    64: (
        IntConfig("tile", 64, num_warps=4, depth=3, block_t=64),
        IntConfig("tile", 128, num_warps=8, depth=3, block_t=64),
    ),
    128: (
        IntConfig("tile", 64, num_warps=4, depth=3, block_t=128),
        IntConfig("tile", 128, num_warps=8, depth=4, block_t=128),
    ),
}
"""Tiles for weights of few and of many rows, by tokens of a program."""
_DEVICE_PROGRAMS = 132
"""Programs that run at a time, one on each multiprocessor of an H100."""
_MIN_INPUTS, _MAX_PROGRAMS = 1024, 8
"""Inputs of a program at least, and programs at most, that divide K for a tile."""
_WIDE, _SHORT, _FEW_ROWS = 8192, 2048, 4096
_FULL, _HALF = 192, 80
"""Tiles from which a GPU is filled by one program for each, and by two."""


def _kinds(num_tokens: int, width: int, bits: int, e2m1: bool) -> tuple[IntConfig, ...]:
    """Configurations for weights of few and of many rows, or of any number, by the number of tokens.

    Measured on an H100 with the shapes of Llama 8B and 1B (bench/kernels/linear.py --weights int4).
    """
    if bits == 4 and num_tokens <= ROW_KERNEL_MAX_TOKENS and not e2m1:
        return (_ROW_WIDE,) if width > _WIDE else (_ROW_FEW_ROWS, _ROW)
    block_t = next(size for size in (8, 16, 32, 64, 128) if num_tokens <= size or size == 128)
    if bits == 8:
        return (replace(_SPLIT_BYTES, block_t=block_t, depth=2 if block_t == 64 else 3),)
    return (replace(_SPLIT, block_t=block_t),) if block_t <= 16 else _TILES[block_t]


def configs(
    num_tokens: int, width: int, bits: int, *, e2m1: bool = False, hopper: bool = True
) -> tuple[IntConfig, ...]:
    """Configurations for x [num_tokens, width], whatever the weight's rows; none: the BLAS."""
    if num_tokens < 1 or num_tokens > MAX_TOKENS[bits]:
        return ()
    kinds = (replace(each, hopper=hopper) for each in _kinds(num_tokens, width, bits, e2m1))
    return tuple(
        replace(each, programs=programs) for each in kinds for programs in ((1,) if each.kernel == "row" else (1, 2))
    )


def choose(
    num_tokens: int, num_outputs: int, width: int, bits: int, *, e2m1: bool = False, hopper: bool = True
) -> IntConfig | None:
    """Configuration for x [num_tokens, width] times w [num_outputs, width].T on a GPU; None for the BLAS."""
    if num_tokens < 1 or num_tokens > MAX_TOKENS[bits]:
        return None
    kinds = _kinds(num_tokens, width, bits, e2m1)
    if kinds[0].kernel == "row":
        return replace(kinds[0 if num_outputs <= _FEW_ROWS else -1], hopper=hopper)
    if kinds[0].kernel == "tile":
        config = _choose_tile(kinds, num_tokens, num_outputs, width)
        return None if config is None else replace(config, hopper=hopper)
    tiles = -(-num_outputs // kinds[0].block_n) * -(-num_tokens // kinds[0].block_t)
    config = kinds[-1 if tiles >= _FULL else 0]
    programs = 1 if tiles >= _FULL else 2 if tiles >= _HALF else 4
    while programs > 1 and programs * config.num_warps * BLOCK > width:
        programs //= 2
    return replace(config, programs=programs, hopper=hopper)


def _choose_tile(kinds: tuple[IntConfig, ...], num_tokens: int, num_outputs: int, width: int) -> IntConfig | None:
    """The tile for weights of few or of many rows, and the programs that fill the device; None for the BLAS."""

    def tiles_of(config: IntConfig) -> int:
        return -(-num_outputs // config.block_n) * -(-num_tokens // config.block_t)

    few, many = kinds
    tiles = tiles_of(many)
    if num_tokens > 256 and _DEVICE_PROGRAMS < tiles <= _DEVICE_PROGRAMS * 3 // 2:
        return None  # the second wave leaves half of the device idle
    if many.block_t <= 64:
        config, room = few if num_outputs <= _FEW_ROWS and width <= _WIDE else many, 2 * _DEVICE_PROGRAMS
    else:
        config, room = few if 2 * tiles <= _DEVICE_PROGRAMS and width <= _SHORT else many, _DEVICE_PROGRAMS
    tiles, programs = tiles_of(config), 1
    if tiles > _DEVICE_PROGRAMS * 3 // 4:
        return config  # sums of several programs cost more than idle multiprocessors
    while 2 * programs * tiles <= room and 2 * programs <= min(_MAX_PROGRAMS, width // _MIN_INPUTS):
        programs *= 2
    return replace(config, programs=programs)


def kernels_support(width: int, group: int, dtype: torch.dtype, scale_dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernels multiply by such weights: groups of 32, 64, a multiple of 128, or whole rows; exponents fit bfloat16."""
    if scale_dtype in E2M1_SCALES:
        return dtype in _HALVES and width % 8 == 0 and (dtype == torch.bfloat16 or scale_dtype != torch.uint8)
    return dtype in _HALVES and width % 8 == 0 and (group in (32, 64) or group % BLOCK == 0 or group >= width)


def _ordered(x: Tensor, order: Tensor | None) -> Tensor:
    """x `[..., K]` as contiguous rows in the order of w's columns."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.contiguous() if order is None else rows.index_select(1, order)


def _fake(
    x: Tensor, w: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor | None, bias: Tensor | None, group: int,
    row_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _options(rows: Tensor, w: Tensor, scale: Tensor, group: int) -> dict[str, bool] | None:
    """Keyword arguments of `choose` for operands on a GPU; None if the kernels do not support them."""
    if not kernels_support(rows.shape[1], group, rows.dtype, scale.dtype):
        return None
    return {"e2m1": scale.dtype in E2M1_SCALES, "hopper": torch.cuda.get_device_capability(rows.device)[0] == 9}


def _launch(
    x: Tensor, w: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor | None, bias: Tensor | None, group: int,
    row_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, width = _ordered(x, order), x.shape[-1]
    options = _options(rows, w, scale, group)
    config = None if options is None else choose(len(rows), w.shape[0], width, bits_of(w), **options)
    shape = (*x.shape[:-1], w.shape[0])
    if config is None:
        weight = _dequantize_on_gpu(w, scale, zero, width, group, x.dtype, row_scale)
        return F.linear(rows, weight, bias).view(shape)
    out = x.new_empty(shape)
    config.run(rows, w, scale, zero, bias, group, out.view(-1, w.shape[0]), row_scale)
    return out


def _dequantize_on_gpu(
    w: Tensor, scale: Tensor, zero: Tensor | None, width: int, group: int, dtype: torch.dtype, row_scale: Tensor | None
) -> Tensor:
    if not kernels_support(width, group, dtype, scale.dtype):
        return dequantize_int(w, scale, zero, width, group, dtype, row_scale)
    from torchweave.ops.kernels.quant.dequantize import launch_dequantize

    out = torch.empty(w.shape[0], width, dtype=dtype, device=w.device)
    launch_dequantize(w, scale, zero, group, out, row_scale)
    return out


def launch_samples(
    x: Tensor, w: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor | None, bias: Tensor | None, group: int,
    row_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch every kernel that `int_linear` may launch for this x and weights of this width, whatever their rows."""
    torch.ops.torchweave.int_linear(x, w, scale, zero, order, bias, group, row_scale)
    if not x.is_cuda:
        return
    rows = _ordered(x, order)
    options = _options(rows, w, scale, group)
    for config in () if options is None else configs(len(rows), x.shape[-1], bits_of(w), **options):
        config.run(rows, w, scale, zero, bias, group, x.new_empty(len(rows), w.shape[0]), row_scale)


@define("torchweave::int_linear", fake=_fake, cuda=_launch)
def int_linear(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    group: int,
    row_scale: Tensor | None = None,
) -> Tensor:
    """x[..., order] @ W.T + bias, in float32 throughout and rounded once; W: the values of the weight.

    Args:
        x: `[..., K]`.
        w, scale, zero, order, row_scale: the weight `[N, K]`; see the module's text.
        bias: `[N]` or none.
        group: inputs that share a scale; at least K: one scale a row.
    """
    rows, width = _ordered(x, order).float(), x.shape[-1]
    step = max(1, _CHUNK // max(width, 1))
    parts = []
    for at in (slice(first, first + step) for first in range(0, w.shape[0], step)):
        points, by_row = (None if each is None else each[at] for each in (zero, row_scale))
        parts.append(rows @ dequantize_int(w[at], scale[at], points, width, group, torch.float32, by_row).t())
    out = torch.cat(parts, 1)
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], w.shape[0])
