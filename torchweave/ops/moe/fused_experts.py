"""Routed experts on a GPU: three strategies, chosen by the number of tokens and the weights' shape, in bounded memory.

rows     one or two tokens, up to four with 4-bit weights: each chosen expert's rows are read once for each token, at memory
         bandwidth. Two launches. Not for 8-bit integers.
tiles    up to a few tokens an expert: pairs are grouped by expert on the device, and a program multiplies rows of one expert's
         weight by all of its tokens on tensor cores, 8 at a time where there are few. Four launches.
grouped  many tokens an expert: a program multiplies tiles of tokens and columns of different experts, one after another, at the
         rate of the tensor cores. Five launches. For weights that are not quantized.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchweave.ops.moe.experts import ExpertsCall, apply_expert
from torchweave.ops.quant.fp8 import FP8

WORKSPACE_BYTES = 512 << 20
"""Temporaries of one chunk of tokens; a larger step runs in chunks, which leaves the memory to the KV cache.

A chunk reads all weights again. For 128 experts of 2048 x 768 a chunk has 11,900 tokens, whose arithmetic takes at least twice as
long as that reading.
"""


@dataclass(frozen=True)
class GemmConfig:
    """Launch configuration of one of the two products.

    Attributes:
        block_n: output columns of a program; for gate and up, of each.
        block_k: columns of a weight's row per iteration.
        num_warps: warps of a program.
        depth: iterations in flight: loop unrolling for rows, pipeline stages for tiles.
        ahead: of tiles, lines of 128 bytes of each row that a program fetches into the L2 cache first.
    """

    block_n: int
    block_k: int
    num_warps: int
    depth: int
    ahead: int = 0


@dataclass(frozen=True)
class Rows:
    """Few tokens, element by element; `dependent`: by programmatic dependent launch, see `LinearConfig`.

    `early`: a shared expert's gate and up are loaded before the routing is known; an iteration has all inputs.
    Of 4-bit weights the words of an iteration hold `block_k` numbers, a multiple of 128; of `down` those of all experts of a token,
    one after the other.
    """

    up: GemmConfig
    down: GemmConfig
    dependent: int = 0
    early: bool = False


@dataclass(frozen=True)
class Tiles:
    """Tokens grouped by expert, `block_m` at a time, on tensor cores; `dependent`: by programmatic dependent launch.

    Programs of fewer than four warps multiply words by narrow products, whose iteration has `block_k` numbers, a multiple of 128.
    """

    up: GemmConfig
    down: GemmConfig
    block_m: int = 16
    dependent: bool = False


@dataclass(frozen=True)
class Grouped:
    """Tokens sorted by expert, `block_m` of them and `block_n` columns at a time, see `experts_grouped_gemm`."""

    up: GemmConfig = GemmConfig(128, 64, 8, 4)
    down: GemmConfig = GemmConfig(256, 64, 8, 3)
    block_m: int = 128


Strategy = Rows | Tiles | Grouped

FP8_FORMATS, WORD_FORMATS = ("fp8", "fp8_per_block"), ("int4", "mxfp4", "nvfp4")
ROW_TOKENS, WORD_ROW_TOKENS = 2, 4
_ROW_WIDTH = 2048
"""Inputs up to which an iteration of the first product of rows has all; a longer row takes several."""
_ROWS = Rows(GemmConfig(1, 2048, 4, 1), GemmConfig(2, 128, 4, 2), dependent=1)
_FP8_ROWS = Rows(GemmConfig(2, 2048, 4, 1), GemmConfig(4, 128, 4, 2), dependent=1)
_WORD_ROWS = Rows(GemmConfig(4, 2048, 1, 1), GemmConfig(4, 4096, 4, 1), dependent=1)
_MXFP4_ROWS = Rows(GemmConfig(4, 2048, 2, 1), GemmConfig(4, 2048, 2, 1), dependent=1)
_NVFP4_ROWS = replace(_WORD_ROWS, up=_MXFP4_ROWS.up)
_SHARED_ROWS = Rows(GemmConfig(1, 2048, 4, 1), GemmConfig(4, 128, 4, 2), dependent=1, early=True)
"""Qwen 3.5 35B on an H100, one token: 20.5 us, against 21.3 with (2, 2048) and (2, 128)
(bench/results/experts-qwen3.5-shared_h100_202611.json)."""
_LONG_UP, _LONG_FP8_UP, _LONG_WORD_UP = GemmConfig(2, 2048, 4, 1), GemmConfig(4, 1024, 2, 2), GemmConfig(2, 1024, 1, 1)
"""First products of more inputs than `_ROW_WIDTH`."""
_BLOCK_FP8_UP = GemmConfig(4, 1024, 4, 2)
_SHORT_DOWN, _LONG_DOWN = GemmConfig(2, 128, 2, 3), GemmConfig(2, 128, 4, 3)
"""Second products in 16 bits of up to 512 inputs, and of more than 768."""
_TWO_ITERATIONS_DOWN = GemmConfig(4, 4096, 2, 1)
"""Second products of integers where all experts of a token have more than one iteration's inputs and at most two."""
_TILES = Tiles(GemmConfig(32, 128, 4, 4), GemmConfig(64, 128, 4, 4), dependent=True)
_FP8_TILES = Tiles(GemmConfig(32, 128, 4, 4), GemmConfig(64, 64, 4, 5), dependent=True)
_LONG_WORD_TILES = Tiles(GemmConfig(64, 128, 4, 3), GemmConfig(64, 128, 4, 4), dependent=True)
_NARROW_TILES = Tiles(GemmConfig(16, 256, 2, 4, 4), GemmConfig(32, 128, 2, 4, 4), block_m=8, dependent=True)
_LONG_NARROW_TILES = Tiles(GemmConfig(32, 256, 2, 3), GemmConfig(32, 256, 2, 3, 4), block_m=8, dependent=True)
_NARROW_FP8_TILES = Tiles(GemmConfig(16, 128, 2, 8, 4), GemmConfig(32, 128, 2, 4, 4), block_m=8, dependent=True)
"""Of words and of FP8, while most experts have no more tokens than the 8 columns of `mma.sync`."""
_MIDDLE_TILES = Tiles(GemmConfig(64, 128, 8, 3), GemmConfig(64, 64, 4, 4), block_m=64, dependent=True)
_WIDE_TILES = Tiles(GemmConfig(64, 64, 8, 3), GemmConfig(128, 64, 8, 3), block_m=64)
_WIDE_FP8_TILES = Tiles(GemmConfig(64, 128, 8, 3), GemmConfig(64, 64, 4, 4), block_m=128)
_WIDE_WORD_TILES = Tiles(GemmConfig(64, 64, 8, 3), GemmConfig(128, 64, 8, 3), block_m=128)
_GROUPED = Grouped()
_NARROW_PAIRS, _FEW_PAIRS, _MORE_PAIRS = 4, 8, 32
"""Pairs of token and expert for each expert, up to which its tokens fill one narrow tile, or reading weights dominates."""


