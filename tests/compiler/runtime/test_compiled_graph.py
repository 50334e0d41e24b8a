"""A compiled graph equals its module for every size and refuses inputs it was not compiled for."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.exc import InductorError, LoweringException
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.compiler.toy import BOUNDARY, DYNAMIC, SIZES, example, step, toy
from torchweave.compiler import CompileCache, CompiledGraph, TraceError, compile_graph, eager_forward
from torchweave.compiler.ir.size_ranges import MAX_SIZE
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

DEFAULT = TorchCompileConfig().dynamic_shapes


@functools.cache
def as_fx(mode: Any) -> tuple[nn.Module, CompiledGraph]:
    """The toy model and its graph with FX pieces; a capture takes seconds."""
    config, module = TorchCompileConfig(enable_inductor=False, dynamic_shapes=mode), toy()
    return module, compile_graph(module, example(), DYNAMIC, boundary_ops=BOUNDARY, config=config)


@pytest.mark.parametrize("mode", [DEFAULT, "unbacked", "backed"])
def test_fx_pieces_equal_the_module_bit_for_bit(mode: Any) -> None:
    module, compiled_graph = as_fx(mode)
    want = {size: module(*step(*size)) for size in SIZES}
    for size in SIZES:
        if mode == "backed" and size[1] == 1:
            with pytest.raises(ValueError, match="2 <= sizes"):
                compiled_graph(call_op, *step(*size))
        else:
            assert torch.equal(compiled_graph(call_op, *step(*size)), want[size]), size


@pytest.fixture(scope="module")
def compiled() -> Any:
    module = toy()
    want = {size: module(*step(*size)) for size in SIZES}
    report = Report(show=False)
    return compile_graph(module, example(), DYNAMIC, boundary_ops=BOUNDARY, report=report), want


def test_inductor_pieces_equal_the_module(compiled: Any) -> None:
    compiled_graph, want = compiled
    for size in SIZES:
        torch.testing.assert_close(compiled_graph(call_op, *step(*size)), want[size], rtol=2e-5, atol=2e-5)


def test_piece_without_inductor_code_runs_as_fx(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.13 has none for `y[1:].mul_(2)` with a dynamic number of rows."""

    def refuse(*_: Any, **__: Any) -> None:
        raise InductorError(LoweringException(TypeError("no code\n  target: aten.slice"), "aten.slice", [], {}), None)

    monkeypatch.setattr(torch._inductor, "standalone_compile", refuse)
    module, report = toy(), Report(show=False)
    compiled_graph = compile_graph(module, example(), DYNAMIC, boundary_ops=BOUNDARY, report=report)
    assert {each.built for each in compiled_graph.built.values()} == {"fx"}
    events = report.select("fallback")
    assert len(events) == len(compiled_graph.built) and {event["why"] for event in events} == {"TypeError: no code"}
    for size in SIZES:
        torch.testing.assert_close(compiled_graph(call_op, *step(*size)), module(*step(*size)), rtol=2e-5, atol=2e-5)


def test_each_distinct_piece_is_built_once(compiled: Any) -> None:
    compiled_graph, _ = compiled
    events = compiled_graph.report.select("piece")
    assert [event["built"] for event in events] == ["inductor"] * 3 and sum(event["shared_by"] for event in events) == 4
    assert compiled_graph.plan.count("boundary  toy::attention") == 3
    assert "linear" in compiled_graph.pieces[1].module.code


def test_every_decision_is_an_event(compiled: Any) -> None:
    report = compiled[0].report
    assert report.select("capture")[0]["source"] == "dynamo" and report.select("pass")[1]["matches"] == 6
    assert report.select("assumption")  # what size-oblivious tracing took for granted is on record


def test_compilation_after_ready_is_reported() -> None:
    report = Report(show=False)
    report.event("ready")
    compile_graph(
        nn.Linear(2, 2), {"input": torch.zeros(3, 2)}, config=TorchCompileConfig(enable_inductor=False), report=report
    )
    assert report.select("compile_after_ready")[0]["what"] == "Linear"


