"""Logic of CUDA graph recordings on a recorder without a GPU: segments, boundary ops, kept tensors, debug checks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiler.runtime.tape import TapePool
from tests.compiler.toy import BOUNDARY, DYNAMIC, example, step, toy
from torchweave.compiler import InvariantError, compile_graph, eager_forward
from torchweave.compiler.runtime.cuda_graphs import record
from torchweave.compiler.runtime.forward import BoundaryHandler, Forward, call_op
from torchweave.config.options import TorchCompileConfig


def forwards() -> list[Any]:
    module = toy()
    config = TorchCompileConfig(enable_inductor=False)
    return [
        (module, compile_graph(module, example(), DYNAMIC, boundary_ops=BOUNDARY, config=config)),
        (module, eager_forward(module, BOUNDARY)),
    ]


@pytest.fixture(scope="module", params=[0, 1], ids=["compiled", "eager"])
def model(request: Any) -> tuple[Any, Forward]:
    return forwards()[request.param]


@pytest.mark.parametrize("capture_boundary_ops", [True, False])
def test_replay_reads_current_input_values(model: Any, capture_boundary_ops: bool) -> None:
    module, forward = model
    buffers, pool = step(8, 2), TapePool()
    recording = record(
        lambda boundary: forward(boundary, *buffers), call_op, capture_boundary_ops=capture_boundary_ops, pool=pool
    )
    assert recording.num_segments == (1 if capture_boundary_ops else 4)
    assert recording.bytes == pool.num_bytes() > 0 and recording.seconds > 0
    for seed in (1, 2):
        new = step(8, 2, seed)
        for buffer, values in zip(buffers, new, strict=True):
            buffer.copy_(values)
        assert torch.equal(recording.replay(), module(*new)) and recording.output is recording.replay()


def test_boundary_ops_run_at_replays_and_not_while_recording(model: Any) -> None:
    _, forward = model
    buffers, calls = step(8, 2), []

    def boundary(op: Any, args: tuple, kwargs: dict) -> None:
        calls.append(args[4])
        op(*args, **kwargs)

    recording = record(
        lambda boundary: forward(boundary, *buffers), boundary, capture_boundary_ops=False, pool=TapePool()
    )
    assert calls == [0, 1, 2], "once, by the warm-up"
    recording.replay()
    assert calls == [0, 1, 2] * 2
    others: list[int] = []
    recording.replay(lambda op, args, kwargs: others.append(args[4]))
    assert others == [0, 1, 2] and len(calls) == 6


def test_every_boundary_call_splits_the_recording() -> None:
    """An engine hands over more than ops: what it must do on the host once a step."""
    x, said = torch.zeros(4), []

    def run(boundary: BoundaryHandler) -> Tensor:
        y = x + 1
        boundary("begin", (), {})
        return y * 2

    recording = record(run, lambda op, args, kwargs: said.append(op), capture_boundary_ops=False, pool=TapePool())
    said.clear()
    x.fill_(5)
    assert torch.equal(recording.replay(), torch.full((4,), 12.0)) and said == ["begin"]


def test_inputs_of_boundary_ops_are_kept_alive() -> None:
    """An argument that only the call itself held is kept by the recording."""
    x, pool = torch.arange(4.0), TapePool()
    result = torch.zeros(4)

    def run(boundary: BoundaryHandler) -> Tensor:
        boundary("keep", (x + 1, torch.full((4,), 3.0)), {"more": torch.ones(4)})
        return result * 1

    def boundary(op: Any, args: tuple, kwargs: dict) -> None:
        result.copy_(args[0] * args[1] + kwargs["more"])

    recording = record(run, boundary, capture_boundary_ops=False, pool=pool)
    gc.collect(1)  # the objects are new
    assert len(pool.kept) == 4 and all(kept() is not None for kept in pool.kept)
    x.add_(1)
    assert torch.equal(recording.replay(), (torch.arange(4.0) + 2) * 3 + 1)


def test_debug_checks_the_addresses_of_the_inputs() -> None:
    x = torch.zeros(4)
    recording = record(
        lambda boundary: x + 1, call_op, capture_boundary_ops=True, pool=TapePool(), debug=True, inputs=[x]
    )
    recording.replay()
    recording.replay(inputs=[x])
    with pytest.raises(InvariantError, match="input 0 is"):
        recording.replay(inputs=[torch.zeros(4)])
    with pytest.raises(InvariantError, match="recorded with 1 inputs"):
        recording.replay(inputs=[])
    x.set_(torch.zeros(8).untyped_storage(), 0, (8,))
    with pytest.raises(InvariantError, match="write new values into the recorded tensor"):
        recording.replay()


def test_debug_checks_the_arguments_of_boundary_ops() -> None:
    kept: list[Tensor] = []

    def run(boundary: BoundaryHandler) -> Tensor:
        y = torch.zeros(4) + 1
        kept.append(y)
        boundary("op", (y,), {})
        return y * 1

    recording = record(run, lambda *call: None, capture_boundary_ops=False, pool=TapePool(), debug=True)
    recording.replay()
    kept[-1].set_(torch.zeros(4).untyped_storage(), 0, (4,))
    with pytest.raises(InvariantError, match="moved since it was recorded"):
        recording.replay()


def test_an_error_while_recording_ends_the_recording() -> None:
    pool, runs = TapePool(), []

    def run(boundary: BoundaryHandler) -> Tensor:
        runs.append(1)
        if len(runs) == 2:
            raise RuntimeError("out of memory")
        return torch.zeros(1) + 1

    with pytest.raises(RuntimeError, match="out of memory"):
        record(run, call_op, capture_boundary_ops=True, pool=pool)
    assert pool.events == ["enter", "begin", "exit"] and pool.tape is None
    assert record(run, call_op, capture_boundary_ops=True, pool=pool).num_segments == 1


def test_a_step_that_has_run_before_is_only_recorded() -> None:
    pool, runs = TapePool(), []

    def run(boundary: BoundaryHandler) -> Tensor:
        runs.append(pool.tape is not None)
        return torch.zeros(1) + 1

    recording = record(run, call_op, capture_boundary_ops=True, pool=pool, warm_up=False)
    assert runs == [True] and pool.events == ["enter, loading", "begin", "end", "exit"]
    assert recording.replay().tolist() == [1]


@pytest.mark.parametrize("capture_boundary_ops", [True, False])
def test_step_that_fails_to_record_is_run_once_first(capture_boundary_ops: bool) -> None:
    """As where a kernel must be loaded: what was recorded until then is forgotten."""
    pool, runs, attended = TapePool(), [], []

    def run(boundary: BoundaryHandler) -> Tensor:
        runs.append(pool.tape is not None)
        y = torch.zeros(4) + 1
        boundary("attention", (y,), {})
        if len(runs) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return y * 2

    boundary = lambda op, args, kwargs: attended.append(args[0].tolist())  # noqa: E731
    recording = record(run, boundary, capture_boundary_ops=capture_boundary_ops, pool=pool, warm_up=False)
    assert runs == [True, False, True] and pool.tape is None
    assert [event for event in pool.events if "enter" in event] == ["enter, loading", "enter"]
    assert recording.num_segments == (1 if capture_boundary_ops else 2)
    attended.clear()
    assert recording.replay().tolist() == [2] * 4 and len(attended) == (0 if capture_boundary_ops else 1)


def test_step_that_fails_to_record_twice_is_an_error() -> None:
    runs: list[int] = []

    def run(boundary: BoundaryHandler) -> Tensor:
        runs.append(1)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        record(run, call_op, capture_boundary_ops=True, pool=TapePool(), warm_up=False)
    assert len(runs) == 2
