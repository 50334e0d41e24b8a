"""gated_rms_norm: the gate behind a norm, as layers of the gated delta rule write it; near-misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compiler.passes.written import BF16, llama_norm
from torchweave.compiler.passes.aten import gated_rms_norm, raise_rms_norm
from torchweave.compiler.passes.manager import run_pass
from torchweave.compiler.passes.testing import T, check, graph_of

HEADS, DIM = 4, 16


def arguments(dtype: torch.dtype) -> list[Any]:
    """The layer's output, a projection whose last columns are gates, and the norm's weight."""
    return [torch.randn(1, T, HEADS, DIM).to(dtype), torch.randn(1, T, 96).to(dtype), torch.rand(DIM).to(dtype)]


def layer(x: Tensor, projected: Tensor, weight: Tensor, activation: Any = F.silu, widen: bool = True) -> Tensor:
    gate = projected[..., 32:].unflatten(-1, (HEADS, DIM)).reshape(-1, DIM)
    y = llama_norm(x.reshape(-1, DIM), weight)
    return (y * activation(gate.float() if widen else gate)).to(x.dtype)


def raised(function: Any, given: list[Any]) -> Any:
    graph = graph_of(function, given)
    run_pass(raise_rms_norm.FUSION, graph)
    return graph


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("activation", [F.silu, torch.sigmoid])
def test_gated_rms_norm_fires_once_and_reads_the_projection_in_place(dtype: torch.dtype, activation: Any) -> None:
    graph = raised(lambda x, p, w: layer(x, p, w, activation), arguments(dtype))
    result = run_pass(gated_rms_norm.FUSION, graph)
    assert result.matches == 1 and not result.near_misses
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.torchweave.gated_rms_norm.default)
    assert node.args[-1] == ("silu" if activation is F.silu else "sigmoid")
    assert node.args[1].meta["val"].stride()[-3:] == (96, DIM, 1), "no copy of the gates"
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_gated_rms_norm_keeps_every_bit(dtype: torch.dtype) -> None:
    def norm_op(x: Tensor, projected: Tensor, weight: Tensor) -> Tensor:
        gate = projected[..., 32:].unflatten(-1, (HEADS, DIM)).reshape(-1, DIM)
        y = torch.ops.torchweave.rms_norm(x.reshape(-1, DIM), weight, 1e-6)
        return (y * F.silu(gate.float())).to(x.dtype)

    check(gated_rms_norm.FUSION, norm_op, arguments(dtype), matches=1)


def read_twice(x: Tensor, projected: Tensor, weight: Tensor) -> Tensor:
    gate = projected[..., 32:].unflatten(-1, (HEADS, DIM)).reshape(-1, DIM)
    y = llama_norm(x.reshape(-1, DIM), weight)
    return (y * F.silu(gate.float())).to(x.dtype) + y


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, p, w: layer(x, p, w, widen=False), "its activation is computed in torch.bfloat16"),
        (lambda x, p, w: layer(x, p.float(), w), "and its gate torch.float32"),
        (lambda x, p, w: (llama_norm(x, w) * F.silu(p[..., None, :1].float())).to(x.dtype), "columns"),
        (lambda x, p, w: (llama_norm(x, w) * F.silu(p[..., None, :DIM].float())).to(x.dtype), "broadcasts"),
        (read_twice, "also read by"),
    ],
    ids=["narrow", "float32 gate", "one column", "one gate for all heads", "read twice"],
)
def test_gated_rms_norm_leaves_others_alone(function: Any, why: str) -> None:
    result = run_pass(gated_rms_norm.FUSION, raised(function, arguments(BF16)))
    assert result.matches == 0 and any(why in miss.why for miss in result.near_misses), result
