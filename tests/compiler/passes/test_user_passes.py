"""User passes: named by the config or passed as objects; invalid passes are rejected in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweave
from torchweave.compiler import Fusion, GraphPass, PassResult, compile_graph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import load_pass
from torchweave.compiler.passes.manager import PassManager, aten_cache_keys
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

OWN_PASS = """
import torch
from torch import Tensor
from torchweave.compiler import Fusion

aten = torch.ops.aten

def twice(x: Tensor, a: float, b: float) -> Tensor:
    return aten.mul.Tensor(aten.mul.Tensor(x, a), b)

def once(x: Tensor, a: float, b: float) -> Tensor:
    return x * (a * b)

SCALE_ONCE = Fusion("scale_once", twice, once, numerics="tolerance")
NOT_A_PASS = 3
"""


FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * 4.0 + 1


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_passes.py").write_text(OWN_PASS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_passes", raising=False)
    return "my_passes"


def test_user_pass_named_in_the_config(own_module: str) -> None:
    report = Report(show=False)
    config = TorchCompileConfig(enable_inductor=False, passes=(f"{own_module}:SCALE_ONCE",), pass_numerics="tolerance")
    compiled_graph = compile_graph(Scaled(), {"x": torch.zeros(5)}, {"x": {0: "T"}}, config=config, report=report)
    (event,) = [each for each in report.select("pass") if each["name"] == "scale_once"]
    assert (event["matches"], event["diff"]) == (1, {"aten.mul.Tensor": -1})
    x = torch.randn(7)
    torch.testing.assert_close(compiled_graph(call_op, x), Scaled()(x))


def test_user_pass_given_as_an_argument(own_module: str) -> None:
    report = Report(show=False)
    passes = [*torchweave.compiler.default_passes(), load_pass(f"{own_module}:SCALE_ONCE")]
    config = TorchCompileConfig(enable_inductor=False, compile_cache=False, enabled_passes=("scale_once",))
    compiled = torchweave.compile(Scaled(), {"x": torch.zeros(5)}, {"x": {0: "T"}}, config, report, passes=passes)
    assert [each["matches"] for each in report.select("pass") if each["name"] == "scale_once"] == [1]
    x = torch.randn(7)
    torch.testing.assert_close(compiled(x), Scaled()(x))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("scale_once", "unknown pass"),
        ("no_such_module:X", "cannot be imported"),
        ("my_passes:NOTHING", "module my_passes has no attribute NOTHING"),
        ("my_passes:NOT_A_PASS", "is not a pass, it lacks name, stage"),
        ("torchweave.compiler:Fusion", "cannot be constructed without arguments"),
    ],
)
def test_a_bad_name_is_one_sentence(own_module: str, name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        compile_graph(Scaled(), {"x": torch.zeros(5)}, {"x": {0: "T"}}, config=TorchCompileConfig(passes=(name,)))
    assert str(raised.value).count("\n") == 0 and name in str(raised.value)


class Times(GraphPass):
    """A pass whose setting is private."""

    name, stage = "times", "aten"

    def __init__(self, by: float) -> None:
        self._by = by

    def run(self, graph: Any) -> PassResult:
        found = list(self.calls(graph, torch.ops.aten.mul.Tensor, "self", "other"))
        for node, (x, _) in found:
            node.args = (x, self._by)
        return PassResult(len(found), len(found))


def made(by: float) -> Fusion:
    def scaled(x: Tensor, a: float) -> Tensor:
        return torch.ops.aten.mul.Tensor(x, a)

    return Fusion("made", scaled, lambda x: x * by)


@pytest.mark.parametrize("kind", [Times, made])
def test_pass_settings_change_the_cache_key(kind: Any) -> None:
    assert aten_cache_keys([kind(2.0)]) == aten_cache_keys([kind(2.0)]) != aten_cache_keys([kind(3.0)])


@pytest.mark.parametrize(
    ("fact", "declared", "why"),
    [
        ("stage", "ATen", "stage is 'ATen', not one of torch_ir, aten, inductor"),
        ("numerics", "approximate", "numerics is 'approximate', not one of exact, tolerance"),
        ("builds", ("Inductor",), "builds has 'Inductor', not only inductor, fx"),
        ("token_range", (8, 2), "token_range 8..2 holds no token count"),
        ("token_range", (None, 0), "token_range None..0 holds no token count"),
    ],
)
def test_a_pass_with_an_invalid_fact_is_rejected(fact: str, declared: Any, why: str) -> None:
    each = Times(2.0)
    setattr(each, fact, declared)
    with pytest.raises(ValueError, match=f"^pass times: {why}$"):
        PassManager([each])


class Fails(Times):
    def run(self, graph: Any) -> PassResult:
        raise KeyError("oops")


class Forgets(Times):
    def run(self, graph: Any) -> PassResult:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize("stage", ["torch_ir", "aten"])
@pytest.mark.parametrize(
    ("kind", "why", "cause"),
    [
        (Fails, r"raised KeyError: 'oops' \(.*test_user_passes.py:\d+\)$", KeyError),
        (Forgets, "returned None; `run` must return a PassResult", type(None)),
    ],
)
def test_a_pass_that_raises_or_returns_nothing_is_named(stage: Any, kind: Any, why: str, cause: type) -> None:
    each = kind(2.0)
    each.stage = stage
    with pytest.raises(ValueError, match=f"^pass times {why}") as raised:
        compile_graph(Scaled(), {"x": torch.zeros(5)}, {"x": {0: "T"}}, config=FX, passes=[each])
    assert isinstance(raised.value.__cause__, cause)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.linear(x)) + x
        return y, y.sum(-1)


def _output(graph: Any) -> Any:
    return next(iter(graph.graph.find_nodes(op="output")))


def _drop_an_output(graph: Any) -> None:
    _output(graph).args = (_output(graph).args[0][:1],)


def _swap_outputs(graph: Any) -> None:
    _output(graph).args = (tuple(reversed(_output(graph).args[0])),)


def _no_output(graph: Any) -> None:
    graph.graph.erase_node(_output(graph))


def _other_dtype(graph: Any) -> None:
    last = _output(graph).args[0][-1]
    with graph.graph.inserting_after(last):
        double = graph.graph.call_function(torch.ops.aten._to_copy.default, (last,), {"dtype": torch.float64})
    with graph.enable_fake_mode():
        double.meta = {key: value(last).double() for key in ("val", "example_value")}
    _output(graph).replace_input_with(last, double)


def _add_an_input(graph: Any) -> None:
    first = next(iter(graph.graph.nodes))
    with graph.graph.inserting_before(first):
        graph.graph.placeholder("extra").meta = dict(first.meta)


def _write_to_an_input(graph: Any) -> None:
    call = next(node for node in graph.graph.nodes if node.op.startswith("call"))
    read = call.all_input_nodes[0]
    with graph.graph.inserting_before(call):
        graph.graph.call_function(torch.ops.aten.add_.Tensor, (read, 1)).meta = dict(read.meta)


@pytest.mark.parametrize("stage", ["torch_ir", "aten"])
@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (_drop_an_output, "it returns .* expected"),
        (_swap_outputs, "it returns .* expected"),
        (_no_output, "it returns nothing, expected"),
        (_other_dtype, "it returns .*float64"),
        (_add_an_input, "its inputs are extra|the input extra has no binding"),
        (_write_to_an_input, "it writes to the input .*, unlike"),
    ],
)
def test_a_pass_that_changes_the_interface_of_a_graph_is_named(stage: Any, harm: Any, why: str) -> None:
    class Harm(GraphPass):
        name = "harm"

        def run(self, graph: Any) -> PassResult:
            harm(graph)
            return PassResult(1, 1)

    each = Harm()
    each.stage = stage
    with pytest.raises(RuntimeError, match=f"pass harm left an invalid graph: ({why})"):
        compile_graph(Two(), {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, config=FX, passes=[each])
