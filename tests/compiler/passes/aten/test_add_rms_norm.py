"""add_rms_norm: the fusion across modules; the sum is written only where other operations read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiler.passes.written import BF16
from torchweave.compiler.passes.aten.add_rms_norm import FUSION
from torchweave.compiler.passes.manager import run_pass
from torchweave.compiler.passes.testing import T, check, graph_of
from torchweave.ops.norm import rms_norm

X = [torch.randn(1, T, 48).to(BF16), torch.randn(1, T, 48).to(BF16), torch.randn(48).to(BF16)]


def norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(residual + x, weight, 1e-6, 1.0, True)


def with_sum(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x
    return rms_norm(h, weight, 1e-6), h * 2


def targets(function: Any) -> list[str]:
    graph = graph_of(function, X)
    run_pass(FUSION, graph)
    return [str(node.target) for node in graph.graph.nodes if "torchweave" in str(node.target)]


def test_residual_add_is_fused_and_its_sum_written_only_if_live() -> None:
    check(FUSION, norm_of_sum, X, matches=1)
    check(FUSION, with_sum, X, matches=1)
    assert targets(norm_of_sum) == ["torchweave.rms_norm_of_sum.default"]
    assert targets(with_sum) == ["torchweave.add_rms_norm.default"]


def test_a_chain_of_residuals_is_fused_at_every_link() -> None:
    def chain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = residual + x
        h = h + torch.sin(rms_norm(h, weight, 1e-6))
        return rms_norm(h, weight, 1e-6), h

    check(FUSION, chain, X, matches=2)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, r, w: rms_norm(torch.add(x, r, alpha=2), w, 1e-6), "argument alpha of add is 2, not 1"),
        (lambda x, r, w: rms_norm(x + r[:, :1], w, 1e-6), "broadcasts"),
        (lambda x, r, w: rms_norm(x.float() + r, w.float(), 1e-6), "widens"),
        (lambda x, r, w: rms_norm(x + 1.0, w, 1e-6), "argument other of add is 1.0, not Tensor"),
    ],
)
def test_add_rms_norm_names_near_misses(function: Any, why: str) -> None:
    check(FUSION, function, X, near_miss=why)
