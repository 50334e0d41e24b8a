"""Side streams have one owner at a time and are reused after it."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass

import pytest
import torch

from torchweave.utils import cuda_streams as side_streams
from torchweave.utils.cuda_streams import side_stream, wait_until_idle


class Owner:
    pass


@dataclass(frozen=True)
class Stream:
    stream_id: int


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(numbers)))
    monkeypatch.setattr(side_streams, "_free", {})


def test_side_streams_are_reused_after_their_owner_dies() -> None:
    here, there = torch.device("cuda:0"), torch.device("cuda:1")
    first, second = Owner(), Owner()
    streams = {side_stream(first, here), side_stream(first, here)}
    others = {side_stream(second, here), side_stream(second, there)}
    assert len(streams | others) == 4, "two owners share none"
    del first
    third = Owner()
    assert side_stream(third, there) not in streams, "they stay with their device"
    assert {side_stream(third, here), side_stream(third, here)} == streams
    assert side_stream(third, here) not in streams | others


def test_streams_are_assigned_in_request_order() -> None:
    device = torch.device("cuda:0")
    runner, lanes = Owner(), Owner()
    uses = [side_stream(runner, device), side_stream(lanes, device), side_stream(lanes, device)]
    del lanes
    del runner
    again = Owner()
    assert [side_stream(again, device) for _ in range(3)] == uses


class Busy:
    """A stream whose work ends when another thread of the process has run."""

    def __init__(self, fails: bool = False) -> None:
        self.ended, self.fails = threading.Event(), fails

    def query(self) -> bool:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.ended.is_set()


def test_wait_until_idle_releases_the_gil() -> None:
    stream = Busy()
    threading.Timer(0.05, stream.ended.set).start()
    assert wait_until_idle(stream, 10.0)  # type: ignore[arg-type]
    begin = time.monotonic()
    assert not wait_until_idle(Busy(), 0.05)  # type: ignore[arg-type]
    assert time.monotonic() - begin >= 0.05
    assert wait_until_idle(Busy(fails=True), 10.0)  # type: ignore[arg-type]
