"""prefetch_weights: the routing of a layer prefetches the weight of the linear behind its experts; near-misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchweave.compiler.passes.aten.prefetch_weights import PrefetchWeights
from torchweave.compiler.passes.manager import run_pass
from torchweave.compiler.passes.testing import T, check, graph_of

PASS = PrefetchWeights(devices=("cpu",))
WIDTH = 1024


def layer(logits: Tensor, x: Tensor, weight: Tensor, *others: Tensor) -> Any:
    weights, index = torch.ops.torchweave.route(logits, None, 2, "softmax", torch.float32)
    return torch.ops.torchweave.linear(x * weights.sum(), weight), index


def computed(logits: Tensor, x: Tensor, weight: Tensor) -> Any:
    return layer(logits, x, weight * 2)


def before(logits: Tensor, x: Tensor, weight: Tensor) -> Any:
    y = torch.ops.torchweave.linear(x, weight)
    return y, torch.ops.torchweave.route(logits, None, 2, "softmax", torch.float32)


def arguments(rows: int = WIDTH) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(T, 8), torch.randn(T, WIDTH), torch.randn(rows, WIDTH)]


def test_prefetch_weights_names_the_next_weight() -> None:
    check(PASS, layer, arguments(), matches=1)
    graph = graph_of(layer, arguments())
    run_pass(PASS, graph)
    (route,) = graph.graph.find_nodes(op="call_function", target=torch.ops.torchweave.route.default)
    (linear,) = graph.graph.find_nodes(op="call_function", target=torch.ops.torchweave.linear.default)
    assert route.kwargs["prefetch"] is linear.args[1]


@pytest.mark.parametrize(("function", "rows"), [(layer, 64), (computed, WIDTH), (before, WIDTH)])
def test_prefetch_weights_leaves_others_alone(function: Any, rows: int) -> None:
    result = run_pass(PASS, graph_of(function, arguments(rows)))
    assert result.matches == 0 and any("no linear of a large parameter" in miss.why for miss in result.near_misses)