def weight_format(call: ExpertsCall) -> str | None:
    """The format of a call's weights: fp8, fp8_per_block, int8, int4, mxfp4 or nvfp4; None: not quantized."""
    scale = call.up_scale
    if scale is None:
        return None
    if call.up.dtype == FP8:
        return "fp8" if scale.shape[2] == 1 else "fp8_per_block"
    return "int8" if call.up.dtype == torch.int8 else {torch.uint8: "mxfp4", FP8: "nvfp4"}.get(scale.dtype, "int4")


def choose(
    num_tokens: int,
    top_k: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    transposed: bool = False,
    weights: str | None = None,
    shared: bool = False,
) -> Strategy:
    """The strategy for a number of tokens and routed experts of `shape`: their number, K and I; weights: their `weight_format`;
    shared: a shared expert runs with them.

    Rows where a weight is used once or twice; narrow tiles while an expert's tokens do not fill one, wider tiles while reading
    the weights dominates; then grouped, or wide tiles if the weights are quantized. On an H100, experts of Qwen3-30B-A3B
    (bench/results/experts_h100_202611.json): rows 27.5 against tiles 36.1 us at one token; tiles 449 against grouped 470 at 256
    and 470 against 480 at 512 (decision 0040). One token in FP8: rows 21.3 against tiles 44.3; in 4 bits 15.3 against 31.8;
    gpt-oss-20b in MXFP4 43.1 against 66.8 (experts-fp8, -int4 and -mxfp4 there). Since decision 0210 4 bits take 12.8 at one token,
    and at four 40 against 51 in tiles (74 against 71 at eight); gpt-oss-20b 33.4, and 117 against 133 (226 against 181).
    Narrow tiles (decision 0218) at 32 tokens: 112 against 134 in 4 bits, 186 against 207 in FP8; gpt-oss-20b 225 against 258, but
    327 against 273 at 64. Tiles of rows by format (decision 0182) take 0.1 to 3.0 us a layer less at one token.
    """
    num_experts, width, inner = shape
    words, fp8, long = weights in WORD_FORMATS, weights in FP8_FORMATS, width > _ROW_WIDTH
    if num_tokens <= (WORD_ROW_TOKENS if words else ROW_TOKENS) and not transposed and weights != "int8":
        return _rows_for(num_tokens, top_k, width, inner, weights, shared)
    if num_tokens * top_k <= _NARROW_PAIRS * num_experts and (words or fp8):
        return _NARROW_FP8_TILES if fp8 else _LONG_NARROW_TILES if long else _NARROW_TILES
    if num_tokens * top_k <= _FEW_PAIRS * num_experts:
        return _FP8_TILES if fp8 else _LONG_WORD_TILES if words and long else _TILES
    if num_tokens * top_k <= _MORE_PAIRS * num_experts and dtype.itemsize == 2:
        return _MIDDLE_TILES
    if weights is not None:
        return _WIDE_FP8_TILES if fp8 else _WIDE_WORD_TILES
    if width % 8 == 0 and inner % 8 == 0:
        return _GROUPED
    return _WIDE_TILES


