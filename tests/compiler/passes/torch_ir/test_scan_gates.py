"""scan_gates: scans take the logarithm of their decay, and the gate behind them; near-misses."""

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
from torchweave.compiler.passes.torch_ir.scan_gates import ScanGates
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import DynamicShapes, TorchCompileConfig
from torchweave.report import Report

PASS = ScanGates()
OPS = torch.ops.torchweave
BOUNDARY_OPS = {"torchweave::ssd", "torchweave::selective_scan"}
HEADS, DIM, STATE = 2, 16, 8


class Layer(nn.Module):
    """A mixer as Falcon-H1 writes it. `form`: what differs."""

    def __init__(self, form: str = "", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.sizes = [HEADS * DIM, HEADS * DIM, STATE, STATE, HEADS]
        self.product = nn.Linear(32, sum(self.sizes), bias=False, dtype=dtype)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.randn(HEADS).to(dtype)) for _ in range(3))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        gate, x, B, C, dt = self.product(x[None]).split(self.sizes, -1)
        A = -torch.exp(self.A_log) if self.form == "narrow" else -torch.exp(self.A_log.float())
        x, B, C = x.view(1, -1, HEADS, DIM)[0], B.view(1, -1, 1, STATE)[0], C.view(1, -1, 1, STATE)[0]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        OPS.ssd(x, dt[0], A, B, C, self.D, self.dt_bias, out, 0, True, 0.0, float("inf"))
        y = out[None].view(1, gate.shape[1], -1)
        if self.form == "wide gate":
            return y * F.silu(gate.float())
        if self.form == "gate read twice":
            active = F.silu(gate)
            return y * active + active
        if self.form == "late gate":
            return y * F.silu(gate + 1)
        if self.form == "A is read":
            y = y + A.sum().to(y.dtype)
        return y * F.silu(gate)


class Scan(nn.Module):
    """A scan of Mamba, which takes its gate anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.randn(32, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        OPS.selective_scan(x, x, -torch.exp(self.A_log.float()), x[:, :4], x[:, 4:8], None, None, None, out, 0)
        return out + 1


def captured(
    module: nn.Module, mode: DynamicShapes = "backed_size_oblivious", dtype: Any = torch.bfloat16
) -> CapturedGraph:
    return capture(module, {"x": torch.zeros(5, 32, dtype=dtype)}, {"x": {0: "T"}}, mode)


def arguments(graph: CapturedGraph) -> tuple[Any, ...]:
    names = ("ssd", "selective_scan")
    (node,) = (node for node in graph.graph.nodes if any(f".{name}" in str(node.target) for name in names))
    return tuple(node.args)


@pytest.mark.parametrize("mode", ["backed", "backed_size_oblivious", "unbacked"])
def test_decay_and_gate_move_into_the_op(mode: DynamicShapes) -> None:
    graph = captured(Layer(), mode)
    result = run_pass(PASS, graph, debug=True)
    assert result.matches == 2 and not result.near_misses
    given = arguments(graph)
    assert given[2].op == "placeholder" and given[-1] is True
    assert list(given[-2].meta["example_value"].shape[1:]) == [HEADS, DIM]
    assert not graph.graph.find_nodes(op="call_function", target=torch.exp)
    assert run_pass(PASS, graph).matches == 0, "its own result must not match again"


def test_a_scan_of_mamba_takes_its_decay() -> None:
    graph = captured(Scan(), dtype=torch.float32)
    assert run_pass(PASS, graph, debug=True).matches == 1
    assert arguments(graph)[2].op == "placeholder" and arguments(graph)[-1] is True


@pytest.mark.parametrize("module", [Layer(), Layer(dtype=torch.float32), Scan()], ids=["bfloat16", "float32", "scan"])
def test_it_keeps_every_bit(module: nn.Module) -> None:
    dtype, report = next(module.parameters()).dtype, Report(show=False)
    compiled = compile_graph(
        module, {"x": torch.zeros(5, 32, dtype=dtype)}, {"x": {0: "T"}}, boundary_ops=BOUNDARY_OPS, report=report,
        config=TorchCompileConfig(enable_inductor=False, compile_cache=False), passes=(PASS,),
    )  # fmt: skip
    assert report.select("pass")[0]["matches"]
    for tokens in (1, 2, 7, 64):
        x = torch.randn(tokens, 32).to(dtype)
        assert compiled(call_op, x).equal(module(x))


@pytest.mark.parametrize(
    ("form", "matches", "why"),
    [
        ("wide gate", 1, "after the op"),
        ("gate read twice", 1, "is also read by"),
        ("late gate", 1, "computed after the op"),
        ("A is read", 1, ""),
        ("narrow", 1, ""),
    ],
)
def test_near_misses(form: str, matches: int, why: str) -> None:
    graph = captured(Layer(form))
    result = run_pass(PASS, graph, debug=True)
    assert result.matches == matches and bool(result.near_misses) == bool(why)
    assert all(why in miss.why for miss in result.near_misses)


def test_it_runs_by_default() -> None:
    assert any(each.name == "scan_gates" for each in default_passes())
