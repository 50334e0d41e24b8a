"""norm_linears: a small linear computes the norm that others read as well; every bit and near-misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchweave.compiler.passes.aten.norm_linears import NormLinears
from torchweave.compiler.passes.manager import run_pass
from torchweave.compiler.passes.testing import T, check, graph_of

PASS = NormLinears(devices=("cpu",))
WIDTH, OUTPUTS = 1024, 256
BF16 = torch.bfloat16
OPS = torch.ops.torchweave
CHOICES = "2=row,2,2048,4,1,1,0"


def arguments(outputs: int = OUTPUTS) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((1, T, WIDTH), (WIDTH,), (outputs, WIDTH))
    return [torch.randn(shape).to(BF16) for shape in shapes]


def viewed(h: Tensor, norm: Tensor, weight: Tensor) -> Any:
    n = OPS.rms_norm(h, norm, 1e-6).view(-1, WIDTH)
    return OPS.linear(n, weight, None, CHOICES), n * 2


def plain(h: Tensor, norm: Tensor, weight: Tensor) -> Any:
    n = OPS.rms_norm(h, norm, 1e-6, 1.0, True)
    return n + 1, OPS.linear(n, weight, None, CHOICES)


@pytest.mark.parametrize("function", [viewed, plain])
def test_norm_linears_fires_once_and_keeps_every_bit(function: Any) -> None:
    check(PASS, function, arguments(), matches=1)
    graph = graph_of(function, arguments())
    run_pass(PASS, graph)
    targets = [node.target for node in graph.graph.nodes]
    assert OPS.norm_linear.default in targets and OPS.rms_norm.default not in targets


def computed(h: Tensor, norm: Tensor, weight: Tensor) -> Any:
    return viewed(h, norm, weight * 2)


def without_weight(h: Tensor, norm: Tensor, weight: Tensor) -> Any:
    n = OPS.rms_norm(h, None, 1e-6)
    return OPS.linear(n, weight, None, CHOICES), n * 2


def no_kernel(h: Tensor, norm: Tensor, weight: Tensor) -> Any:
    n = OPS.rms_norm(h, norm, 1e-6)
    return OPS.linear(n, weight), n * 2


@pytest.mark.parametrize(
    ("function", "outputs", "why"),
    [
        (viewed, 1024, "or is large"),
        (computed, OUTPUTS, "its weight or bias is computed"),
        (no_kernel, OUTPUTS, "has no kernel"),
        (without_weight, OUTPUTS, "its norm has no weight"),
    ],
)
def test_norm_linears_leaves_others_alone(function: Any, outputs: int, why: str) -> None:
    result = run_pass(PASS, graph_of(function, arguments(outputs)))
    assert result.matches == 0 and any(why in miss.why for miss in result.near_misses), result
