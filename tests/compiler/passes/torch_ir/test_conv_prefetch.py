"""conv_prefetch: a convolution prefetches the weight of the linear behind it; results stay; near-misses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchweave.compiler import compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.passes.manager import default_passes, run_pass
from torchweave.compiler.passes.torch_ir.conv_prefetch import CONV, ConvPrefetch
from torchweave.compiler.passes.torch_ir.small_linears import SmallLinears
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

PASS, LINEARS = ConvPrefetch(devices=("cpu",)), SmallLinears(devices=("cpu",))
WIDTH = 1024


class Layer(nn.Module):
    """A short convolution between two products; `columns`: of the second."""

    def __init__(self, columns: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.behind = (nn.Linear(WIDTH, each, bias=False, dtype=torch.bfloat16) for each in (WIDTH, columns))
        self.kernel = nn.Parameter(torch.randn(WIDTH, 3).bfloat16())
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        torch.ops.torchweave.causal_conv(y, self.kernel, None, out, 0, "silu")
        return self.behind(out)


def captured(module: nn.Module) -> CapturedGraph:
    graph = capture(module, {"x": torch.zeros(5, WIDTH, dtype=torch.bfloat16)}, {"x": {0: "T"}}, "backed_size_oblivious")
    run_pass(LINEARS, graph)
    return graph


def test_conv_prefetch_names_the_next_weight() -> None:
    graph = captured(Layer())
    result = run_pass(PASS, graph, debug=True)
    assert result.matches == 1 and not result.near_misses
    _, linear = graph.graph.find_nodes(op="call_function", target=torch.ops.torchweave.linear.default)
    op = torch.ops.torchweave.causal_conv
    (conv,) = (node for node in graph.graph.nodes if node.target in (op, op.default))
    assert conv.args[-1] is linear.args[1]
    assert run_pass(PASS, graph).matches == 0, "its own result must not match again"


@pytest.mark.parametrize("columns", [8, 512])
def test_conv_prefetch_leaves_small_weights_alone(columns: int) -> None:
    result = run_pass(PASS, captured(Layer(columns)))
    assert result.matches == 0 and [miss.why for miss in result.near_misses] == ["no linear of a large parameter follows"]


def test_a_step_with_prefetch_has_the_same_results() -> None:
    module, config = Layer(), TorchCompileConfig(enable_inductor=False, compile_cache=False)
    report, x = Report(show=False), torch.randn(7, WIDTH).bfloat16()
    compiled = compile_graph(
        module, {"x": x}, {"x": {0: "T"}}, boundary_ops={CONV}, config=config, report=report, passes=(LINEARS, PASS)
    )
    assert [each["matches"] for each in report.select("pass")] == [2, 1]
    assert compiled(call_op, x).equal(module(x))


def test_it_runs_by_default() -> None:
    assert any(each.name == "conv_prefetch" for each in default_passes())
