"""A server over two ranks: when one dies, clients get an error and no process remains."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import openai
import pytest

from tests.serving.running import LONG, ServerProcess, children, serving, wait_until

LIMIT = 60.0


def other_rank(running: ServerProcess, leader: int) -> int:
    """The rank that the engine process has started."""
    (found,) = [
        pid
        for pid in children(leader)
        if b"torchweave.utils.child_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


def is_gone(pid: int) -> bool:
    return wait_until(lambda: not Path(f"/proc/{pid}").exists(), LIMIT)


def test_dead_rank_gives_clients_an_error() -> None:
    with serving("--tp", "2") as running:
        leader = running.engine_pid()
        other = other_rank(running, leader)
        answer = running.client().completions.create(model="demo", prompt="1+1=", max_tokens=4, temperature=0)
        assert answer.choices[0].text
        stream = running.client().completions.create(model="demo", prompt="1+1=", stream=True, **LONG)
        next(stream)
        begin = time.monotonic()
        os.kill(other, signal.SIGKILL)
        with pytest.raises(
            openai.APIError, match=r"Rank 1 \(process \d+\) has ended unexpectedly \(killed by SIGKILL\)"
        ):
            list(stream)
        assert is_gone(leader) and is_gone(other)
        assert running.process.wait(LIMIT) == 1 and time.monotonic() - begin < LIMIT