def test_generated_code_deletes_dead_values() -> None:
    _, compiled_graph = as_fx(DEFAULT)
    assert re.search(r"boundary\(attention, \(\w+, \w+, \w+, out, 0, 0.25, 0, \), {}\)", compiled_graph.code)
    made = [
        name
        for line in compiled_graph.code.splitlines()
        if "= piece_" in line
        for name in line.split(" = ")[0].split(", ")
    ]
    dropped = [
        name
        for line in compiled_graph.code.splitlines()
        if "del " in line
        for name in line.split("del ")[1].split(", ")
    ]
    (kept,) = {name.strip(", ") for name in made} - set(dropped)
    assert kept.startswith("linear"), "the logits alone outlive the call"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda ids, pos, idx: (ids.int(), pos, idx), "input_ids is int32"),
        (lambda ids, pos, idx: (ids, pos[:-1], idx), "positions is"),
        (lambda ids, pos, idx: (torch.stack((ids, ids), 1)[:, 0], pos, idx), "not contiguous"),
        (lambda ids, pos, idx: (ids[None], pos, idx), "input_ids is"),
        (lambda ids, pos, idx: (ids, pos, idx[:0]), "logits_index is"),
    ],
)
def test_inputs_of_another_kind_are_refused(change: Any, word: str) -> None:
    _, compiled_graph = as_fx(DEFAULT)
    with pytest.raises(ValueError, match=word):
        compiled_graph(call_op, *change(*step(9, 2)))


