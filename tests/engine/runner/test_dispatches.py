"""Host cost of a decode step: the number of torch dispatches does not grow with the batch."""

from __future__ import annotations

import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
        assert engine.runner.record_decode(2, TapePool()).output.is_inference()
        assert engine.runner.record_mixed(8, TapePool()).output.is_inference()
    finally:
        engine.runner.release_graphs()


def test_recordings_are_released_after_their_replays_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying a running graph blocks with the GIL held, so the thread that would end it could not run."""
    stream = SimpleNamespace(query=lambda: False)
    engine.runner.record_decode(2, TapePool())
    monkeypatch.setattr(engine.runner, "_stream", stream)
    monkeypatch.setattr("torchweave.engine.runner.model_runner._DRAIN_SECONDS", 0.02)
    engine.runner.release_graphs()
    assert engine.runner._decode_graphs, "it runs"
    stream.query = lambda: True
    engine.runner.release_graphs()
    assert not engine.runner._decode_graphs
