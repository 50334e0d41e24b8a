"""gated_activation: merged halves, two tensors, five activations, near-misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compiler.passes.written import BF16
from torchweave.compiler.passes.aten.gated_activation import FUSION
from torchweave.compiler.passes.manager import run_pass
from torchweave.compiler.passes.testing import T, check, graph_of
from torchweave.ops.activation import ACTIVATIONS

X = [torch.randn(1, T, 64).to(BF16)]
XY = [torch.randn(1, T, 32), torch.randn(1, T, 32)]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activation_fires_once_on_a_merged_product(name: str) -> None:
    def by_split(x: Tensor) -> Tensor:
        gate, up = x.split([32, 32], dim=-1)
        return ACTIVATIONS[name](gate) * up

    def by_chunk(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return up * ACTIVATIONS[name](gate)

    assert not check(FUSION, by_split, X, matches=1).near_misses
    check(FUSION, by_chunk, X, matches=1)


def test_gated_activation_takes_two_tensors() -> None:
    check(FUSION, lambda gate, up: up * F.gelu(gate, approximate="tanh"), XY, matches=1)
    graph = graph_of(lambda gate, up: F.silu(gate) * up, XY)
    run_pass(FUSION, graph)
    (node,) = (node for node in graph.graph.nodes if "torchweave" in str(node.target))
    assert node.target is torch.ops.torchweave.gated_activation_pair.default and node.args[2] == "silu"


def swapped(x: Tensor) -> Tensor:
    up, gate = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def uneven(x: Tensor) -> Tensor:
    gate, up, _ = x.split([24, 24, 16], dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("function", [swapped, uneven])
def test_gated_activation_reads_other_parts_as_two_tensors(function: Any) -> None:
    graph = graph_of(function, X)
    assert run_pass(FUSION, graph).matches == 1
    assert any(node.target is torch.ops.torchweave.gated_activation_pair.default for node in graph.graph.nodes)
    check(FUSION, function, X, matches=1)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, y: F.silu(x[..., :1]) * y, "broadcasts"),
        (lambda x, y: F.silu(x) * y.double(), "widens"),
        (lambda x, y: ((a := F.silu(x)) * y, a + 1), "silu is also read by"),
    ],
)
def test_gated_activation_names_near_misses(function: Any, why: str) -> None:
    check(FUSION, function, XY, near_miss=why)


def test_unsupported_activation_is_left_alone() -> None:
    check(FUSION, lambda x, y: F.mish(x) * y, XY, matches=0)
