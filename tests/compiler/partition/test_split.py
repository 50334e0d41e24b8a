"""Splitting into pieces: equal layers share one, different layers do not, invariants hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.toy import BOUNDARY, DYNAMIC, SIZES, Toy, attention, example, step, toy
from torchweave.compiler import compile_graph
from torchweave.compiler.errors import InvariantError, TraceError
from torchweave.compiler.partition.split import BoundaryCall, normalize_call
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

FX = TorchCompileConfig(enable_inductor=False)


def test_any_depth_has_three_distinct_pieces() -> None:
    compiled_graph = compile_graph(toy(layers=6), example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX)
    digests = [piece.digest for piece in compiled_graph.pieces]
    assert len(digests) == 7 and len(set(digests)) == 3 and len(set(digests[1:-1])) == 1
    assert compiled_graph.report.select("piece")[1]["shared_by"] == 5


def test_a_layer_that_differs_is_another_piece() -> None:
    module = toy(layers=5)
    module.layers[2].norm_2.forward = lambda x: x * 2.0
    compiled_graph = compile_graph(module, example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX)
    digests = [piece.digest for piece in compiled_graph.pieces]
    assert len(set(digests)) == 4 and digests[1] == digests[2] == digests[4] != digests[3]


def test_derived_sizes_do_not_break_sharing() -> None:
    """An expression over T is computed by whichever piece needs it, and handed to none."""

    class Doubling(Toy):
        def forward(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor) -> Tensor:
            x = self.embed(input_ids)
            twice = 2 * input_ids.shape[0]
            cos = sin = torch.zeros(1)
            for layer in self.layers:
                x = layer(x, cos, sin) + torch.ones(twice, 1)[: x.shape[0]]
            return x[logits_index]

    torch.manual_seed(0)
    module = Doubling(layers=4).eval().requires_grad_(False)
    inputs = {
        "input_ids": example()["input_ids"],
        "positions": example()["positions"],
        "logits_index": torch.zeros(2, dtype=torch.int64),
    }
    compiled_graph = compile_graph(module, inputs, DYNAMIC, boundary_ops=BOUNDARY, config=FX)
    assert len({piece.digest for piece in compiled_graph.pieces[1:-1]}) == 1
    batch = step(9, 4)
    assert torch.equal(compiled_graph(call_op, *batch), module(*batch))


def test_getitem_after_a_boundary_op_moves_before_it() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            parts = torch.split(x * 2, 2, dim=-1)
            q = parts[0][:, None]
            out = torch.empty_like(q)
            attention(q, q, q, out, 0, 1.0)
            return out[:, 0] + parts[1]

    module = Late()
    compiled_graph = compile_graph(module, {"x": torch.zeros(5, 4)}, {"x": {0: "T"}}, boundary_ops=BOUNDARY, config=FX)
    x = torch.randn(11, 4)
    assert torch.equal(compiled_graph(call_op, x), module(x))


class _Alias(nn.Module):
    """The piece behind the attention writes to y, of which z is a view in the middle layer only."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(self.layers):
            y = x * 2
            z = (y if layer == 1 else x * 3).view(-1).view(-1, 2, 4)
            out = torch.empty_like(y)
            attention(y, y, y, out, 0, 1.0)
            y.add_(1)
            x = (y + z * 3 + out).tanh()
        return x


def test_view_of_a_written_input_makes_a_distinct_piece() -> None:
    def last(layers: int) -> str:
        compiled_graph = compile_graph(
            _Alias(layers), {"x": torch.zeros(5, 2, 4)}, {"x": {0: "T"}}, boundary_ops=BOUNDARY, config=FX
        )
        return compiled_graph.pieces[-1].digest

    assert last(1) == last(3) != last(2)


def test_a_piece_that_writes_to_an_input_by_two_names_is_not_built_by_inductor() -> None:
    module, report, config = _Alias(2), Report(show=False), TorchCompileConfig()
    x = {"x": torch.zeros(5, 2, 4)}
    compiled_graph = compile_graph(module, x, {"x": {0: "T"}}, boundary_ops=BOUNDARY, config=config, report=report)
    assert [compiled_graph.built[piece.digest].built for piece in compiled_graph.pieces] == [
        "inductor",
        "inductor",
        "fx",
    ]
    (event,) = report.select("fallback")
    assert "shares its memory with another input" in event["why"]
    given = torch.randn(64, 2, 4)
    torch.testing.assert_close(compiled_graph(call_op, given), module(given))


