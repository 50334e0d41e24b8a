"""Tiles of rows by format and sizes: which are chosen, that they add up in the interpreter, and that they build without spills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.interpreted import run_interpreted
from tests.ops.moe.experts_cases import call_of, cases, expected
from tests.ops.moe.test_quantized_experts import PACKED, packed
from torchweave.models.weights.int_linear import quantize_int_weight
from torchweave.ops.kernels.moe.packing import PLAIN, Packing
from torchweave.ops.moe.experts import ExpertForm, ExpertsCall
from torchweave.ops.moe.fused_experts import WORD_FORMATS, Rows, choose, run, weight_format

BF16 = torch.bfloat16
QWEN3_30B, GPT_OSS, QWEN3_235B, SHORT = (2048, 768, 8), (2880, 2880, 4), (4096, 1536, 8), (2048, 512, 8)
"""K, I and experts of a token."""
Tile = tuple[int, int, int, int]
CHOSEN: list[tuple[str | None, tuple[int, int, int], Tile, Tile]] = [
    (None, QWEN3_30B, (1, 2048, 4, 1), (2, 128, 4, 2)),
    (None, SHORT, (1, 2048, 4, 1), (2, 128, 2, 3)),
    (None, QWEN3_235B, (2, 2048, 4, 1), (2, 128, 4, 3)),
    ("fp8", QWEN3_30B, (2, 2048, 4, 1), (4, 128, 4, 2)),
    ("fp8", SHORT, (2, 2048, 4, 1), (4, 128, 4, 2)),
    ("fp8", QWEN3_235B, (4, 1024, 2, 2), (4, 128, 4, 2)),
    ("fp8_per_block", QWEN3_30B, (4, 1024, 4, 2), (4, 128, 4, 2)),
    ("int4", QWEN3_30B, (4, 2048, 1, 1), (4, 4096, 2, 1)),
    ("int4", SHORT, (4, 2048, 1, 1), (4, 4096, 4, 1)),
    ("int4", QWEN3_235B, (2, 1024, 1, 1), (4, 4096, 4, 1)),
    ("mxfp4", GPT_OSS, (2, 1024, 1, 1), (4, 2048, 2, 1)),
    ("mxfp4", SHORT, (4, 2048, 2, 1), (4, 2048, 2, 1)),
    ("nvfp4", QWEN3_30B, (4, 2048, 2, 1), (4, 4096, 4, 1)),
    ("nvfp4", GPT_OSS, (2, 1024, 1, 1), (4, 4096, 4, 1)),
]


def rows_of(tokens: int, sizes: tuple[int, int, int], weights: str | None) -> Rows:
    width, inner, top = sizes
    strategy = choose(tokens, top, (128, width, inner), BF16, weights=weights)
    assert isinstance(strategy, Rows)
    return strategy


def tiles_of(strategy: Rows) -> tuple[Tile, Tile]:
    up, down = ((each.block_n, each.block_k, each.num_warps, each.depth) for each in (strategy.up, strategy.down))
    return up, down


@pytest.mark.parametrize(("weights", "sizes", "up", "down"), CHOSEN)
def test_tiles_by_format_and_sizes(weights: str | None, sizes: tuple[int, int, int], up: Tile, down: Tile) -> None:
    for tokens in (1, 2):
        assert tiles_of(rows_of(tokens, sizes, weights)) == (up, down)


def test_three_tokens_in_integers_keep_four_warps() -> None:
    assert rows_of(3, QWEN3_30B, "int4").down.num_warps == rows_of(4, QWEN3_30B, "int4").down.num_warps == 4
    assert rows_of(4, GPT_OSS, "mxfp4") == rows_of(1, GPT_OSS, "mxfp4")


def weight(rows: int, width: int, weights: str | None) -> tuple[Tensor, Tensor | None, Packing]:
    """A weight of two experts without values, its scales, and what it has beside."""
    if weights is None:
        return torch.empty(2, rows, width, dtype=BF16), None, PLAIN
    if weights.startswith("fp8"):
        blocks = (rows // 128, width // 128) if weights == "fp8_per_block" else (rows, 1)
        return torch.empty(2, rows, width, dtype=torch.float8_e4m3fn), torch.empty(2, *blocks), PLAIN
    made = quantize_int_weight(torch.ones(1, width, dtype=BF16), PACKED[weights])
    row_scale = None if made.row_scale is None else torch.empty(2, rows)
    packed, scale = (each.new_empty(2, rows, each.shape[1]) for each in (made.w, made.scale))
    return packed, scale, Packing(None, row_scale, made.group)


def call_without_values(sizes: tuple[int, int, int], weights: str | None) -> ExpertsCall:
    width, inner, top = sizes
    up, up_scale, up_packing = weight(2 * inner, width, weights)
    down, down_scale, down_packing = weight(width, inner, weights)
    biased = sizes == GPT_OSS
    form = ExpertForm(interleaved=True, alpha=1.702, limit=7.0) if biased else ExpertForm()
    biases = (torch.empty(2, 2 * inner, dtype=BF16), torch.empty(2, width, dtype=BF16)) if biased else (None, None)
    x, index, share = torch.empty(1, width, dtype=BF16), torch.zeros(1, top, dtype=torch.int64), torch.empty(1, top)
    return ExpertsCall(
        x, index, share, up, down, *biases, torch.empty_like(x), form, up_scale, down_scale, up_packing, down_packing, residual=x
    )  # fmt: skip


@pytest.mark.parametrize(("weights", "sizes", "up", "down"), CHOSEN)
def test_tiles_build_for_hopper_without_spills(
    weights: str | None, sizes: tuple[int, int, int], up: Tile, down: Tile, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded, spilled_bytes
    from torchweave.ops.kernels.moe import experts_gemv

    call = call_without_values(sizes, weights)
    assert weight_format(call) == weights
    names = (f"{name}_{side}_kernel" for name in ("rows", "words") for side in ("up", "down"))
    with recorded(experts_gemv, *names) as launches:
        run(call, rows_of(1, sizes, weights))
    assert [launch.kwargs["num_warps"] for launch in launches] == [up[2], down[2]]
    for launch in launches:
        in_words = {"ASSEMBLY": True} if call.up.dtype == torch.int32 else {}
        compiled = compile_for_hopper(replace(launch, kwargs=launch.kwargs | in_words))
        assert spilled_bytes(compiled, tmp_path) == 0, (launch.kernel.fn.__name__, launch.kwargs)


INTERPRETED = [
    (None, QWEN3_30B),
    ("fp8", QWEN3_30B),
    ("fp8", QWEN3_235B),
    ("int4", QWEN3_30B),
    ("int4", QWEN3_235B),
    ("mxfp4", GPT_OSS),
]


def check() -> None:
    """Tiles of a part of the inputs, as the interpreter takes 10 to 100 ms a program; rows are longer and no multiple of them."""
    for weights, sizes in INTERPRETED:
        words = weights in WORD_FORMATS
        shape: dict[str, Any] = (
            {"width": 136, "inner": 16, "top": 3} if words else {"width": 136, "inner": 40, "top": 2}
        )
        least = 128 if words else 16
        if sizes == GPT_OSS:
            shape |= {"biased": True, "interleaved": True}
        case = cases(1, **shape, residual=True)
        case["index"][0, 0] = 77  # an expert of another rank
        call, plain = packed(case, weights) if weights else (call_of(case), call_of(case))
        rows = rows_of(2, sizes, weights)
        up = replace(rows.up, block_k=max(rows.up.block_k // 16, least))
        down = replace(rows.down, block_k=max(rows.down.block_k // 16, least))
        out = torch.full_like(call.out, torch.nan)
        run(replace(call, out=out), Rows(up, down))
        torch.testing.assert_close(out.double(), expected(plain), rtol=1e-4, atol=1e-4)


def test_tiles_in_the_interpreter() -> None:
    run_interpreted("tests.ops.moe.test_row_tiles")


if __name__ == "__main__":
    check()
