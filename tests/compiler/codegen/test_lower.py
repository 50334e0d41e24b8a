"""Lowering: bitwise equal results, composite ops kept, symbolic sizes, functional writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.toy import BOUNDARY, DYNAMIC, SIZES, attention, example, step, toy
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.codegen.lower import LoweringError, lower
from torchweave.compiler.codegen.pieces import build_fx, build_inductor
from torchweave.compiler.eager_semantics.size_answers import dynamic_shapes_mode
from torchweave.compiler.ir.graph import CapturedGraph, run_fake, same_geometry
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import Piece, split
from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import DynamicShapes, TorchCompileConfig
from torchweave.report import Report


def pieces_of(module: nn.Module, mode: DynamicShapes = "backed_size_oblivious") -> tuple[CapturedGraph, list[Any]]:
    graph = capture(module, example(), DYNAMIC, mode)
    graph.boundary_ops = BOUNDARY
    return graph, split(graph)


def only_piece(module: nn.Module, *shape: int) -> Piece:
    graph = capture(module, {"x": torch.zeros(*shape)}, {"x": {0: "T"}}, "backed_size_oblivious")
    (piece,) = (part for part in split(graph) if isinstance(part, Piece))
    return piece


def ops(piece: Piece) -> list[str]:
    return [str(node.target) for node in piece.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("mode", ["backed", "unbacked", "backed_size_oblivious"])
def test_lowered_model_is_bitwise_equal(mode: DynamicShapes) -> None:
    module = toy(bias=True)
    graph, parts = pieces_of(module, mode)
    built = {}
    for part in parts:
        if isinstance(part, Piece) and part.digest not in built:
            with dynamic_shapes_mode(mode):
                lowered = lower(part)
            built[part.digest] = build_fx(lowered)
            assert "aten.linear.default" in ops(lowered), "composite ops stay whole"
            assert all(str(node.target).startswith(("aten.", "toy.", "<built-in")) for node in lowered.graph.nodes
                       if node.op == "call_function")  # fmt: skip
            assert lowered.num_calls() <= part.num_calls()
            assert (lowered.inputs, lowered.constants, lowered.digest) == (part.inputs, part.constants, part.digest)
    assert built
    compiled_graph = CompiledGraph(graph, parts, built, (1, 512, ""), Report(show=False))
    for size in SIZES:
        assert torch.equal(compiled_graph(call_op, *step(*size)), module(*step(*size)))


def test_fake_values_of_a_write_to_a_part_are_those_of_its_operations() -> None:
    class Fills(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y[:, 2:].copy_(x[:, :2])
            return y

    lowered = lower(only_piece(Fills(), 3, 4))
    with lowered.enable_fake_mode():
        for node in (node for node in lowered.graph.nodes if node.op == "call_function"):
            assert same_geometry(run_fake(node, {}), value(node)), node.name


def test_inductor_compiles_lowered_pieces() -> None:
    _, parts = pieces_of(toy())
    piece = next(part for part in parts if isinstance(part, Piece) and part.index == 1)
    lowered = lower(piece)
    built = build_inductor(lowered, TorchCompileConfig())
    inputs = [
        torch.randn([7 if isinstance(size, torch.SymInt) else size for size in each.shape]) for each in piece.examples()
    ]
    with torch.no_grad():
        want, got = build_fx(piece).call(list(inputs)), built.call(list(inputs))
    for one, other in zip(want[:-1], got[:-1], strict=True):  # the last is uninitialized: attention's output
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_sizes_have_one_node_and_one_check_each() -> None:
    class Sizes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.float().reshape(x.shape[0], 2, -1) + x.view(x.shape[0], 2, 4)
            return y.reshape(2 * x.shape[0], 4) + torch.arange(2 * x.shape[0], device=x.device)[:, None]

    piece = only_piece(Sizes(), 5, 8)
    lowered = lower(piece)
    sizes = [str(value(node)) for node in lowered.graph.nodes if isinstance(value(node), torch.SymInt)]
    assert len(sizes) == len(set(sizes)) and not any("assert" in name for name in ops(lowered))
    for tokens in (1, 2, 7, 64):
        inputs = [torch.randn(tokens, 8) if isinstance(value(node), Tensor) else tokens for node in piece.inputs]
        assert torch.equal(build_fx(lowered).call(list(inputs))[0], build_fx(piece).call(list(inputs))[0])


def test_a_custom_op_that_writes_becomes_functional() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = (x * 2)[:, None]
            out = torch.empty_like(q)
            attention(q, q, q, out, 0, 1.0)
            y = F.silu(out[:, 0])
            y += 1
            return y

    lowered = lower(only_piece(Writes(), 5, 8))
    assert sum("auto_functionalized_v2" in name for name in ops(lowered)) == 1
    assert not any(name.endswith("_.Tensor") for name in ops(lowered)), "no in-place op is left"
    x = torch.randn(7, 8)
    assert torch.equal(build_fx(lowered).call([x])[0], Writes()(x))


class WritesInput(nn.Module):
    def __init__(self, returns_view: bool) -> None:
        super().__init__()
        self.returns_view = returns_view

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        q = y[:, None]
        out = torch.empty_like(q)
        attention(q, q, q, out, 0, 1.0)
        y.add_(out[:, 0])
        return (y, y[:, :2]) if self.returns_view else (torch.exp(y),)


def test_input_mutation_is_copied_back_or_rejected() -> None:
    """A piece may write to what an earlier one made; not when it can also be seen by another name."""
    for returns_view in (False, True):
        graph = capture(WritesInput(returns_view), {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, "backed_size_oblivious")
        graph.boundary_ops = BOUNDARY
        *_, piece = (part for part in split(graph) if isinstance(part, Piece))
        if returns_view:
            with pytest.raises(LoweringError, match="returns a view of it"):
                lower(piece)
            continue
        values = [
            torch.randn([7 if isinstance(size, torch.SymInt) else size for size in each.shape])
            for each in piece.examples()
        ]
        copies = [each.clone() for each in values]
        want, got = build_fx(piece).call(list(values)), build_fx(lower(piece)).call(list(copies))
        assert torch.equal(want[0], got[0]) and all(map(torch.equal, values, copies))