class _WritesAlone(nn.Module):
    """Its last piece computes nothing that anybody reads, but changes an input."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        out = torch.empty_like(x)
        attention(x, x, x, out, 0, 1.0)
        x.mul_(2)
        return x


class _WritesOnly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.view(-1).add_(1)
        return x


@pytest.mark.parametrize("module", [_WritesAlone(), _WritesOnly()])
@pytest.mark.parametrize("inductor", [False, True])
def test_piece_with_writes_and_no_output_runs(module: nn.Module, inductor: bool) -> None:
    config = TorchCompileConfig(enable_inductor=inductor)
    compiled_graph = compile_graph(
        module, {"x": torch.zeros(5, 1, 4)}, {"x": {0: "T"}}, boundary_ops=BOUNDARY, config=config
    )
    x = torch.randn(7, 1, 4)
    given, wanted = x.clone(), x.clone()
    assert torch.equal(compiled_graph(call_op, given), module(wanted)) and torch.equal(given, wanted)


@torch.library.custom_op("toy::returns", mutates_args=())
def returns(x: Tensor) -> Tensor:
    return x.clone()


@returns.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _refused(module: nn.Module, ops: set[str], dynamic: Any = None) -> str:
    dynamic = {"x": {0: "T"}} if dynamic is None else dynamic
    with pytest.raises((InvariantError, TraceError)) as caught:
        compile_graph(module, {"x": torch.zeros(5, 1, 4)}, dynamic, boundary_ops=ops, config=FX)
    return str(caught.value)


def test_a_boundary_op_with_an_output_is_refused() -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return returns(x * 2) + 1

    message = _refused(Returns(), {"toy::returns"})
    assert "toy::returns has an output" in message and f"{__file__}:" in message


def test_a_boundary_op_that_writes_to_an_input_is_refused() -> None:
    class IntoInput(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            attention(y, y, y, x, 0, 1.0)
            return x + 1

    assert "did not allocate" in _refused(IntoInput(), set(BOUNDARY))


def test_a_size_that_depends_on_data_is_refused() -> None:
    class Selects(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0].sqrt()

    message = _refused(Selects(), set())
    assert "a size that depends on the values of a tensor" in message


def test_a_piece_that_cannot_follow_the_token_count_is_refused() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(3, 1, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.table * 2
            out = torch.empty_like(y)
            attention(y, y, y, out, 0, 1.0)
            return x + out.sum()

    assert "no input with a dynamic size in its shape" in _refused(Constant(), set(BOUNDARY))


def test_a_context_held_across_a_boundary_op_is_refused() -> None:
    class Holds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            with torch.autocast("cpu", enabled=False):
                out = torch.empty_like(y)
                attention(y, y, y, out, 0, 1.0)
                return F.silu(out)

    assert "open across a boundary op" in _refused(Holds(), set(BOUNDARY))


def test_boundary_calls_are_normalized() -> None:
    op = torch.ops.toy.attention.default
    args, kwargs = normalize_call(op, (1, 2, 3), {"layer": 5, "out": 4, "scale": 0.5})
    assert args == (1, 2, 3, 4, 5, 0.5, 0) and kwargs == {}


@torch.library.custom_op("toy::double", mutates_args=("out",))
def double(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


@double.register_fake
def _(x: Tensor, out: Tensor) -> None: ...


class Doubled(Toy):
    """A decoder with an op that writes its result, and a function with two outputs."""

    def forward(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor) -> Tensor:
        logits = super().forward(input_ids, positions, logits_index)
        out = torch.empty_like(logits)
        torch.ops.toy.double(logits, out)
        best, index = torch.topk(out, 3)
        return best + index


@pytest.mark.parametrize("inductor", [False, True])
def test_splitting_ops_change_the_pieces_and_not_the_result(inductor: bool) -> None:
    torch.manual_seed(0)
    module = Doubled(layers=2).eval().requires_grad_(False)
    config = TorchCompileConfig(enable_inductor=inductor, splitting_ops=("aten::silu", "toy::double", "aten::topk"))
    plain, split = (
        compile_graph(module, example(), DYNAMIC, boundary_ops=BOUNDARY, config=each) for each in (FX, config)
    )
    names = [part.op._schema.name if isinstance(part, BoundaryCall) else part.num_calls() for part in split.parts]
    assert names.count("toy::double") == 1 and names.count("toy::attention") == 2
    # A call of silu ends a piece and starts another; what `double` writes is allocated before it; topk with its two outputs
    # is the last piece but one.
    assert len(plain.pieces) == 3 and len(split.pieces) == 3 + 2 * 2 + 1 + 1
    silu, topk = split.pieces[2], split.pieces[-2]
    assert silu.num_calls() == 1 and "silu" in silu.module.code and "topk" in topk.module.code
    assert topk.num_calls() == 3 and len(topk.outputs) == 2
    for sizes in SIZES:
        batch = step(*sizes)
        torch.testing.assert_close(split(call_op, *batch), module(*batch))


def test_a_splitting_op_that_the_graph_does_not_call_is_refused() -> None:
    config = replace(FX, splitting_ops=("aten::sillu",))
    with pytest.raises(ValueError, match=r"splitting_ops names aten::sillu, .*; did you mean aten::silu\?"):
        compile_graph(toy(), example(), DYNAMIC, boundary_ops=BOUNDARY, config=config)
