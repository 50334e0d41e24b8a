"""Pieces split over CUDA streams equal their serial run bitwise, in graphs and without, under delayed streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiler.streams.stream_cases import DYNAMIC, captured_piece, shared_experts
from torchweave.compiler import compile_graph
from torchweave.compiler.codegen.pieces import build_fx, build_inductor
from torchweave.compiler.runtime.cuda_graphs import GraphPool, record
from torchweave.compiler.runtime.forward import call_op
from torchweave.compiler.streams.backends import CheckedStreams, CudaStreams
from torchweave.compiler.streams.build import Split, join, plan_split
from torchweave.compiler.streams.tasks import Costs
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

pytestmark = pytest.mark.gpu
HIDDEN, REPLAYS, CASES = 512, 1000, 16
Call = Callable[[list[Any]], Sequence[Tensor]]


class Late:
    """Enter a stream and delay its start."""

    def __init__(self, stream: Any, cycles: int) -> None:
        self.stream, self.cycles = stream, cycles

    def __enter__(self) -> None:
        self.stream.__enter__()
        torch.cuda._sleep(self.cycles)

    def __exit__(self, *error: Any) -> None:
        self.stream.__exit__(*error)


class LaggingLanes(CudaStreams):
    """Streams that delay each run by a number of clock cycles each, which exposes a missing event."""

    def __init__(self, device: torch.device, cycles: tuple[int, ...]) -> None:
        super().__init__(len(cycles), device)
        self.cycles = cycles

    def __getitem__(self, stream: int) -> Any:
        return Late(super().__getitem__(stream), self.cycles[stream])


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def inputs(device: torch.device, tokens: int, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator(device).manual_seed(seed)
    return {
        name: torch.randn(tokens, HIDDEN, generator=draw, device=device, dtype=torch.bfloat16)
        for name in ("attended", "residual")
    }


class Case:
    """A split piece whose runs are compiled once; `ready` orders inputs and constants as it takes them."""

    def __init__(self, device: torch.device, inductor: bool, num_streams: int) -> None:
        module = shared_experts(hidden=HIDDEN, width=256, shared=2048).to(device, torch.bfloat16)
        graph, piece = captured_piece(module, inputs(device, 5, 0))
        self.split: Split = plan_split(piece, num_streams, Costs(fused=inductor))
        config = TorchCompileConfig(enable_inductor=inductor)
        self.calls = [(build_inductor(part, config) if inductor else build_fx(part)).call for part in self.split.parts]
        self.names = [graph.bindings[node.name].name for node in piece.inputs]
        self.constants = [graph.constant(node) for node in piece.constants]
        self.serial: Call = self.on(CheckedStreams(num_streams))

    def on(self, streams: Any, split: Split | None = None) -> Call:
        return join(split or self.split, self.calls, streams)[0]

    def ready(self, given: dict[str, Tensor]) -> list[Any]:
        return [*(given[name] for name in self.names), *self.constants]


@pytest.fixture(scope="module", params=[(False, 2), (True, 2), (False, 3)], ids=["fx", "inductor", "fx-3-streams"])
def case(request: Any, device: torch.device) -> Case:
    with torch.no_grad():
        return Case(device, *request.param)


LAGS = [(0, 0, 0), (0, 100_000, 20_000), (0, 20_000, 200_000)]


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize("cycles", LAGS)
def test_replays_of_a_split_piece_equal_the_serial_run_bitwise(
    case: Case, device: torch.device, tokens: int, cycles: tuple[int, ...]
) -> None:
    given = [inputs(device, tokens, seed) for seed in range(CASES)]
    want = [[out.clone() for out in case.serial(case.ready(each))] for each in given]
    buffers = inputs(device, tokens, 99)
    call = case.on(LaggingLanes(device, cycles))
    recording = record(
        lambda boundary: call(case.ready(buffers)), call_op, capture_boundary_ops=True, pool=GraphPool(device)
    )
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for turn in range(REPLAYS if not any(cycles) else 100):
        for name, buffer in buffers.items():
            buffer.copy_(given[turn % CASES][name])
        for got, expected in zip(recording.replay(), want[turn % CASES], strict=True):
            wrong += got.ne(expected).sum()
    assert wrong.item() == 0


@torch.no_grad()
@pytest.mark.parametrize("cycles", LAGS)
def test_freed_memory_is_safe_without_graphs(case: Case, device: torch.device, cycles: tuple[int, ...]) -> None:
    """Between two calls, all freed memory is reallocated and filled with a value that no result contains."""
    given = [inputs(device, 64, seed) for seed in range(CASES)]
    want = [[out.clone() for out in case.serial(case.ready(each))] for each in given]
    call = case.on(LaggingLanes(device, cycles))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for turn in range(200):
        made = call(case.ready({name: tensor.clone() for name, tensor in given[turn % CASES].items()}))
        for got, expected in zip(made, want[turn % CASES], strict=True):
            wrong += got.ne(expected).sum()
        del made, got
        filler = [
            torch.full((64, width), float("nan"), device=device, dtype=torch.bfloat16) for width in (512, 1536, 4096)
        ]
        del filler
    assert wrong.item() == 0


@torch.no_grad()
def test_caller_may_switch_streams(case: Case, device: torch.device) -> None:
    given = inputs(device, 64, 0)
    want = [out.clone() for out in case.serial(case.ready(given))]
    call = case.on(LaggingLanes(device, (0, 50_000, 50_000)))
    others = [torch.cuda.Stream(device) for _ in range(3)]
    torch.cuda.synchronize(device)
    results = []
    for turn in range(60):
        with torch.cuda.stream(others[turn % 3]):
            torch.cuda._sleep(30_000 * (turn % 3))
            wrong = sum(got.ne(expected).sum() for got, expected in zip(call(case.ready(given)), want, strict=True))
            results.append(wrong)
    torch.cuda.synchronize(device)
    assert not any(int(each) for each in results)


@torch.no_grad()
def test_delayed_streams_expose_a_missing_event(device: torch.device) -> None:
    """The tests above can fail: without its waits the same piece gives different results."""
    case = Case(device, False, 2)
    runs = tuple(replace(run, waits=()) if run.stream == 0 else run for run in case.split.program.runs)
    call = case.on(
        LaggingLanes(device, (0, 5_000_000)), replace(case.split, program=replace(case.split.program, runs=runs))
    )
    given = inputs(device, 64, 0)
    want = [out.clone() for out in case.serial(case.ready(given))]
    torch.cuda.synchronize(device)
    made = call(case.ready(given))
    same = [bool(got.equal(expected)) for got, expected in zip(made, want, strict=True)]
    torch.cuda.synchronize(device)
    assert not all(same)


@torch.no_grad()
@pytest.mark.parametrize("inductor", [False, True])
def test_multi_stream_code_equals_single_stream_code(device: torch.device, inductor: bool) -> None:
    module, report = (
        shared_experts(hidden=HIDDEN, width=256, shared=2048).to(device, torch.bfloat16),
        Report(show=False),
    )
    config = TorchCompileConfig(enable_inductor=inductor)
    off = compile_graph(module, inputs(device, 5, 0), DYNAMIC, config=config)
    config = replace(config, max_num_streams=2)
    on = compile_graph(module, inputs(device, 5, 0), DYNAMIC, config=config, report=report)
    kept = [event["kept"] for event in report.select("streams")]  # one for each range of tokens that is built apart
    assert kept and all(kept)
    for tokens in (1, 2, 7, 64, 300):
        given = inputs(device, tokens, tokens).values()
        for one, other in zip(on(call_op, *given), off(call_op, *given), strict=True):
            tolerance = (
                2e-2 if inductor else 0.0
            )  # Inductor may fuse, and so round, a whole piece otherwise than its runs
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
