"""Routed experts on a GPU: every strategy against float64, in CUDA graphs, bitwise repeatable, with bounded memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.ops.moe.experts_cases import FORMS, call_of, cases, expected
from torchweave.ops.moe.experts import ExpertsCall
from torchweave.ops.moe.fused_experts import (
    WORKSPACE_BYTES,
    GemmConfig,
    Grouped,
    Rows,
    Strategy,
    Tiles,
    bytes_per_pair,
    choose,
    run,
)

pytestmark = pytest.mark.gpu

ROWS = [
    Rows(GemmConfig(4, 256, 4, 2), GemmConfig(2, 64, 4, 2)),
    Rows(GemmConfig(2, 128, 4, 1), GemmConfig(4, 128, 4, 1), dependent=True),
]
TILES = [
    Tiles(GemmConfig(32, 64, 4, 4), GemmConfig(64, 64, 4, 3)),
    Tiles(GemmConfig(16, 128, 4, 3), GemmConfig(32, 64, 4, 4), dependent=True),
    Tiles(GemmConfig(64, 64, 8, 3), GemmConfig(128, 64, 8, 3), block_m=64),
]
SIZES = {"num_experts": 16, "width": 256, "inner": 192, "top": 4}


def moved(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in case.items()}


def strategies(call: ExpertsCall) -> list[Strategy]:
    few = ROWS if call.num_tokens <= 2 and not call.form.transposed else []
    early = [replace(each, up=replace(each.up, block_k=256), early=True) for each in few if call.shared]
    return [*few, *early, *TILES, Grouped()]


def close(got: torch.Tensor, right: torch.Tensor) -> None:
    """Hidden columns and the result are rounded: a few units of the last place of the largest term."""
    error = (got.double() - right).abs().max() / right.abs().max()
    assert error < 4 * torch.finfo(got.dtype).eps, float(error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "form", [form for name, form in FORMS.items() if name != "odd"], ids=[n for n in FORMS if n != "odd"]
)
def test_every_strategy_equals_float64(form: dict[str, Any], dtype: torch.dtype) -> None:
    for tokens in (1, 2, 7, 64, 300):
        call = call_of(moved(cases(tokens, dtype=dtype, **form, **SIZES)))
        right = expected(call)
        for strategy in strategies(call):
            call.out.fill_(torch.nan)
            run(call, strategy)
            close(call.out, right)


def test_qwen3_30b_shape() -> None:
    shape = {"num_experts": 128, "width": 2048, "inner": 768, "top": 8}
    for tokens in (1, 2, 8, 33, 130):
        call = call_of(moved(cases(tokens, dtype=torch.bfloat16, **shape)))
        run(call)
        got, right = call.out.clone(), expected(call)
        close(got, right)
        run(call)
        assert call.out.equal(got), "the same call gives the same bits"


def test_sizes_that_are_not_tile_multiples() -> None:
    for tokens in (1, 9):
        call = call_of(moved(cases(tokens, dtype=torch.bfloat16, num_experts=5, width=264, inner=200, top=3)))
        right = expected(call)
        for strategy in strategies(call):
            run(call, strategy)
            close(call.out, right)


@pytest.mark.parametrize("tokens", [1, 2, 48, 600])
def test_cuda_graph_replays_with_changed_routing(tokens: int) -> None:
    """One recording, many routings: spread, all at one expert, some on another rank; dependent launches wait for each other."""
    case = moved(cases(tokens, dtype=torch.bfloat16, **SIZES))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.ops.torchweave.experts(*case.values())
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        case["index"].add_(0)  # an ordinary kernel before, and one behind
        out = torch.ops.torchweave.experts(*case.values()).mul(1)
    first = case["index"].clone()
    routings = [first, (first + 5) % 16, torch.zeros_like(first), torch.where(first < 9, first, first + 16)]
    for index in routings * 3:
        case["index"].copy_(index)
        case["x"].copy_(torch.randn_like(case["x"]))
        graph.replay()
        close(out, expected(call_of(case)))


def test_programmatic_dependent_launches_in_a_graph() -> None:
    """Each layer reads the previous one's output: a missing wait would read stale values."""
    form: dict[str, Any] = {"gated": False, "activation": "relu"}  # neither grows nor dies over the layers
    layers = [call_of(moved(cases(1, dtype=torch.bfloat16, seed=seed, **form, **SIZES))) for seed in range(12)]
    layers = [layers[0], *(replace(layer, x=before.out) for before, layer in pairwise(layers))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in layers:
            run(layer)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for layer in layers:
            run(layer)
    for _ in range(20):
        layers[0].x.copy_(torch.randn_like(layers[0].x))
        graph.replay()
        for layer in layers:
            close(layer.out, expected(layer))


def test_chunking_bounds_the_workspace() -> None:
    call = call_of(moved(cases(2048, dtype=torch.bfloat16, **SIZES)))
    results = []
    for chunks in (1, 4):
        strategy = choose(2048, 4, (16, 256, 192), torch.bfloat16)
        workspace = bytes_per_pair(call, strategy) * call.index.numel() // chunks
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(call, strategy, workspace)
        assert torch.cuda.max_memory_allocated() - before <= workspace + (1 << 20) < WORKSPACE_BYTES
        results.append(call.out.clone())
    close(results[0], expected(call))
    close(results[1], results[0].double())


def test_float32_experts_equal_float64() -> None:
    case = moved(cases(9, **FORMS["gpt_oss"]))
    got = torch.ops.torchweave.experts(*case.values())
    torch.testing.assert_close(got.double(), expected(call_of(case)), rtol=1e-4, atol=1e-4)
