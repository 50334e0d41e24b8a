"""The other ranks as their leader sees them, and the leader as they do: whoever ends or falls silent ends all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import HashStore

from tests.distributed.light import WORK
from torchweave.distributed import channel
from torchweave.distributed.launchers.local import LocalMember, WaitingRanks
from torchweave.distributed.process_groups import World
from torchweave.distributed.worker_group import Crew, RankFailure
from torchweave.engine.ranks.leader_runner import Lead

LIMIT = 10.0


@contextmanager
def crew_of(*tasks: str, rank_timeout: float = 30.0) -> Iterator[tuple[Crew, list[int]]]:
    """A crew, and the process of each member."""
    members = WaitingRanks(WORK).give(tasks)
    crew = Crew(members, rank_timeout)
    try:
        yield crew, [process_of(member) for member in members]
    finally:
        crew.close()


def process_of(member: LocalMember) -> int:
    found = re.fullmatch(r"Rank \d+ \(process (\d+)\)", member.name)
    assert found
    return int(found[1])


def is_gone(pid: int) -> bool:
    end = time.monotonic() + LIMIT
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return not Path(f"/proc/{pid}").exists()


def wait_for_failure(crew: Crew) -> RankFailure:
    cause = crew.cause_of(RuntimeError("something that follows from it"))
    assert isinstance(cause, RankFailure)
    return cause


def test_every_rank_hears_the_same_and_ends_when_told():
    with crew_of("", "") as (crew, processes):
        crew.wait_until_joined()
        crew.wait_until_built()
        crew.send(channel.STEP, b"one")
        assert crew.digests(LIMIT) == [b"one", b"one"]
        begin = time.monotonic()
        crew.close()
        assert time.monotonic() - begin < 4 and crew.failure is None  # they ended by themselves
        assert all(map(is_gone, processes))


def test_ranks_that_wait_get_their_tasks_later_and_the_rest_end():
    with WaitingRanks(WORK, 2) as waiting:
        first, second = (process_of(member) for member in waiting._members)
        crew = Crew(waiting.give(["one task"]), 30.0)
        assert is_gone(second)
    try:
        crew.wait_until_built()
        crew.send(channel.STEP, b"one")
        assert crew.digests(LIMIT) == [b"one"] and Path(f"/proc/{first}").exists()
    finally:
        crew.close()
    with pytest.raises(ValueError, match="refused"), WaitingRanks(WORK, 1) as waiting:
        unused = process_of(waiting._members[0])
        raise ValueError("refused")
    assert is_gone(unused)


def test_a_rank_that_ended_while_it_waited_is_the_failure_of_all():
    with WaitingRanks(WORK, 1) as waiting:
        pid = process_of(waiting._members[0])
        os.kill(pid, signal.SIGKILL)
        waiting._members[0].wait(LIMIT)
        crew = Crew(waiting.give(["one", "two"]), 30.0)
    with pytest.raises(RankFailure, match=rf"Rank 1 \(process {pid}\) has ended unexpectedly \(killed by SIGKILL\)"):
        crew.wait_until_built()
    crew.close()


def test_the_end_comes_once():
    released: list[str] = []
    lead = Lead(World.single(), Crew([], 8.0), HashStore(), lambda: released.append("room"))
    lead.close()
    lead.close()  # an engine that was shut down is dropped later, when another one may be there
    assert released == ["room"]


def test_a_killed_rank_takes_the_others_with_it():
    with crew_of("", "hang") as (crew, processes):
        crew.wait_until_built()
        heard: list[RankFailure] = []
        crew.on_failure(heard.append)
        os.kill(processes[0], signal.SIGKILL)
        expected = rf"Rank 1 \(process {processes[0]}\) has ended unexpectedly \(killed by SIGKILL\)"
        assert re.fullmatch(expected, str(wait_for_failure(crew)))
        assert all(map(is_gone, processes))
        with pytest.raises(RankFailure, match="Rank 1"):
            crew.send(channel.STEP, b"two")
        end = time.monotonic() + LIMIT
        while not heard and time.monotonic() < end:
            time.sleep(0.01)
        assert heard == [crew.failure]


def test_a_stopped_rank_counts_as_gone_once_it_was_silent_for_long():
    with crew_of("", "", rank_timeout=2.0) as (crew, processes):
        crew.wait_until_built()
        time.sleep(2.5)  # silence is about signs of life, not about work
        crew.check()
        os.kill(processes[1], signal.SIGSTOP)
        assert str(wait_for_failure(crew)) == f"Rank 2 (process {processes[1]}) has not answered for 2 s"
        assert all(map(is_gone, processes))


def test_what_a_rank_refuses_and_how_it_crashes_are_told():
    with crew_of("refuse") as (crew, _), pytest.raises(RankFailure, match=r"^this cannot be; do that\.$") as refused:
        crew.wait_until_built()
    assert refused.value.asked
    with crew_of("crash") as (crew, _), pytest.raises(RankFailure, match=r"unexpectedly \(exit code 3\)") as crashed:
        crew.wait_until_built()
    assert not crashed.value.asked


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_end_with_their_leader(how: signal.Signals):
    command = [sys.executable, "-m", "tests.distributed.light"]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert leader.stdout is not None
        found = re.search(r"process (\d+)", leader.stdout.readline())
        assert found
        os.kill(leader.pid, how)
        other = Path(f"/proc/{found[1]}/stat")  # a stopped leader does not bury its child
        end = time.monotonic() + LIMIT
        while other.exists() and other.read_text().split()[2] != "Z" and time.monotonic() < end:
            time.sleep(0.01)
        assert not other.exists() or other.read_text().split()[2] == "Z"
    finally:
        leader.kill()
        leader.wait()
