"""Cached fake values have the geometry and the aliases of the operation's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.canonical import canonical
from tests.compiler.toy import DYNAMIC, example, toy
from torchweave.compiler.cache.entries import deserialize_graph, serialize_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.ir.fake_tensors import FakeOpCache, geometry
from torchweave.compiler.ir.graph import CapturedGraph, run_fake
from torchweave.compiler.ir.mutation import storage_id
from torchweave.compiler.ir.symbols import value

MODE: Any = "backed_size_oblivious"


@pytest.fixture(scope="module")
def graph() -> CapturedGraph:
    return capture(toy(layers=2), example(), DYNAMIC, MODE)


def _where(thing: Tensor) -> int:
    return thing.untyped_storage()._cdata


def test_rerun_operation_gives_the_same_geometry_and_aliases(graph: CapturedGraph) -> None:
    fake_ops, seen = FakeOpCache(graph.fake_mode, graph.enable_fake_mode), 0
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "call_method") or not isinstance(value(node), Tensor):
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
        target: Any = str(node.target) if node.op == "call_method" else node.target
        with graph.enable_fake_mode():
            plain = run_fake(node, {})
        for again in (fake_ops.run(target, args, kwargs), fake_ops.run(target, args, kwargs)):
            seen += 1
            assert geometry(again) == geometry(plain) == geometry(value(node))
            for argument in node.all_input_nodes:
                if isinstance(value(argument), Tensor):
                    assert (_where(again) == storage_id(argument)) == (_where(plain) == storage_id(argument)), node
            assert again.fake_mode is graph.fake_mode
    assert seen > 40


def test_multiple_results_keep_their_aliases(graph: CapturedGraph) -> None:
    fake_ops = FakeOpCache(graph.fake_mode, graph.enable_fake_mode)
    x = next(value(node) for node in graph.graph.nodes if node.target is torch.nn.functional.linear)
    first = fake_ops.run(torch.split, (x, 16), {"dim": -1})
    again = fake_ops.run(torch.split, (x, 16), {"dim": -1})
    assert [geometry(part) for part in again] == [geometry(part) for part in first]
    assert {_where(part) for part in again} == {_where(x)}, "parts are views of what was split"
    top = [fake_ops.run(torch.topk, (x, 2), {}) for _ in range(2)]
    assert [geometry(part) for part in top[0]] == [geometry(part) for part in top[1]]
    assert len({_where(part) for result in top for part in result}) == 4


def test_in_place_operations_return_their_argument(graph: CapturedGraph) -> None:
    fake_ops = FakeOpCache(graph.fake_mode, graph.enable_fake_mode)
    with graph.enable_fake_mode():
        tensors = [torch.empty(4), torch.empty(4)]
    assert all(fake_ops.run("add_", (tensor, 1), {}) is tensor for tensor in tensors)


def test_operations_with_incomparable_arguments_are_not_cached(graph: CapturedGraph) -> None:
    calls: list[object] = []

    def odd(x: Tensor, thing: object) -> Tensor:
        calls.append(thing)
        return x

    fake_ops = FakeOpCache(graph.fake_mode, graph.enable_fake_mode)
    with graph.enable_fake_mode():
        x = torch.empty(3)
    for _ in range(2):
        fake_ops.run(odd, (x, object()), {})
        fake_ops.run(odd, (x, 1), {})
    assert len(calls) == 3


def test_a_stored_graph_keeps_its_aliases() -> None:
    """Passes depend on them: a graph from the cache must equal the captured graph, including views."""

    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y[:, 1:].add_(1)
            parts = y.split(2, dim=-1)
            return parts[0] + y.view(-1, 4)[:, 2:]

    module = Views()
    for inputs, dynamic, captured in (
        ({"x": torch.zeros(5, 4)}, {"x": {0: "T"}}, module),
        (example(), DYNAMIC, toy(layers=4)),
    ):
        graph = capture(captured, inputs, dynamic, MODE)
        restored = deserialize_graph(serialize_graph(graph), captured, torch.device("cpu"))
        assert canonical(restored) == canonical(graph)