@pytest.mark.parametrize("inductor", [False, True])
def test_forward_that_selects_an_sdpa_backend_is_compiled(inductor: bool) -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.view(1, -1, 2, 4).transpose(1, 2)
            with sdpa_kernel(SDPBackend.MATH):
                return nn.functional.scaled_dot_product_attention(q, q, q)

    config, x = TorchCompileConfig(enable_inductor=inductor), torch.randn(7, 8)
    compiled_graph = compile_graph(Attends(), {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, config=config)
    torch.testing.assert_close(compiled_graph(call_op, x), Attends()(x))


@pytest.mark.parametrize("inductor", [False, True])
def test_an_input_that_is_written_to_shares_no_memory_with_another(inductor: bool) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return x + y

    inputs, dynamic = {"x": torch.zeros(5), "y": torch.zeros(5)}, {"x": {0: "T"}, "y": {0: "T"}}
    config = TorchCompileConfig(enable_inductor=inductor)
    compiled_graph, both = compile_graph(Writes(), inputs, dynamic, config=config), torch.zeros(8)
    assert torch.equal(compiled_graph(call_op, both[:4], both[4:]), torch.ones(4))
    for other in (both[:4], both[1:5]):
        with pytest.raises(ValueError, match=r"^forward writes to x, which shares its memory with another input"):
            compiled_graph(call_op, both[:4], other)


def test_the_boundary_is_an_argument_of_every_call() -> None:
    (module, compiled_graph), calls = as_fx(DEFAULT), []

    def boundary(op: Any, args: tuple, kwargs: dict) -> None:
        calls.append((op._schema.name, args[4]))
        args[3].zero_()

    for forward in (compiled_graph, eager_forward(module, BOUNDARY)):
        calls.clear()
        forward(boundary, *step(5, 1))
        assert calls == [("toy::attention", 0), ("toy::attention", 1), ("toy::attention", 2)]


def test_eager_forward_equals_the_module_and_intercepts_boundary_ops_only() -> None:
    module = toy()
    for size in SIZES:
        assert torch.equal(eager_forward(module, BOUNDARY)(call_op, *step(*size)), module(*step(*size)))
    assert torch.equal(
        eager_forward(module, ())(lambda *call: pytest.fail("no boundary op"), *step(4, 1)), module(*step(4, 1))
    )


def test_no_names_of_the_module_can_shadow_the_code() -> None:
    class Names(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            constants_0 = x * 2
            tree = constants_0 + 1
            refuse = tree * 3
            out = torch.empty_like(refuse)
            torch.ops.toy.attention(constants_0, tree, refuse, out, 0, 1.0)
            return out + constants_0 + tree + refuse

    module = Names()
    config = TorchCompileConfig(enable_inductor=False)
    compiled_graph = compile_graph(
        module, {"x": torch.zeros(3, 2, 4)}, {"x": {0: "T"}}, boundary_ops=BOUNDARY, config=config
    )
    x = torch.randn(6, 2, 4)
    assert torch.equal(compiled_graph(call_op, x), module(x))


def test_no_names_of_inputs_can_shadow_the_code() -> None:
    class Names(nn.Module):
        def forward(self, boundary: Tensor, refuse: Tensor, tree: Tensor, no_grad: Tensor) -> tuple[Tensor, ...]:
            return boundary * refuse + tree - no_grad, tree

    module, names = Names(), ("boundary", "refuse", "tree", "no_grad")
    config, dynamic = TorchCompileConfig(enable_inductor=False), {name: {0: "T"} for name in names}
    compiled_graph = compile_graph(module, {name: torch.zeros(3) for name in names}, dynamic, config=config)
    inputs = [torch.randn(6) for _ in names]
    result, same = compiled_graph(call_op, *inputs)
    assert torch.equal(result, module(*inputs)[0]) and same is inputs[2]
    with pytest.raises(ValueError, match=r"^boundary is int64"):
        compiled_graph(call_op, inputs[0].long(), *inputs[1:])


def test_a_branch_on_the_size_is_never_silently_wrong() -> None:
    class Long(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] > 40 else x

    module = Long()
    config = TorchCompileConfig(enable_inductor=False)
    with pytest.raises(TraceError, match="another path") as raised:
        compile_graph(module, {"x": torch.zeros(23)}, {"x": {0: "T"}}, config=config)
    assert raised.value.where == f"{__file__}:{Long.forward.__code__.co_firstlineno + 1}"
    assert raised.value.cause.endswith("(`x.shape[0] <= 40` in `return x * 2 if x.shape[0] > 40 else x`)")


def _of_ratio(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 if x.shape[0] >= 3 * y.shape[0] else x + y.sum()


def _of_equals(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == y.shape[0] else x + y.sum()


def _of_unread(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 if y.shape[0] > 40 else x + 1


@pytest.mark.parametrize(
    "choose", [lambda x, y: x * 2 if x.shape[0] == 13 else x + y.sum(), _of_ratio, _of_equals, _of_unread]
)
def test_a_branch_on_one_size_or_on_two_is_refused(choose: Any) -> None:
    class Chooses(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return choose(x, y)

    inputs, dynamic = {"x": torch.zeros(23), "y": torch.zeros(11)}, {"x": {0: "T"}, "y": {0: "N"}}
    with pytest.raises(TraceError, match="another path"):
        compile_graph(Chooses(), inputs, dynamic, config=TorchCompileConfig(enable_inductor=False))


@pytest.mark.parametrize(
    ("choose", "sizes"),
    [
        (lambda x: x * 2 if x.shape[0] % 128 == 0 else x + 1, (1, 127)),
        (lambda x: x * 2 if x.shape[0] == 1000 else x + 1, (1, 999)),
        (lambda x: x * 2 if x.shape[0] == 1 else x + 1, (2, MAX_SIZE)),
        (lambda x: x.expand(2, -1).sum(0), (1, MAX_SIZE)),
    ],
)
def test_branch_on_a_size_limits_accepted_sizes(choose: Any, sizes: tuple[int, int]) -> None:
    class Chooses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return choose(x)

    config = TorchCompileConfig(enable_inductor=False)
    assert compile_graph(Chooses(), {"x": torch.zeros(23)}, {"x": {0: "T"}}, config=config).sizes == sizes


@pytest.mark.parametrize(
    ("example", "other"),
    [(torch.zeros(3), torch.zeros(4)), (torch.zeros(3), torch.zeros(3).long()), (torch.zeros(3), torch.zeros(1, 3))],
)
def test_an_input_that_no_operation_reads_is_checked_too(example: Tensor, other: Tensor, tmp_path: Path) -> None:
    """Forward may have looked at its kind. At a second start as well, whose graph comes from the cache."""

    class Looks(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * 2 if y.shape == (3,) and y.dtype is torch.float32 else x + 1

    cache = CompileCache(tmp_path / "cache", Report(show=False))
    for _ in range(2):
        inputs, config = {"x": torch.zeros(5), "y": example}, TorchCompileConfig(enable_inductor=False)
        compiled_graph = compile_graph(Looks(), inputs, {"x": {0: "T"}}, config=config, cache=cache)
        assert torch.equal(compiled_graph(call_op, torch.ones(7), example), torch.full((7,), 2.0))
        with pytest.raises(ValueError, match=r"^y is .* compiled for float32\[3\]"):
            compiled_graph(call_op, torch.ones(7), other)


def test_branch_on_a_large_size_becomes_a_checked_limit() -> None:
    class VeryLong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] > 4000 else x + 1

    config = TorchCompileConfig(enable_inductor=False)
    compiled_graph = compile_graph(VeryLong(), {"x": torch.zeros(23)}, {"x": {0: "T"}}, config=config)
    assert compiled_graph.sizes == (1, 4000)
    assert torch.equal(compiled_graph(call_op, torch.zeros(4000)), torch.ones(4000))
    with pytest.raises(ValueError, match="sizes <= 4000"):
        compiled_graph(call_op, torch.zeros(4001))
