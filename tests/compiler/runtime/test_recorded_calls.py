"""Recorded calls of a module on a recorder without a GPU: shapes, buffers, copies, writes, and what is launched plainly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import torchweave
from tests.compiler.runtime.tape import TapePool
from torchweave.compiler.api import CompiledModule
from torchweave.compiler.runtime.module_state import ModuleState
from torchweave.compiler.runtime.recorded_calls import RecordedCalls
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)
X = torch.randn(4, 3)


def recorded(
    module: nn.Module, inputs: Mapping[str, Tensor], config: TorchCompileConfig = FX, pool: Any = None, **options: Any
) -> tuple[Any, RecordedCalls, Report]:
    """A compiled module whose first dimensions vary, with its recorder and its report."""
    report = Report(show=False)
    dynamic = {name: {0: "T"} for name in inputs}
    graph = torchweave.compile(module, inputs, dynamic, config, report).compiled_graph
    calls = RecordedCalls(graph, cast(Any, pool or TapePool()), report, **options)
    return CompiledModule(graph, ModuleState(module), "cpu", calls), calls, report


def reasons(report: Report) -> list[str]:
    return [each["why"] for each in report.select("warning") if each["what"] == "cuda_graphs"]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        z = self.down(torch.relu(self.up(x))) + y
        return {"z": z, "best": (z.argmax(-1), None), "scale": 2.0}


def test_each_tuple_of_shapes_is_recorded_once_and_then_replayed() -> None:
    module = Mlp().eval()
    call, calls, report = recorded(module, {"x": X, "y": X})
    x, y = X, X
    for round_ in range(3):
        for rows in (7, 1, 4):
            x, y = torch.randn(2, rows, 3)
            got, want = call(x, y=y), module(x, y)
            torch.testing.assert_close(got["z"], want["z"])
            assert torch.equal(got["best"][0], want["best"][0]) and got["best"][1] is None and got["scale"] == 2.0
            assert not got["z"].requires_grad
        assert (calls.num_plain, calls.num_replays) == (3, 3 * round_)
    assert calls.shapes == [((rows, 3), (rows, 3)) for rows in (7, 1, 4)]
    assert [each["shapes"] for each in report.select("cuda_graph")] == [[[rows, 3]] * 2 for rows in (7, 1, 4)]
    with torch.no_grad():
        module.up.weight.mul_(2)  # read by address
    torch.testing.assert_close(call(x, y)["z"], module(x, y)["z"])
    assert not reasons(report)


def test_shapes_beyond_the_bound_are_launched_plainly_and_said_once() -> None:
    module = Mlp().eval()
    call, calls, report = recorded(module, {"x": X, "y": X}, max_graphs=2)
    for rows in (2, 3, 5, 6, 5, 3, 2):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(call(x, x)["z"], module(x, x)["z"])
    assert calls.shapes == [((2, 3), (2, 3)), ((3, 3), (3, 3))] and (calls.num_plain, calls.num_replays) == (5, 2)
    assert reasons(report) == [
        "calls of other shapes are launched plainly: max_cuda_graphs is 2, and so many shapes are recorded"
    ]


def test_inputs_of_another_kind_are_refused_after_recordings_too() -> None:
    call, calls, _ = recorded(Mlp().eval(), {"x": X, "y": X})
    for _ in range(2):
        call(X, X)
    for wrong in (X.double(), torch.randn(3, 4).T, torch.randn(4, 6)[:, ::2], torch.randn(4, 5)):
        with pytest.raises(
            ValueError, match=r"^x is float(32|64)\[\d, \d\] on cpu.*; the module was compiled for float32"
        ):
            call(wrong, X)
    assert len(calls.shapes) == 1


class Writes(nn.Module):
    """Writes to an input; returns it, views of it, a parameter, and tensors that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x.mul_(2).add_(y)
        z = x + self.weight
        return x, x[1:], x.t(), self.weight, z, z[:1], y * 3


def test_writes_to_inputs_have_one_effect_for_each_call() -> None:
    module = Writes()
    call, calls, _ = recorded(module, {"x": X, "y": X})
    for _ in range(4):
        x, y = torch.randn(4, 3), torch.randn(4, 3)
        x2 = x.clone()
        got, want = call(x, y), module(x2, y)
        assert torch.equal(x, x2)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other) and one.shape == other.shape
    assert (calls.num_plain, calls.num_replays) == (1, 3)


def test_results_share_memory_as_those_of_the_module_do() -> None:
    module = Writes()
    call, _, _ = recorded(module, {"x": X, "y": X})
    for _ in range(3):
        x, y = torch.randn(5, 3), torch.randn(5, 3)
        same, rows, turned, weight, z, first, tripled = call(x, y)
        assert same is x and weight.data_ptr() == module.weight.data_ptr()
        x.zero_()
        assert not rows.any() and not turned.any() and turned.shape == (3, 5) and rows.shape == (4, 3)
        z.fill_(7)
        assert torch.equal(first, torch.full((1, 3), 7.0)) and torch.equal(tripled, y * 3)


def test_inputs_that_share_memory_with_a_written_one_are_refused_at_replays() -> None:
    call, _, _ = recorded(Writes(), {"x": X, "y": X})
    call(torch.randn(4, 3), torch.randn(4, 3))
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="forward writes to x, which shares its memory"):
        call(x, x)


