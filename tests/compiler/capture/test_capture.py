"""Capture: one graph with dynamic sizes and bound inputs; unsupported forwards raise errors with the source line."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.compiler.toy import DYNAMIC, example, toy
from torchweave.compiler import CompileCache, compile_graph
from torchweave.compiler.cache.entries import deserialize_graph, serialize_graph
from torchweave.compiler.capture.capture import capture, reject_written_constants
from torchweave.compiler.errors import InvariantError, TraceError
from torchweave.compiler.ir.graph import Constant, Input, SourceError, resolve
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

FX = TorchCompileConfig(enable_inductor=False)


@pytest.mark.parametrize("mode", ["backed_size_oblivious", "unbacked", "backed"])
def test_placeholders_are_bound_and_sizes_named(mode: Any) -> None:
    module = toy()
    graph = capture(module, example(), DYNAMIC, mode)
    bound = graph.bindings.values()
    assert {binding.name for binding in bound if isinstance(binding, Input)} == set(DYNAMIC)
    assert set(graph.symbols.values()) == {"T", "N"}
    constants = {id(binding.tensor) for binding in bound if isinstance(binding, Constant)}
    assert constants == {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    assert graph.sources == ("tests.compiler.toy",)


def test_equal_example_sizes_do_not_specialize_a_dimension() -> None:
    """A token count that equals the hidden size would tie the two; another size is traced."""
    inputs = {name: torch.zeros(64, dtype=torch.int64) for name in DYNAMIC}
    graph = capture(toy(), inputs, DYNAMIC, "backed_size_oblivious")
    assert set(graph.symbols.values()) == {"T", "N"}


def test_data_dependent_control_flow_error_names_line_and_cause() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                return x
            return x + 1

    with pytest.raises(TraceError, match="forward decides by the values of a tensor") as caught:
        capture(Branch(), {"x": torch.zeros(3)}, {}, "backed")
    file, line = caught.value.where.rsplit(":", 1)
    assert file == __file__ and "if x.sum() > 0" in linecache.getline(file, int(line))


@pytest.mark.parametrize("setting", [np.float32(2), np.ones(4, np.float32)])
def test_numpy_attribute_is_rejected_with_advice(setting: Any) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    module = Scaled()
    module.by = setting
    with pytest.raises(TraceError, match=r"reads self.by, a numpy value; keep a number as a Python number .`float"):
        capture(module, {"x": torch.zeros(3, 4)}, {}, "backed")


def test_specialized_dynamic_dimension_is_rejected() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(23, 4)

    with pytest.raises(TraceError, match=r"T .*was fixed to 23"):
        capture(Fixed(), {"x": torch.zeros(23, 4)}, {"x": {0: "T"}}, "backed_size_oblivious")


@pytest.mark.parametrize("through_view", [False, True])
def test_a_forward_that_writes_to_a_buffer_is_refused(through_view: bool) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            (self.seen.view(2, 2)[0] if through_view else self.seen).add_(1)
            return x + self.seen

    with pytest.raises(InvariantError, match=r"writes to .*seen") as caught:
        reject_written_constants(capture(Counter(), {"x": torch.zeros(5, 4)}, {"x": {0: "T"}}, "backed_size_oblivious"))
    assert caught.value.where.startswith(__file__)


def _sets_back(self: Any, x: Tensor) -> Tensor:
    before, self.scale = self.scale, 3.0
    self.seen.append(x)
    y = x * self.scale
    self.scale, _ = before, self.seen.pop()
    return y


def _counts(self: Any, x: Tensor) -> Tensor:
    self.scale += 1.0
    return x * self.scale


def _replaces_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.state = self.state * 0.5 + x.sum()
    return x * self.state


def _keeps_what_it_saw(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x.mean())
    return x * 2


def _leaves_it_on_a_child(self: Any, x: Tensor) -> Tensor:
    self.child.last = x
    return self.child(x)


class _Changing(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call, self.scale, self.seen, self.child = call, 1.0, [], nn.Linear(8, 8)
        self.register_buffer("state", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


@pytest.mark.parametrize(
    ("call", "changed"),
    [
        (_counts, "self.scale"),
        (_replaces_a_buffer, "self.state"),
        (_keeps_what_it_saw, "self.seen"),
        (_leaves_it_on_a_child, "self.child.last"),
    ],
)
def test_side_effects_are_rejected_and_undone(call: Any, changed: str) -> None:
    """A graph does not hold such a change; tracing would make it once and leave its tensors behind."""
    module = _Changing(call)
    state = module.state
    with pytest.raises(TraceError, match=f"^forward changes {changed}, which a compiled forward would not do"):
        capture(module, {"x": torch.zeros(3, 8)}, {"x": {0: "T"}}, "backed_size_oblivious")
    assert (module.scale, module.seen, vars(module.child).get("last")) == (1.0, [], None) and module.state is state


class _Literals(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept, written = torch.tensor([0.5, 2.0]), torch.tensor([1.0, 3.0])
        written += x[0]
        return x * kept.to(x.device) + written


def test_tensors_of_numbers_are_constants_unless_they_are_written() -> None:
    """A step would copy them from the host each time, which a CUDA graph cannot record."""
    graph = capture(_Literals(), {"x": torch.zeros(3, 2)}, {"x": {0: "T"}}, "backed_size_oblivious")
    assert [node.target for node in graph.graph.nodes].count(torch.tensor) == 1
    assert [constant.tensor.tolist() for _, constant in graph.constants()] == [[0.5, 2.0]]
    compiled_graph, x = (
        compile_graph(_Literals(), {"x": torch.zeros(3, 2)}, {"x": {0: "T"}}, config=FX),
        torch.randn(5, 2),
    )
    for _ in range(2):
        assert torch.equal(compiled_graph(call_op, x), _Literals()(x))


def test_reverted_side_effect_is_captured() -> None:
    module = _Changing(_sets_back)
    graph = capture(module, {"x": torch.zeros(3, 8)}, {"x": {0: "T"}}, "backed_size_oblivious")
    assert graph.num_calls() == 1 and (module.scale, module.seen) == (1.0, [])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_forward_that_sets_the_grad_mode_is_captured(mode: Any) -> None:
    class Says(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with mode():
                y = x * 2
            return y + 1

    compiled_graph = compile_graph(Says(), {"x": torch.zeros(3, 8)}, {"x": {0: "T"}}, config=FX)
    result = compiled_graph(call_op, torch.ones(5, 8))
    assert torch.equal(result, torch.full((5, 8), 3.0)) and not result.is_inference()


def test_writing_to_an_input_or_a_temporary_is_allowed() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, into: Tensor) -> Tensor:
            into.copy_(x)
            y = x * 2
            y.add_(1)
            return y

    inputs = {"x": torch.ones(5), "into": torch.zeros(5)}
    compiled_graph = compile_graph(Writes(), inputs, {name: {0: "T"} for name in inputs}, config=FX)
    into = torch.zeros(7)
    assert torch.equal(compiled_graph(call_op, torch.arange(7.0), into), torch.arange(7.0) * 2 + 1)
    assert torch.equal(into, torch.arange(7.0))


def test_tensor_attributes_and_structured_outputs() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(4.0)
            self.more = [torch.full((4,), 2.0)]

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = x + self.table + torch.tensor([1.0, 2.0, 3.0, 4.0])
            return {"sum": y, "parts": (y * self.more[0], x, None)}

    module = Loose()
    compiled_graph = compile_graph(module, {"x": torch.zeros(3, 4)}, {"x": {0: "T"}}, config=FX)
    x = torch.randn(6, 4)
    got, want = compiled_graph(call_op, x), module(x)
    assert torch.equal(got["sum"], want["sum"]) and torch.equal(got["parts"][0], want["parts"][0])
    assert got["parts"][1] is x and got["parts"][2] is None


def test_module_hooks_are_part_of_the_forward() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    module.register_forward_hook(lambda module, args, output: output * 3)
    compiled_graph = compile_graph(module, {"input": torch.zeros(3, 4)}, {"input": {0: "T"}}, config=FX)
    x = torch.randn(5, 4)
    torch.testing.assert_close(compiled_graph(call_op, x), module(x))


def test_input_names_must_match_forward() -> None:
    with pytest.raises(ValueError, match="forward's order"):
        capture(toy(), {"tokens": torch.zeros(3)}, {}, "backed")


@pytest.mark.parametrize("source", ["L['self'].weight.add_(1)", "__import__('os')", "L['self'].missing", "L[len('x')]"])
def test_sources_are_lookups_without_calls(source: str) -> None:
    with pytest.raises(SourceError):
        resolve(source, {"L": {"self": nn.Linear(2, 2)}})


class Looked(nn.Module):
    """Returns attributes of an input, which tracing keeps outside of the graph."""

    def forward(self, x: Tensor) -> Any:
        return x.T, {"more": [x + 1, x.mT]}, x


def test_returned_input_attribute_comes_from_the_call(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "cache", Report(show=False))
    for source in ("dynamo", "cache"):
        report = Report(show=False)
        compiled_graph = compile_graph(
            Looked(), {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, config=FX, cache=cache, report=report
        )
        assert [each["source"] for each in report.select("capture")] == [source]
        x = torch.randn(3, 8)
        transposed, more, same = compiled_graph(call_op, x)
        assert torch.equal(transposed, x.T) and transposed.data_ptr() == x.data_ptr() and same is x
        assert torch.equal(more["more"][0], x + 1) and torch.equal(more["more"][1], x.T)


class ReturnsSize(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + 1, x.shape[0] * 2


def test_returned_size_is_rejected() -> None:
    with pytest.raises(TraceError, match="forward returns a size, or a number computed from sizes; return tensors"):
        compile_graph(ReturnsSize(), {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, config=FX)


class Methods(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh().sum(-1)


def test_graph_of_method_calls_only_is_captured() -> None:
    graph = capture(Methods(), {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, "backed_size_oblivious")
    loaded = deserialize_graph(serialize_graph(graph), Methods(), torch.device("cpu"))
    assert [node.target for node in loaded.graph.nodes] == [node.target for node in graph.graph.nodes]


class Mapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.sum())(x)  # each row


class Slope(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda each: (each**2).sum())(x)


@pytest.mark.parametrize("module", [Mapped(), Slope()])
def test_functorch_transform_is_rejected_and_uninstalled(module: nn.Module) -> None:
    with pytest.raises(TraceError, match=r"uses a transform of torch\.func") as caught:
        compile_graph(module, {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, config=FX)
    if isinstance(module, Mapped):
        assert "# each row" in linecache.getline(__file__, int(caught.value.where.removeprefix(f"{__file__}:")))
    torch.randn(2)  # raises where a vmap was left on


def test_a_launch_of_a_triton_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(
        "torch.utils._triton.has_triton", lambda: True
    )  # as on a GPU: Dynamo takes the launch into the graph

    def kernel(x, y, size: triton.language.constexpr):  # type: ignore[no-untyped-def]
        at = triton.language.arange(0, size)
        triton.language.store(y + at, triton.language.load(x + at))

    class Launches(nn.Module):
        copy = staticmethod(triton.jit(kernel))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.empty_like(x)
            self.copy[(1,)](x, y, 8)  # the launch
            return y + x

    with pytest.raises(TraceError, match="launches a Triton kernel") as caught:
        compile_graph(Launches(), {"x": torch.zeros(8)}, config=FX)
    assert "# the launch" in linecache.getline(__file__, int(caught.value.where.removeprefix(f"{__file__}:")))


class Yields(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return self.parts(x)

    def parts(self, x: Tensor) -> Any:
        yield x + 1


def test_a_generator_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"forward returns (an object that cannot be rebuilt .*, such as a generator|a tuple_iterator)"
    ):
        compile_graph(Yields(), {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, config=FX)
