"""Child processes: arguments, names, exit texts, signals, and the end of either process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from torchweave.utils.bytecode import bytecode_in
from torchweave.utils.child_process import ChildProcess, exit_with_parent

LIMIT = 30.0


def exit_with(code: int) -> None:
    sys.exit(code)


def send_facts(fd: int, secret: str) -> None:
    facts = (secret, Path("/proc/self/comm").read_text().strip(), sys.path, os.getpgid(0), sys.pycache_prefix)
    Connection(fd).send(facts)


def sleep(fd: int) -> None:
    with Connection(fd) as connection:
        connection.send(os.getpid())
    time.sleep(2 * LIMIT)


def ignore_then_exit(code: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    sleeper.terminate()
    assert sleeper.wait(LIMIT) == -signal.SIGTERM, "processes that a child starts handle signals as usual"
    sys.exit(code)


def watch_parent(fd: int, path: str) -> None:
    exit_with_parent(Path(path).touch)
    sleep(fd)


def start_and_die(fd: int, path: str) -> None:
    child = ChildProcess(watch_parent, fd, path, pass_fds=[fd])
    Connection(fd).poll(None)
    assert child.is_alive()
    os.kill(os.getpid(), signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_gets_arguments_path_name_group_and_bytecode_folder(tmp_path: Path):
    ours, theirs = Pipe()
    with theirs, bytecode_in(tmp_path):
        child = ChildProcess(
            send_facts, theirs.fileno(), "secret" * 50_000, name="tw-test", pass_fds=[theirs.fileno()], new_group=True,
        )  # fmt: skip
    assert ours.recv() == ("secret" * 50_000, "tw-test", sys.path, child.pid, str(tmp_path))
    assert child.exit_text(LIMIT) == "exit code 0"


def test_exit_text_of_codes_and_signals():
    ours, theirs = Pipe()
    assert ChildProcess(exit_with, 3).exit_text(LIMIT) == "exit code 3"
    child = ChildProcess(sleep, theirs.fileno(), pass_fds=[theirs.fileno()])
    assert ours.recv() == child.pid and child.is_alive()
    assert child.exit_text(0.0) == "" and not child.wait(0.0)
    assert not select.select([child], [], [], 0)[0]
    os.kill(child.pid, signal.SIGSTOP)
    child.kill_and_wait()
    assert select.select([child], [], [], LIMIT)[0]
    assert child.exit_text() == "killed by SIGKILL" and not child.is_alive()


def test_ignored_signals_reach_neither_the_child_nor_this_process():
    child = ChildProcess(ignore_then_exit, 4, ignored_signals=(signal.SIGINT, signal.SIGTERM))
    child.terminate()  # also before its handlers are installed
    assert child.exit_text(LIMIT) == "exit code 4"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), "the mask does not stay here"


def test_a_child_ends_with_its_parent(tmp_path: Path):
    ours, theirs = Pipe()
    mark = tmp_path / "cleaned"
    with theirs:
        parent = ChildProcess(start_and_die, theirs.fileno(), str(mark), pass_fds=[theirs.fileno()])
    grandchild = ours.recv()
    ours.send(None)
    assert parent.exit_text(LIMIT) == "killed by SIGKILL"
    end = time.monotonic() + LIMIT
    while is_running(grandchild):
        assert time.monotonic() < end, "the child outlived its parent"
        time.sleep(0.01)
    assert mark.exists(), "cleanup runs first"