def test_results_stay_as_they_are_unless_they_are_static() -> None:
    for static in (False, True):
        call, _, _ = recorded(Mlp().eval(), {"x": X, "y": X}, static_outputs=static)
        call(X, X)
        first = call(X, X)["z"]
        before = first.clone()
        call(X + 1, X)
        assert torch.equal(first, before) != static


def test_a_call_that_cannot_be_recorded_is_launched_plainly_with_the_reason() -> None:
    class Failing(TapePool):
        def begin(self) -> None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    module = Writes()
    call, calls, report = recorded(module, {"x": X, "y": X}, pool=Failing())
    for _ in range(3):
        x = torch.randn(4, 3)
        for one, other in zip(call(x.clone(), X), module(x.clone(), X), strict=True):
            assert torch.equal(one, other)
    assert (calls.num_plain, calls.num_replays) == (3, 0)
    assert reasons(report) == ["calls are launched plainly: operation not permitted when stream is capturing"]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def test_forwards_that_the_host_takes_part_in_are_launched_plainly() -> None:
    call, calls, report = recorded(Branches(), {"x": X})
    for x in (torch.ones(4, 3), -torch.ones(4, 3)) * 2:
        assert torch.equal(call(x), x + x.sign())
    assert calls.num_replays == 0
    assert reasons(report) == [
        "calls are launched plainly: forward selects what it computes by the value of a tensor, which the host must read"
    ]
    graph = call.compiled_graph
    graph.effects = dataclasses.replace(graph.effects, devices=frozenset({"cpu", "cuda"}), nested=False)
    twice = RecordedCalls(graph, cast(Any, TapePool()), Report(show=False))
    assert twice.why_plain == "forward computes on cpu and cuda"


SUMS: list[float] = []


@torch.library.custom_op("recorded_calls::host_sum", mutates_args=("out",))
def host_sum(x: Tensor, out: Tensor) -> None:
    SUMS.append(float(x.sum()))  # on a GPU it waits for the device
    out.fill_(SUMS[-1])


class ReadsOnTheHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        host_sum(x * 2, out)
        return out + x


def test_a_splitting_op_that_only_writes_runs_between_the_graphs_once_for_each_call() -> None:
    config = dataclasses.replace(FX, splitting_ops=("recorded_calls::host_sum",))
    call, calls, report = recorded(ReadsOnTheHost(), {"x": X}, config)
    SUMS.clear()
    for number in range(1, 4):
        x = torch.randn(4, 3)
        torch.testing.assert_close(call(x), (x * 2).sum() + x)
        assert len(SUMS) == number
    assert calls.num_replays == 2 and report.select("cuda_graph")[0]["segments"] == 2


def test_recording_under_inference_mode_serves_calls_outside_of_it() -> None:
    module = Writes()
    call, calls, _ = recorded(module, {"x": X, "y": X})
    with torch.inference_mode():
        call(X.clone(), X)
    x = torch.randn(4, 3)
    expected = x * 2 + X
    assert torch.equal(call(x, X)[0], expected) and calls.num_replays == 1
    with torch.inference_mode():
        assert torch.equal(call(X.clone(), X)[0], X * 2 + X)


def test_a_call_inside_the_caller_s_own_recording_is_launched_plainly() -> None:
    pool, module = TapePool(), Mlp().eval()
    call, calls, _ = recorded(module, {"x": X, "y": X}, pool=pool)
    pool.capturing = True
    torch.testing.assert_close(call(X, X)["z"], module(X, X)["z"])
    assert not calls.shapes and not pool.events


def test_threads_do_not_mix_their_inputs() -> None:
    module = Mlp().eval()
    call, calls, _ = recorded(module, {"x": X, "y": X})
    tensors = [torch.full((4, 3), float(number)) for number in range(40)]
    with ThreadPoolExecutor(4) as threads, torch.no_grad():
        results = list(threads.map(lambda x: call(x, x)["z"], tensors))
    for x, got in zip(tensors, results, strict=True):
        torch.testing.assert_close(got, module(x, x)["z"])
    assert calls.num_replays == 39


def test_a_device_without_cuda_graphs_is_refused() -> None:
    words = "cuda_graphs records on a CUDA device, but input is on cpu, which has no CUDA graphs; leave cuda_graphs out, or move"
    with pytest.raises(ValueError, match=words):
        torchweave.compile(nn.ReLU(), {"input": X}, config=FX, cuda_graphs=True)

    @torchweave.compile(dynamic={"input": {0: "T"}}, config=FX, cuda_graphs=True)
    class Relu(nn.ReLU):
        pass

    with pytest.raises(ValueError, match=words):
        Relu()(X)
    with pytest.raises(ValueError, match="max_cuda_graphs is the largest number of recorded shapes, at least 1; not 0"):
        torchweave.compile(nn.ReLU(), {"input": X}, config=FX, cuda_graphs=True, max_cuda_graphs=0)


class Reinterprets(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(torch.int32)


class Conjugates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (torch.complex(x, x) * 2).conj()


@pytest.mark.parametrize(
    ("module", "why"), [(Reinterprets(), "memory of an input in another dtype"), (Conjugates(), "plain strided memory")]
)
def test_results_that_a_recording_cannot_hold_are_computed_plainly(module: nn.Module, why: str) -> None:
    call, calls, report = recorded(module, {"x": X})
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(call(x), module(x))
    assert calls.num_replays == 0 and why in reasons(report)[0]
