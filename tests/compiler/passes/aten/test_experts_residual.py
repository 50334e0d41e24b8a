"""experts_residual: the last kernel of routed experts adds the residual; every bit and near-misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.moe.experts_cases import INNER, NUM_EXPERTS, TOP, WIDTH
from torchweave.compiler.passes.aten.experts_residual import ExpertsResidual
from torchweave.compiler.passes.manager import run_pass
from torchweave.compiler.passes.testing import T, check, graph_of

PASS = ExpertsResidual(devices=("cpu",))
BF16 = torch.bfloat16
EXPERTS, QUANTIZED = torch.ops.torchweave.experts, torch.ops.torchweave.quantized_experts


def arguments(dtype: torch.dtype = BF16) -> list[Any]:
    """The residual, the experts' input, their routing and two weights."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    index = torch.arange(T * TOP).reshape(T, TOP) % NUM_EXPERTS
    weights = (random(NUM_EXPERTS, 2 * INNER, WIDTH), random(NUM_EXPERTS, WIDTH, INNER))
    return [random(1, T, WIDTH), random(T, WIDTH), index, random(T, TOP), *weights]


def layer(residual: Tensor, x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return residual + EXPERTS(x, index, weight, up, down, None, None, "silu").view(1, -1, WIDTH)


def quantized(residual: Tensor, x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    fp8 = [each.to(torch.float8_e4m3fn) for each in (up, down)]
    scales = [torch.ones(NUM_EXPERTS, each.shape[1], 1) for each in (up, down)]
    y = QUANTIZED(x, index, weight, fp8[0], scales[0], fp8[1], scales[1], None, None, "silu")
    return y.view(1, -1, WIDTH) + residual


def flat(residual: Tensor, x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + EXPERTS(x, index, weight, up, down, None, None, "silu")


@pytest.mark.parametrize("function", [layer, quantized, flat])
def test_experts_residual_fires_once_and_keeps_every_bit(function: Any) -> None:
    check(PASS, function, arguments(), matches=1)
    graph = graph_of(function, arguments())
    run_pass(PASS, graph)
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)


def twice_itself(residual: Tensor, x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = EXPERTS(x, index, weight, up, down, None, None, "silu")
    return y + y


def two_readers(residual: Tensor, x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Any:
    y = EXPERTS(x, index, weight, up, down, None, None, "silu")
    return residual[0] + y, y * 2


def reduced(residual: Tensor, x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = EXPERTS(x, index, weight, up, down, None, None, "silu")
    return residual[0] + torch.ops.torchweave.all_reduce(y, "tp")


@pytest.mark.parametrize(
    ("function", "changed", "why"),
    [
        (two_readers, {}, "its output has 2 readers"),
        (twice_itself, {}, "the addend is not another tensor"),
        (reduced, {}, "not an add, reads its output"),
        (layer, {0: torch.randn(1, T, WIDTH)}, "another shape, layout or dtype"),
        (layer, {0: torch.randn(WIDTH).to(BF16)}, "another shape, layout or dtype"),
    ],
    ids=["two readers", "itself", "all-reduce", "float32 residual", "broadcast"],
)
def test_experts_residual_leaves_others_alone(function: Any, changed: dict[int, Tensor], why: str) -> None:
    given = [changed.get(place, each) for place, each in enumerate(arguments())]
    result = run_pass(PASS, graph_of(function, given))
    assert result.matches == 0 and any(why in miss.why for miss in result.near_misses), result
