"""`torchweave.compile(..., cuda_graphs=True)`: replays equal eager at every size, in any order, on any stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweave
from tests.compiler.runtime.test_recorded_calls import SUMS, ReadsOnTheHost, reasons
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

pytestmark = pytest.mark.gpu
SIZES = (1, 64, 7, 257, 2)
DEVICE = "cuda"


class Block(nn.Module):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        y = x + self.down(nn.functional.silu(self.up(self.norm(x)))) * scale
        return {"y": y, "best": y.argmax(-1)}


def compiled(module: nn.Module, inputs: dict[str, Tensor], inductor: bool = True, **options: Any) -> tuple[Any, Report]:
    config = TorchCompileConfig(enable_inductor=inductor, compile_cache=False, splitting_ops=options.pop("cut", ()))
    report, dynamic = Report(show=False), {name: {0: "T"} for name in inputs if name != "scale"}
    return torchweave.compile(module, inputs, dynamic, config, report, cuda_graphs=True, **options), report


@pytest.mark.parametrize("inductor", [True, False], ids=["inductor", "fx"])
def test_replays_equal_eager_at_every_size_in_any_order(inductor: bool) -> None:
    module, scale = Block().to(DEVICE).eval(), torch.full((1,), 0.5, device=DEVICE)
    call, report = compiled(module, {"x": torch.randn(8, 64, device=DEVICE), "scale": scale}, inductor)
    kept, x = [], scale
    with torch.no_grad():
        for size in (*SIZES, *reversed(SIZES), *SIZES):
            x = torch.randn(size, 64, device=DEVICE)
            got, want = call(x, scale), module(x, scale)
            kept.append((got["y"], want["y"]))
            torch.testing.assert_close(got["y"], want["y"], rtol=1e-4, atol=1e-4)
            assert torch.equal(got["best"], got["y"].argmax(-1))
    for got, want in kept:  # copies: later calls do not overwrite them
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    graphs = call.cuda_graphs
    assert (graphs.num_plain, graphs.num_replays, len(graphs.shapes)) == (5, 10, 5) and not graphs.why_plain
    assert [each["segments"] for each in report.select("cuda_graph")] == [1] * 5
    with torch.no_grad():
        module.down.weight.zero_()  # read by address
        module.down.bias.zero_()
        torch.testing.assert_close(call(x, scale)["y"], x)


def test_a_replay_launches_one_graph_and_no_kernel_of_its_own() -> None:
    module, scale = Block().to(DEVICE).eval(), torch.ones(1, device=DEVICE)
    x = torch.randn(8, 64, device=DEVICE)
    call, _ = compiled(module, {"x": x, "scale": scale})
    for _ in range(3):
        call(x, scale)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(x, scale)
    assert not [
        event.key for event in profile.key_averages() if event.key in ("aten::addmm", "aten::mm", "aten::linear")
    ]


class Writes(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.mul_(2).add_(y)
        z = x + 1
        return x, z, z[1:]


@pytest.mark.parametrize("inductor", [True, False], ids=["inductor", "fx"])
def test_writes_to_inputs_reach_the_caller(inductor: bool) -> None:
    example = torch.randn(8, 3, device=DEVICE)
    call, _ = compiled(Writes(), {"x": example, "y": example.clone()}, inductor)
    for size in (4, 9, 4, 9, 4):
        x, y = torch.randn(2, size, 3, device=DEVICE)
        x, y = x.clone(), y.clone()
        want = x * 2 + y
        same, z, part = call(x, y)
        assert same is x
        torch.testing.assert_close(x, want)
        torch.testing.assert_close(z, want + 1)
        torch.testing.assert_close(part, (want + 1)[1:])
    assert call.cuda_graphs.num_replays == 3


def test_random_numbers_differ_between_replays() -> None:
    module, x = nn.Dropout(0.5).train(), torch.ones(1 << 16, device=DEVICE)
    call, _ = compiled(module, {"input": x})
    results = [call(x) for _ in range(5)]
    assert call.cuda_graphs.num_replays == 4
    for index, result in enumerate(results):
        assert abs(result.mean().item() - 1) < 0.05 and set(result.unique().tolist()) == {0.0, 2.0}
        assert not any(torch.equal(result, other) for other in results[:index])


def test_an_op_that_reads_on_the_host_runs_between_graphs_as_a_splitting_op() -> None:
    example = torch.randn(8, 3, device=DEVICE)
    call, report = compiled(ReadsOnTheHost(), {"x": example}, cut=("recorded_calls::host_sum",))
    SUMS.clear()
    for number in range(1, 6):
        x = torch.randn(4, 3, device=DEVICE)
        torch.testing.assert_close(call(x), (x * 2).sum() + x, rtol=1e-4, atol=1e-4)
        assert len(SUMS) == number
    assert call.cuda_graphs.num_replays == 4 and report.select("cuda_graph")[0]["segments"] == 2


def test_an_op_that_reads_on_the_host_is_launched_plainly_with_the_reason() -> None:
    example = torch.randn(8, 3, device=DEVICE)
    call, report = compiled(ReadsOnTheHost(), {"x": example})
    for size in (4, 4, 9, 9):
        x = torch.randn(size, 3, device=DEVICE)
        torch.testing.assert_close(call(x), (x * 2).sum() + x, rtol=1e-4, atol=1e-4)
    assert call.cuda_graphs.num_replays == 0 and len(reasons(report)) == 1
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    big = torch.zeros(1 << 22, device=DEVICE)
    big.record_stream(torch.cuda.Stream())
    del big
    torch.cuda.synchronize()
    torch.zeros(1, device=DEVICE)  # lets the allocator look at its events
    assert torch.cuda.memory_allocated() <= before + 512
    # The failed recording leaves the generator and the allocator usable, and other modules are recorded.
    module, scale = Block().to(DEVICE).eval(), torch.ones(1, device=DEVICE)
    other, _ = compiled(module, {"x": torch.randn(8, 64, device=DEVICE), "scale": scale})
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(5, 64, device=DEVICE)
            torch.testing.assert_close(other(x, scale)["y"], module(x, scale)["y"], rtol=1e-4, atol=1e-4)
    assert other.cuda_graphs.num_replays == 2


class CpuConstant(nn.Module):
    by: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def test_a_module_that_reads_a_tensor_on_the_cpu_is_launched_plainly() -> None:
    module, x = CpuConstant(), torch.randn(8, 3, device=DEVICE)
    call, report = compiled(module, {"x": x})
    for by in (3.0, 5.0, 7.0):
        module.by.fill_(by)
        torch.testing.assert_close(call(x), x * by)
    assert reasons(report) == ["calls are launched plainly: forward computes on cpu and cuda"]


def test_calls_on_several_streams_keep_their_order() -> None:
    module, scale = Block(256).to(DEVICE).eval(), torch.ones(1, device=DEVICE)
    call, _ = compiled(module, {"x": torch.randn(8, 256, device=DEVICE), "scale": scale})
    xs = [torch.randn(512, 256, device=DEVICE) for _ in range(30)]
    with torch.no_grad():
        want = [module(x, scale)["y"] for x in xs]
    call(xs[0], scale)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results = []
    for index, x in enumerate(xs):
        with torch.cuda.stream(streams[index % 3]):
            results.append(call(x, scale)["y"])
    torch.cuda.synchronize()
    for got, expected in zip(results, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_caller_records_a_compiled_module_in_a_graph_of_its_own() -> None:
    module, scale = Block().to(DEVICE).eval(), torch.ones(1, device=DEVICE)
    x = torch.randn(8, 64, device=DEVICE)
    call, _ = compiled(module, {"x": x, "scale": scale})
    for _ in range(2):
        call(x, scale)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(x, scale)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        result = call(x, scale)["y"]
    x.normal_()
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(result, module(x, scale)["y"], rtol=1e-4, atol=1e-4)


def test_static_outputs_and_the_bound() -> None:
    module, scale = Block().to(DEVICE).eval(), torch.ones(1, device=DEVICE)
    x = torch.randn(8, 64, device=DEVICE)
    call, report = compiled(module, {"x": x, "scale": scale}, static_outputs=True, max_cuda_graphs=2)
    with torch.no_grad():
        for size in (8, 9, 10, 8, 9, 10):
            x = torch.randn(size, 64, device=DEVICE)
            torch.testing.assert_close(call(x, scale)["y"], module(x, scale)["y"], rtol=1e-4, atol=1e-4)
    x = torch.randn(8, 64, device=DEVICE)
    assert call(x, scale)["y"].data_ptr() == call(x, scale)["y"].data_ptr()
    assert len(call.cuda_graphs.shapes) == 2 and len(reasons(report)) == 1


def test_modules_of_a_decorated_class_are_recorded() -> None:
    config = TorchCompileConfig(compile_cache=False)

    @torchweave.compile(dynamic={"x": {0: "T"}}, config=config, cuda_graphs=True)
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.silu(x) * x

    gate = Gate().to(DEVICE)
    for size in (3, 5, 3, 5):
        x = torch.randn(size, 16, device=DEVICE)
        torch.testing.assert_close(gate(x), nn.functional.silu(x) * x)
