"""A rank with control calls of a test: run with `WorkerPool("tests.engine.ranks.failing_worker:run")`."""

from __future__ import annotations

import time
from typing import Any

from torchweave.distributed.worker_group import Channel
from torchweave.engine.control.calls import CALLS, ControlCall
from torchweave.engine.control.rank import Rank
from torchweave.engine.startup.rank_worker import WorkerTask, run_worker


def fail_on(rank: Rank, number: int, weights: bytes = b"", seconds: float = 0.0) -> Any:
    """Take some time, then fail on one rank; the others return their number and the size of what they were sent."""
    time.sleep(seconds)
    if rank.number == number:
        raise OSError("No space left on device")
    return rank.number, len(weights)


def unpicklable(rank: Rank) -> Any:
    """A result that only the leader can return."""
    return lambda: rank


def register() -> None:
    CALLS["fail_on"] = ControlCall(rank=fail_on)
    CALLS["unpicklable"] = ControlCall(rank=unpicklable)


def run(channel: Channel, task: WorkerTask) -> None:
    """Run a rank with these calls."""
    register()
    run_worker(channel, task)
