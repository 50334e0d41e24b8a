"""Host cost of a decode step: calls of Python, and torch dispatches, whose number does not grow with the batch."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchweave
from tests.compiler.runtime.tape import TapePool
from torchweave.config.options import EngineConfig, TorchCompileConfig
from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.engine.startup.build import Engine, build
from torchweave.report import Report
from torchweave.utils.openmp import release_workers


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", params=["cpp", "torch"])
def engine(request: pytest.FixtureRequest) -> Engine:
    compile_config = TorchCompileConfig(enable_inductor=False, compile_cache=False)
    config = EngineConfig("demo", device="cpu", attention_backend=request.param, torch_compile_config=compile_config)
    return build(config, Report(show=False))


def step(engine: Engine) -> int:
    """Runs one step; returns how many of its rows read prompts."""
    formed = engine.scheduler.schedule()
    assert formed is not None
    engine.scheduler.update(formed, engine.runner.collect(engine.runner.launch(formed)))
    return len(formed.chunks)


def count(engine: Engine, rows: int, temperature: float) -> Counter[str]:
    """Torch calls of one decode step with `rows` requests of different lengths."""
    for row in range(rows):
        prompt = np.arange(3, 10 + row, dtype=np.int32)
        params = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)
        engine.scheduler.add(InferenceRequest(row, prompt, params), seed=row)
    with torch.inference_mode():
        while step(engine):
            pass
        with Counting() as counting:
            assert step(engine) == 0
    for row in range(rows):
        engine.scheduler.cancel(row)
    assert engine.scheduler.num_active == 0
    return counting.calls


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_torch_calls_of_a_decode_step_do_not_grow_with_the_batch(engine: Engine, temperature: float) -> None:
    one, few, many = (count(engine, rows, temperature) for rows in (1, 8, 32))
    assert one.total() > 50, "a whole model cannot take so few"
    assert one.total() >= few.total() == many.total()
    assert few == many


PACKAGE = str(Path(torchweave.__file__).parent)
PIECES = os.path.join(PACKAGE, "compiler", "codegen", "pieces.py")


class Calls:
    """A profile hook that counts calls of the package's functions, without those within pieces, which Inductor compiles."""

    def __init__(self) -> None:
        self.by_function: Counter[tuple[str, str]] = Counter()
        self._piece: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if self._piece is not None:
            if event == "return" and frame is self._piece:
                self._piece = None
        elif event == "call" and name == PIECES:
            self._piece = frame
        elif event == "call" and name.startswith(PACKAGE):
            self.by_function[name, frame.f_code.co_qualname] += 1

    @property
    def files(self) -> set[str]:
        return {name for name, _ in self.by_function}


def calls_of_decode_step(engine: Engine, **params: Any) -> Calls:
    """Calls of one decode step of one request, with its scheduling and its update."""
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | params))
    engine.scheduler.add(InferenceRequest(0, np.arange(3, 10, dtype=np.int32), sampling), seed=0)
    while step(engine):
        pass
    step(engine)
    calls, before = Calls(), sys.getprofile()
    sys.setprofile(calls)
    try:
        assert step(engine) == 0
    finally:
        sys.setprofile(before)
    engine.scheduler.cancel(0)
    assert engine.scheduler.num_active == 0
    return calls


def test_a_plain_decode_step_enters_no_part_and_makes_few_calls(engine: Engine) -> None:
    calls = calls_of_decode_step(engine)
    assert not {name for name in calls.files if Path(name).parent.name == "parts"}
    if engine.plan.attention_backend == "cpp":  # the torch backend is a reference
        assert calls.by_function.total() <= 70, calls.by_function
        assert len(calls.files) <= 13, calls.files


@pytest.mark.parametrize(
    ("params", "entered"),
    [({"logprobs": 1}, {"logprobs"}), ({"presence_penalty": 0.5}, {"processors"})],
    ids=["logprobs", "penalty"],
)
def test_a_step_enters_the_parts_that_its_requests_use(
    engine: Engine, params: dict[str, Any], entered: set[str]
) -> None:
    found = {Path(name) for name in calls_of_decode_step(engine, **params).files}
    parts = {path.stem for path in found if path.parent.name == "parts"}
    assert parts - {"base"} == entered
    assert {path.parent.parent.name for path in found if path.stem in entered} >= {"scheduler", "runner"}


def test_openmp_workers_are_released() -> None:
    """A step runs on a thread of its own, whose workers would sleep between loops if these were still there."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1 << 20).exp_()
        working = len(os.listdir("/proc/self/task"))
        if not release_workers():
            pytest.skip("this torch does not use GNU OpenMP")
        assert len(os.listdir("/proc/self/task")) < working
        assert torch.ones(1 << 20).sum() == 1 << 20, "they come back"
    finally:
        torch.set_num_threads(before)


def test_steps_are_recorded_in_the_mode_in_which_they_run(engine: Engine) -> None:
    """Outside inference mode each call of an op of ours is four more calls of Python."""
    try:
        assert engine.runner.recordings.record_decode(2, TapePool()).output.is_inference()
        assert engine.runner.recordings.record_mixed(8, TapePool()).output.is_inference()
    finally:
        engine.runner.recordings.release()


def test_recordings_are_released_after_their_replays_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying a running graph blocks with the GIL held, so the thread that would end it could not run."""
    stream = SimpleNamespace(query=lambda: False)
    engine.runner.recordings.record_decode(2, TapePool())
    monkeypatch.setattr(engine.runner.recordings, "_stream", stream)
    monkeypatch.setattr("torchweave.engine.runner.recordings._DRAIN_SECONDS", 0.02)
    engine.runner.recordings.release()
    assert engine.runner.recordings.decode, "it runs"
    stream.query = lambda: True
    engine.runner.recordings.release()
    assert not engine.runner.recordings.decode
