"""Guards on sizes added by compilation are rejected or stored with the piece, so that a warm start applies them too."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Max, Mod, PythonMod

from torchweave.compiler import CompileCache, GraphPass, PassResult, TraceError, compile_graph
from torchweave.compiler.ir.size_ranges import _condition, _is_true
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import Stage
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

DYNAMIC = {"x": {0: "T"}}


class Unbound(nn.Module):
    """Writes to a part of `unbind`, which torch decomposes for a single size only."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        left, right = y.view(-1, 2, 4).unbind(1)
        left += right
        return y * 2


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + x


class OnlyBelow(GraphPass):
    """A pass that adds a guard on the token count, as a rewrite for few tokens might."""

    name: str = "only_below"
    stage: Stage = "aten"

    def run(self, graph: Any) -> PassResult:
        sizes = [value(node).shape[0] for node in graph.graph.nodes if node.op == "placeholder"]
        return PassResult(int(sizes[0] <= 500), 0)


@pytest.mark.parametrize("passes", [None, []])
def test_size_specialized_by_compilation_is_rejected_and_not_stored(tmp_path: Path, passes: Any) -> None:
    """Without passes too, and at a second start: Inductor's own cache does not record that the size was fixed."""
    cache = CompileCache(tmp_path / "cache", Report(show=False))
    line = next(at for at, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "+= right" in text)
    for where in (
        {f"{__file__}:{line - 1}", f"{__file__}:{line}"},
        {""},
    ):  # a graph that is loaded has forgotten its lines
        with pytest.raises(TraceError, match="is valid only for a size of 5") as caught:
            compile_graph(Unbound(), {"x": torch.randn(5, 8)}, DYNAMIC, cache=cache, passes=passes)
        assert caught.value.where in where
    assert {path.parent.name for path in cache.entries()} <= {"graph"}


def test_slice_assignment_runs_without_functionalization() -> None:
    config = TorchCompileConfig(enable_inductor=False)
    compiled_graph = compile_graph(Unbound(), {"x": torch.randn(5, 8)}, DYNAMIC, config=config, passes=[])
    x = torch.randn(3, 8)
    assert torch.equal(compiled_graph._run(None, x), Unbound()(x))


def test_size_limit_found_by_compilation_applies_to_loaded_pieces(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "cache", Report(show=False))
    for built in ("inductor", "cache"):
        compiled_graph = compile_graph(Plain(), {"x": torch.randn(5, 8)}, DYNAMIC, cache=cache, passes=[OnlyBelow()])
        assert compiled_graph.sizes == (1, 500) and [each.built for each in compiled_graph.built.values()] == [built]


def test_conditions_as_python_code_agree_with_sympy() -> None:
    t, n = (sympy.Symbol(name, integer=True, positive=True) for name in ("s27", "s5"))
    other = sympy.Function("unknown")(t)
    guards = [
        sympy.Ne(t, 1),
        4096 * t < 2**31,
        sympy.Eq(PythonMod(t, 8), 0),
        sympy.Eq(Mod(t, FloorDiv(t, 2)), 0),  # divides by zero for 1
        sympy.And(t > 3, sympy.Or(sympy.Eq(t, n), n < 9)),
        sympy.Eq(Max(t, n), n),
        CeilToInt(IntTrueDiv(t, 2)) > n,
        sympy.Eq(other, 3),  # undecided
        sympy.Eq(sympy.Symbol("not an identifier"), t),
    ]
    symbols = {"s27": "T", "s5": "N", "not an identifier": "N"}
    results = set()
    for guard in guards:
        condition = _condition(guard, symbols)
        for sizes in itertools.product((1, 2, 3, 8, 9, 64, 1 << 24), repeat=2):
            by_name = dict(zip(("T", "N"), sizes, strict=True))
            assert condition(by_name) == _is_true(guard, symbols, by_name), (guard, by_name)
            results.add(condition(by_name))
    assert results == {True, False}
