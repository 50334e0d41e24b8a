"""Leader and workers: a rank that exits or sends no heartbeat ends all ranks."""

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

from tests.distributed.light import WORKER_ENTRYPOINT
from torchweave.distributed.launchers.local import LocalWorker, WorkerPool
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.distributed.worker_group import MessageKind, RankFailure, WorkerGroup
from torchweave.engine.ranks.leader_runner import Executor

LIMIT = 60.0


@contextmanager
def worker_group_of(*tasks: str, rank_timeout: float = 30.0) -> Iterator[tuple[WorkerGroup, list[int]]]:
    """A crew, and the process of each member."""
    workers = WorkerPool(WORKER_ENTRYPOINT).assign(tasks)
    worker_group = WorkerGroup(workers, rank_timeout)
    try:
        yield worker_group, [process_of(worker) for worker in workers]
    finally:
        worker_group.close()


def process_of(worker: LocalWorker) -> int:
    found = re.fullmatch(r"Rank \d+ \(process (\d+)\)", worker.name)
    assert found
    return int(found[1])


def is_gone(pid: int) -> bool:
    end = time.monotonic() + LIMIT
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return not Path(f"/proc/{pid}").exists()


def wait_for_failure(worker_group: WorkerGroup) -> RankFailure:
    cause = worker_group.root_cause(RuntimeError("something that follows from it"))
    assert isinstance(cause, RankFailure)
    return cause


def test_workers_get_the_same_messages_and_exit_on_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchweave.distributed.worker_group._END_SECONDS", 120.0)
    with worker_group_of("", "") as (worker_group, processes):
        worker_group.wait_until_joined()
        worker_group.wait_until_built()
        worker_group.send(MessageKind.STEP, b"one")
        assert worker_group.answers(MessageKind.DIGEST, LIMIT) == [b"one", b"one"]
        begin = time.monotonic()
        worker_group.close()
        assert time.monotonic() - begin < 60 and worker_group.failure is None  # they ended by themselves
        assert all(map(is_gone, processes))


def test_worker_pool_assigns_tasks_later_and_ends_unused_workers():
    with WorkerPool(WORKER_ENTRYPOINT, 2) as worker_pool:
        first, second = (process_of(worker) for worker in worker_pool._workers)
        worker_group = WorkerGroup(worker_pool.assign(["one task"]), 30.0)
        assert is_gone(second)
    try:
        worker_group.wait_until_built()
        worker_group.send(MessageKind.STEP, b"one")
        assert worker_group.answers(MessageKind.DIGEST, LIMIT) == [b"one"] and Path(f"/proc/{first}").exists()
    finally:
        worker_group.close()
    with pytest.raises(ValueError, match="refused"), WorkerPool(WORKER_ENTRYPOINT, 1) as worker_pool:
        unused = process_of(worker_pool._workers[0])
        raise ValueError("refused")
    assert is_gone(unused)


def test_worker_that_died_in_the_pool_fails_the_group():
    with WorkerPool(WORKER_ENTRYPOINT, 1) as worker_pool:
        pid = process_of(worker_pool._workers[0])
        os.kill(pid, signal.SIGKILL)
        worker_pool._workers[0].wait(LIMIT)
        worker_group = WorkerGroup(worker_pool.assign(["one", "two"]), 30.0)
    with pytest.raises(RankFailure, match=rf"Rank 1 \(process {pid}\) has ended unexpectedly \(killed by SIGKILL\)"):
        worker_group.wait_until_built()
    worker_group.close()


def test_executor_closes_once():
    released: list[str] = []
    executor = Executor(ProcessGroups.single_rank(), WorkerGroup([], 8.0), HashStore(), lambda: released.append("room"))
    executor.close()
    executor.close()  # an engine that was shut down is dropped later, when another one may be there
    assert released == ["room"]


def test_killed_worker_ends_the_group():
    with worker_group_of("", "hang") as (worker_group, processes):
        worker_group.wait_until_built()
        failures: list[RankFailure] = []
        worker_group.on_failure(failures.append)
        os.kill(processes[0], signal.SIGKILL)
        expected = rf"Rank 1 \(process {processes[0]}\) has ended unexpectedly \(killed by SIGKILL\)"
        assert re.fullmatch(expected, str(wait_for_failure(worker_group)))
        assert all(map(is_gone, processes))
        with pytest.raises(RankFailure, match="Rank 1"):
            worker_group.send(MessageKind.STEP, b"two")
        end = time.monotonic() + LIMIT
        while not failures and time.monotonic() < end:
            time.sleep(0.01)
        assert failures == [worker_group.failure]


def test_rank_without_heartbeat_counts_as_dead_after_the_timeout():
    with worker_group_of("", "", rank_timeout=2.0) as (worker_group, processes):
        worker_group.wait_until_built()
        time.sleep(2.5)  # silence is about signs of life, not about work
        worker_group.check()
        os.kill(processes[1], signal.SIGSTOP)
        assert str(wait_for_failure(worker_group)) == f"Rank 2 (process {processes[1]}) has not answered for 2 s"
        assert all(map(is_gone, processes))


def test_errors_and_crashes_of_a_worker_are_reported():
    with (
        worker_group_of("refuse") as (worker_group, _),
        pytest.raises(RankFailure, match=r"^this cannot be; do that\.$") as refused,
    ):
        worker_group.wait_until_built()
    assert refused.value.user_error
    with (
        worker_group_of("crash") as (worker_group, _),
        pytest.raises(RankFailure, match=r"unexpectedly \(exit code 3\)") as crashed,
    ):
        worker_group.wait_until_built()
    assert not crashed.value.user_error


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_exit_with_their_leader(how: signal.Signals):
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
