"""scale_linears: linears multiply by the constants of their input and output; near-misses; Falcon-H1's layers keep every bit."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweave.compiler import compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.passes.base import PassResult
from torchweave.compiler.passes.manager import default_passes, run_pass
from torchweave.compiler.passes.torch_ir.merge_linears import MergeLinears
from torchweave.compiler.passes.torch_ir.scale_linears import ScaleLinears
from torchweave.compiler.passes.torch_ir.small_linears import SmallLinears
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import DynamicShapes, TorchCompileConfig
from torchweave.models import load
from torchweave.report import Report
from torchweave.verify import zoo

BF16 = torch.bfloat16
K, N = 256, 384
OP = torch.ops.torchweave.linear.default
PASSES = (MergeLinears(), SmallLinears(devices=("cpu",)), ScaleLinears())


class Scaled(nn.Module):
    """A product with a multiplication before or behind it, as `form` says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.one, self.two = (nn.Linear(K, N, bias=False, dtype=BF16) for _ in range(2))
        self.vector = nn.Parameter(torch.rand(1, 1, N).to(BF16))
        self.column = nn.Parameter(torch.rand(1, 1, 1).to(BF16))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        if self.form == "input":
            return self.one(x * 1.25)
        if self.form == "number":
            return self.one(x) * 0.3 + 1
        if self.form == "one":
            return self.one(x * 1.0) * 1.0
        if self.form == "vector":
            return self.one(x) * self.vector
        if self.form == "part":  # the second of two merged products, through a view
            one, two = self.one(x), self.two(x)
            return one.view(1, -1, 4, N // 4) + (two.view(1, -1, 4, N // 4).transpose(1, 2) * 0.3).transpose(1, 2)
        if self.form == "gate":
            return self.one(x) * F.silu(self.two(x) * 0.3)
        if self.form == "input read twice":
            scaled = x * 1.25
            return self.one(scaled) + scaled[..., :1]
        if self.form == "input written":
            x = x.clone()
            scaled = x * 1.25
            x.add_(1)
            return self.one(scaled)
        if self.form == "output read twice":
            y = self.one(x)
            return y * 0.3 + y
        if self.form == "computed":
            return self.one(x) * x[..., :1]
        if self.form == "short vector":
            return self.one(x) * self.vector[0, 0, 0]
        if self.form == "column":
            return self.one(x) * self.column
        if self.form == "computed vector":
            return self.one(x) * (self.vector + 1)
        assert self.form == "widened"
        return self.one(x) * self.vector.float()


def captured(form: str, mode: DynamicShapes = "backed_size_oblivious") -> tuple[CapturedGraph, PassResult]:
    graph = capture(Scaled(form), {"x": torch.zeros(5, K, dtype=BF16)}, {"x": {0: "T"}}, mode)
    run_pass(PASSES[0], graph)
    run_pass(PASSES[1], graph)
    return graph, run_pass(PASSES[2], graph, debug=True)


def scaling(graph: CapturedGraph) -> tuple[Any, ...]:
    (node,) = (node for node in graph.graph.nodes if node.target is OP)
    return tuple(each.name if isinstance(each, torch.fx.Node) else each for each in node.args[4:])


@pytest.mark.parametrize("mode", ["backed", "backed_size_oblivious", "unbacked"])
@pytest.mark.parametrize(
    ("form", "arguments", "products"),
    [
        ("input", (1.25, None, 1.0), 0),
        ("number", (1.0, None, 0.3), 0),
        ("one", (), 0),
        ("vector", (1.0, "view", 1.0), 0),
        ("part", (1.0, None, 0.3, N, 2 * N), 0),
        ("gate", (1.0, None, 0.3, 0, N), 1),
    ],
)
def test_it_fires_once(form: str, arguments: tuple[Any, ...], products: int, mode: DynamicShapes) -> None:
    graph, result = captured(form, mode)
    assert result.matches >= 1 and not result.near_misses
    assert scaling(graph) == arguments
    assert len(graph.graph.find_nodes(op="call_function", target=operator.mul)) == products
    assert run_pass(PASSES[2], graph).matches == 0, "its own result must not match again"


@pytest.mark.parametrize("form", ["input", "number", "one", "vector", "part", "gate"])
def test_it_keeps_every_bit(form: str) -> None:
    module, config = Scaled(form), TorchCompileConfig(enable_inductor=False, compile_cache=False)
    expected = [module(torch.ones(tokens, K, dtype=BF16)) for tokens in (1, 7)]
    compiled = compile_graph(
        module, {"x": torch.zeros(5, K, dtype=BF16)}, {"x": {0: "T"}}, boundary_ops=frozenset(), config=config,
        report=Report(show=False), passes=PASSES,
    )  # fmt: skip
    for tokens, result in zip((1, 7), expected, strict=True):
        assert compiled(call_op, torch.ones(tokens, K, dtype=BF16)).equal(result)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("input read twice", ""),
        ("input written", ""),
        ("output read twice", ""),
        ("computed", ""),
        ("computed vector", ""),
        ("short vector", ""),
        ("column", "one for each column"),
        ("widened", ""),
    ],
)
def test_near_misses(form: str, why: str) -> None:
    graph, result = captured(form)
    assert result.matches == 0 and scaling(graph) == ()
    assert all(why in miss.why for miss in result.near_misses) and bool(result.near_misses) >= bool(why)


def test_nothing_stands_between_the_products_of_falcon_h1() -> None:
    """Every multiplication, gate and addition of a layer is in a product or the scan; the results keep every bit."""
    small = {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 8,
        "mamba_d_head": 128,
    }
    sizes = small | {"num_attention_heads": 8, "head_dim": 128, "num_hidden_layers": 2}
    config = zoo.zoo_model("falcon_h1").config().to_dict() | sizes
    module = load(config, BF16, load_format="dummy").module
    names = {"input_ids": {0: "T"}, "positions": {0: "T"}, "logits_index": {0: "N"}}
    steps = {
        tokens: (torch.arange(tokens) + 5, torch.arange(tokens), torch.tensor([tokens - 1])) for tokens in (1, 7, 40)
    }
    expected = {tokens: module(*given) for tokens, given in steps.items()}
    report, texts = Report(show=False), {}
    report.keep(lambda name, text: texts.setdefault(name, text))
    passes = [each for each in default_passes() if each.name != "expand"]
    for each in passes:
        if hasattr(each, "devices"):
            each.devices = frozenset({"cpu"})
    ops = frozenset(f"torchweave::{name}" for name in ("attention", "causal_conv", "ssd"))
    compiled = compile_graph(
        module, dict(zip(names, steps[7], strict=True)), names, boundary_ops=ops, report=report, passes=passes,
        config=TorchCompileConfig(enable_inductor=False, compile_cache=False),
    )  # fmt: skip
    for tokens, given in steps.items():
        assert compiled(call_op, *given).equal(expected[tokens]), tokens
    layer = [
        text for name, text in texts.items() if name.endswith("fused_linears/after.py") and "embedding" not in text
    ]
    assert layer and not any(f"aten.{name}" in text for text in layer for name in ("mul.", "add.", "silu", "exp."))
