"""A collective kernel that times out waiting for another rank: the leader raises and returns no tokens."""

from __future__ import annotations

import gc
import os
import sys
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ops.collectives.collective_cases import Mirror
from torchweave.config.options import EngineConfig, TorchCompileConfig
from torchweave.distributed.process_groups import TENSOR, ProcessGroups
from torchweave.distributed.worker_group import Channel, RankFailure
from torchweave.engine.ranks.leader_runner import LeaderRunner, SentStep
from torchweave.engine.startup import rank_worker as worker
from torchweave.engine.startup.open import end_ranks_with
from torchweave.ops.collectives.op import register_communicator


class GaveUp(Mirror):
    """A group whose kernels time out after the first step."""

    steps = 0

    def fault(self) -> Any:
        self.steps += 1
        return "rank 0 gave up" if self.steps > 1 else None


def fail_and_raise(error: Exception) -> None:
    raise error


def test_kernel_timeout_fails_the_step() -> None:
    runner: Any = SimpleNamespace(
        state=None,
        plan=SimpleNamespace(config=SimpleNamespace(torch_compile_config=TorchCompileConfig())),
        ready=lambda handle: True,
        collect=lambda handle: handle,
    )
    worker_group: Any = SimpleNamespace(check=lambda: None, fail_and_raise=fail_and_raise)
    runner_of_leader = LeaderRunner(runner, worker_group, ProcessGroups(size=2, tensor_parallel_size=2))
    register_communicator(TENSOR, GaveUp())
    try:
        launched: Any = object()
        sent = SentStep(step=launched, launched=launched)
        assert runner_of_leader.collect(sent) is launched
        with pytest.raises(RankFailure, match="gave up"):
            runner_of_leader.collect(sent)
    finally:
        register_communicator(TENSOR, None)
    assert ProcessGroups.single_rank().fault() is None


def test_ranks_end_with_the_last_that_can_launch_a_step() -> None:
    runner: Any = SimpleNamespace(
        state=None, plan=SimpleNamespace(config=SimpleNamespace(torch_compile_config=TorchCompileConfig()))
    )
    steps = LeaderRunner(runner, SimpleNamespace(), ProcessGroups(size=2, tensor_parallel_size=2))  # type: ignore[arg-type]
    closed: list[int] = []
    end_ranks_with(steps, SimpleNamespace(close=lambda: closed.append(1)))  # type: ignore[arg-type]
    held = [steps]  # as a loop that still runs holds it
    del steps
    gc.collect()
    assert not closed
    held.clear()
    gc.collect()
    assert closed == [1]


def test_rank_exits_quietly_when_its_leader_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    channel = Channel(theirs)

    def refuse(*_: object) -> None:
        ours.close()
        raise ValueError("cannot be divided")

    monkeypatch.setattr(worker, "_run_worker", refuse)
    monkeypatch.setattr(
        worker,
        "LeaderConnection",
        lambda channel, _: SimpleNamespace(report_failure=lambda *_: channel.send(b"f")),
    )
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        worker.run_worker(channel, worker.WorkerTask(EngineConfig("demo"), 1, "cpu"))
    assert ended.value.code == 1