def _rows_for(num_tokens: int, top_k: int, width: int, inner: int, weights: str | None, shared: bool) -> Rows:
    """Rows by format and sizes as measured (decision 0182); a size between two measured ones has the tiles of the larger."""
    long = width > _ROW_WIDTH
    if weights is None:
        if shared:
            return _SHARED_ROWS
        down = _SHORT_DOWN if inner <= 512 else _ROWS.down if inner <= 768 else _LONG_DOWN
        return replace(_ROWS, up=_LONG_UP if long else _ROWS.up, down=down)
    if weights in FP8_FORMATS:
        up = _BLOCK_FP8_UP if weights == "fp8_per_block" else _LONG_FP8_UP if long else _FP8_ROWS.up
        return replace(_FP8_ROWS, up=up)
    rows = _MXFP4_ROWS if weights == "mxfp4" else _NVFP4_ROWS if weights == "nvfp4" else _WORD_ROWS
    inputs = top_k * -(-inner // 128) * 128  # of the words of a token's experts
    if weights == "int4" and num_tokens <= ROW_TOKENS and 1 < inputs / rows.down.block_k <= 2:
        rows = replace(rows, down=_TWO_ITERATIONS_DOWN)
    return replace(rows, up=_LONG_WORD_UP) if long else rows


def run(call: ExpertsCall, strategy: Strategy | None = None, workspace: int = WORKSPACE_BYTES) -> None:
    """Run a call on a GPU, in chunks of tokens whose temporaries stay within `workspace` bytes."""
    if call.num_tokens == 0:
        return
    call = _with_contiguous_rows(call)
    if strategy is None:
        shape = (call.num_experts - call.shared, call.x.shape[1], call.inner)
        top_k, weights = call.top_k - call.shared, weight_format(call)
        strategy = choose(call.num_tokens, top_k, shape, call.x.dtype, call.form.transposed, weights, call.shared)
        strategy = _supported_strategy(strategy, call)
    size = tokens_per_chunk(call, strategy, workspace)
    for begin in range(0, call.num_tokens, size):
        _run_chunk(call.tokens(begin, min(begin + size, call.num_tokens)), strategy)


def _supported_strategy(strategy: Strategy, call: ExpertsCall) -> Strategy:
    """The strategy adapted to this device (dependent launch) and to weights without contiguous rows."""
    from torchweave.ops.kernels.dependent_launch import supports_pdl

    if isinstance(strategy, Rows) and not call.up.stride(2) == call.down.stride(2) == 1:
        strategy = _TILES
    hopper = supports_pdl(call.x.device)
    if isinstance(strategy, Grouped):
        return strategy if hopper and all(map(_fits_tensor_descriptor, (call.up, call.down))) else _WIDE_TILES
    return strategy if hopper else replace(strategy, dependent=0)


def _fits_tensor_descriptor(weight: Tensor) -> bool:
    """Whether tensor descriptors describe a weight: contiguous rows at multiples of 16 bytes."""
    return weight.stride(2) == 1 and not any(
        bytes % 16 for bytes in (weight.data_ptr(), *(stride * weight.element_size() for stride in weight.stride()[:2]))
    )


def _with_contiguous_rows(call: ExpertsCall) -> ExpertsCall:
    """The call with contiguous rows of x, index and weight; the output must have contiguous rows."""
    assert call.out.stride(1) == 1, "the experts' output must have contiguous rows"
    x = call.x if call.x.stride(1) == 1 else call.x.contiguous()
    return replace(call, x=x, index=call.index.contiguous(), weight=call.weight.contiguous())


def bytes_per_pair(call: ExpertsCall, strategy: Strategy) -> int:
    """Bytes of temporaries of one pair of token and expert that live at once."""
    width, inner, size = call.x.shape[1], call.inner, call.x.element_size()
    if isinstance(strategy, Grouped):
        return size * (inner + width) + 5  # the sorted pairs, and less than a byte of tiles
    return size * inner + (4 * width + 4 if isinstance(strategy, Tiles) else 0)


def tokens_per_chunk(call: ExpertsCall, strategy: Strategy, workspace: int) -> int:
    """Tokens of a chunk: as few chunks as the workspace allows, of equal size."""
    most = max(1, workspace // (call.top_k * bytes_per_pair(call, strategy)))
    chunks = -(-call.num_tokens // most)
    return -(-call.num_tokens // chunks)


def _run_chunk(call: ExpertsCall, strategy: Strategy) -> None:
    if isinstance(strategy, Rows):
        _rows(call, strategy)
    elif isinstance(strategy, Tiles):
        _tiles(call, strategy)
    else:
        _grouped(call, strategy)


def _activation(call: ExpertsCall) -> dict[str, Any]:
    """Arguments of the kernels for the activation between the two products."""
    form = asdict(call.form)
    del form["transposed"]
    return form


def _rows(call: ExpertsCall, strategy: Rows) -> None:
    from torchweave.ops.kernels.moe import experts_gemv as kernels

    down = _row_launch(strategy.down) | {"dependent": strategy.dependent}
    h = call.x.new_empty(call.index.numel(), call.inner)
    first = (call.x, call.index, call.up, call.up_bias, h, call.up_scale, call.up_packing)
    early = strategy.early and call.x.shape[1] <= strategy.up.block_k and call.form.gated and not call.form.interleaved
    up = {**_activation(call), **_row_launch(strategy.up)}
    kernels.launch_rows_up(*first, **up, dependent=strategy.dependent, shared=early)
    second = (h, call.index, call.weight, call.down, call.down_bias, call.out)
    if call.down_scale is None or call.down.dtype == FP8:
        kernels.launch_rows_down(*second, call.down_scale, call.residual, shared=call.shared, **down)
    else:
        kernels.launch_words_down(*second, call.down_scale, call.down_packing, call.residual, **down)


def _tiles(call: ExpertsCall, strategy: Tiles) -> None:
    from torchweave.ops.kernels.moe import experts_tiles as kernels
    from torchweave.ops.kernels.moe.sort_pairs import launch_sort_pairs

    own = None
    if call.shared and call.num_tokens > strategy.block_m:
        call, own = _apart(call)
    up, down = (w.transpose(1, 2) if call.form.transposed else w for w in (call.up, call.down))
    ends, rows = launch_sort_pairs(call.index, call.num_experts, dependent=strategy.dependent)
    h = call.x.new_empty(call.index.numel(), call.inner)
    tile = {"block_m": strategy.block_m, "dependent": strategy.dependent}
    kernels.launch_tiles_up(
        call.x,
        up,
        call.up_bias,
        h,
        ends,
        rows,
        call.top_k,
        call.up_scale,
        call.up_packing,
        **_activation(call),
        **_launch(strategy.up),
        **tile,
    )
    y = call.x.new_empty(call.index.numel(), call.x.shape[1], dtype=torch.float32)
    kernels.launch_tiles_down(
        h, down, y, ends, rows, call.down_scale, call.down_packing, **_launch(strategy.down), **tile
    )
    if call.shared and own is None:
        own = y.unflatten(0, call.index.shape)[:, -1]
    _combine(call, y, own, dependent=strategy.dependent)


def _apart(call: ExpertsCall) -> tuple[ExpertsCall, Tensor]:
    """The call of the routed experts alone, to which the shared one is another rank's, and the shared one's output `[T, K]`.

    It has all tokens: a program of the tiles would multiply one tile after another, and the others wait for it.
    """
    own = apply_expert(call, call.x, call.num_experts - 1)
    return replace(call, up=call.up[:-1], down=call.down[:-1]), own


def _combine(call: ExpertsCall, y: Tensor, own: Tensor | None = None, *, dependent: bool) -> None:
    """Sum rows `[T k, K]` of pairs, weighted, a shared expert's output and the residual."""
    from torchweave.ops.kernels.moe.experts_tiles import launch_combine

    pairs = (y, call.index, call.weight, call.num_experts, call.down_bias, call.out)
    launch_combine(*pairs, own, call.residual, dependent=dependent)


def _grouped(call: ExpertsCall, strategy: Grouped) -> None:
    from torchweave.ops.kernels.moe import experts_grouped_gemm as kernels
    from torchweave.ops.kernels.moe.sort_pairs import launch_sort_tiles

    tile = {"transposed": call.form.transposed, "block_m": strategy.block_m}
    pairs = launch_sort_tiles(call.index, call.num_experts, strategy.block_m)
    h = call.x.new_empty(call.index.numel(), call.inner)
    up = _activation(call) | _row_launch(strategy.up) | tile
    kernels.launch_grouped_up(call.x, call.up, call.up_bias, h, pairs, call.top_k, **up)
    y = call.x.new_empty(call.index.numel(), call.x.shape[1])
    kernels.launch_grouped_down(h, call.down, y, pairs, **_row_launch(strategy.down), **tile)
    own = y.unflatten(0, call.index.shape)[:, -1] if call.shared else None
    _combine(call, y, own, dependent=False)


def _launch(product: GemmConfig) -> dict[str, Any]:
    return asdict(product)


def _row_launch(product: GemmConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(product).items() if name != "ahead"}
