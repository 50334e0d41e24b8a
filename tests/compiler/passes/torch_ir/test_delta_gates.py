"""delta_gates: the gated delta rule takes its gates before they are computed, and each key head once; near-misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweave.compiler import compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.passes.manager import default_passes, run_pass
from torchweave.compiler.passes.torch_ir.delta_gates import DeltaGates
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import DynamicShapes, TorchCompileConfig
from torchweave.report import Report

PASS = DeltaGates()
OP = torch.ops.torchweave.gated_delta
HEADS, VALUE_HEADS, DIM = 2, 4, 16


class Layer(nn.Module):
    """A mixer as Qwen 3-Next writes it. `form`: what differs; `repeat`: key heads are repeated for each value head first."""

    def __init__(self, form: str = "", repeat: bool = True, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.repeat = form, repeat
        self.sizes = [HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM, VALUE_HEADS, VALUE_HEADS]
        self.product = nn.Linear(32, sum(self.sizes), bias=False, dtype=dtype)
        self.A_log, self.dt_bias = (nn.Parameter(torch.randn(VALUE_HEADS).to(dtype)) for _ in range(2))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, a, b = self.product(x[None]).split(self.sizes, -1)
        q, k, v = (each.unflatten(-1, (-1, DIM)) for each in (q, k, v))
        if self.repeat:
            q, k = (each.repeat_interleave(VALUE_HEADS // HEADS, dim=2) for each in (q, k))
        beta = b.sigmoid() * 2 if self.form == "scaled" else b.sigmoid()
        bias = self.dt_bias[:1] if self.form == "one bias" else self.dt_bias
        g = -self.A_log.float().exp() * F.softplus(a.float() + bias)
        out = torch.empty(v.shape[1:], dtype=v.dtype, device=v.device)
        OP(q[0], k[0], v[0], g[0], beta[0], out, 0, True)
        return out.flatten(1) + g[0].sum(-1, keepdim=True) if self.form == "g is read" else out.flatten(1)


def captured(
    module: nn.Module, mode: DynamicShapes = "backed_size_oblivious", dtype: Any = torch.bfloat16
) -> CapturedGraph:
    return capture(module, {"x": torch.zeros(5, 32, dtype=dtype)}, {"x": {0: "T"}}, mode)


def arguments(graph: CapturedGraph) -> tuple[Any, ...]:
    (node,) = (node for node in graph.graph.nodes if node.target in (OP, OP.default))
    return tuple(node.args)


@pytest.mark.parametrize("mode", ["backed", "backed_size_oblivious", "unbacked"])
@pytest.mark.parametrize("repeat", [False, True])
def test_delta_gates_fires_once(repeat: bool, mode: DynamicShapes) -> None:
    graph = captured(Layer(repeat=repeat), mode)
    result = run_pass(PASS, graph, debug=True)
    assert result.matches == 1 and not result.near_misses
    q, k, _, a, b, *_, A_log, dt_bias = arguments(graph)
    assert q.meta["example_value"].shape[1] == k.meta["example_value"].shape[1] == HEADS
    assert {each.meta["example_value"].dtype for each in (a, b, A_log, dt_bias)} == {torch.bfloat16}
    assert not graph.graph.find_nodes(op="call_method", target="repeat_interleave")
    assert run_pass(PASS, graph).matches == 0, "its own result must not match again"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("repeat", [False, True])
def test_delta_gates_keeps_every_bit(repeat: bool, dtype: torch.dtype) -> None:
    module, config = Layer(repeat=repeat, dtype=dtype), TorchCompileConfig(enable_inductor=False, compile_cache=False)
    report = Report(show=False)
    compiled = compile_graph(
        module, {"x": torch.zeros(5, 32, dtype=dtype)}, {"x": {0: "T"}}, boundary_ops={"torchweave::gated_delta"}, config=config,
        report=report, passes=(PASS,),
    )  # fmt: skip
    assert report.select("pass")[0]["matches"] == 1
    for tokens in (1, 2, 7, 64):
        x = torch.randn(tokens, 32).to(dtype)
        assert compiled(call_op, x).equal(module(x))


def test_gates_of_another_form_stay_and_heads_are_still_read_once() -> None:
    graph = captured(Layer("scaled"))
    result = run_pass(PASS, graph, debug=True)
    assert result.matches == 1 and arguments(graph)[8:] in ((), (None, None))
    assert arguments(graph)[0].meta["example_value"].shape[1] == HEADS


@pytest.mark.parametrize(
    ("form", "why"), [("one bias", "not one number a head"), ("g is read", "g is also read by"), ("scaled", "")]
)
def test_delta_gates_leaves_other_gates_alone(form: str, why: str) -> None:
    graph = captured(Layer(form, repeat=False))
    result = run_pass(PASS, graph, debug=True)
    assert result.matches == 0 and bool(result.near_misses) >= bool(why)
    assert all(why in miss.why for miss in result.near_misses)


def test_it_runs_by_default() -> None:
    assert any(each.name == "delta_gates" for each in default_passes())
