"""Processes of a server stand apart from its group, and what they start does as other processes do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from torchweave.serving.processes import spawn, vital


def end_a_child() -> None:
    """Ends with 0 where a process can be started and ended from here, as the builders of kernels are."""
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    child.terminate()
    assert child.wait(20) == -signal.SIGTERM


def stand_apart(group: int) -> None:
    assert os.getpgid(0) == os.getpid() != group
    for each in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), each)


def fail_behind() -> None:
    async def fail() -> None:
        raise RuntimeError("nobody awaits this")

    async def wait() -> None:
        task = vital(fail())
        await asyncio.sleep(60)
        await task

    asyncio.run(wait())


@pytest.mark.parametrize("number", [1, 2])
def test_what_they_start_can_be_ended(number: int) -> None:
    """The first process of all was started otherwise than later ones, which hung here."""
    process = spawn(end_a_child, name=f"tw-test-{number}")
    process.join(60)
    assert process.exitcode == 0


def test_a_fault_that_nobody_awaits_ends_one_and_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    process = spawn(fail_behind, name="tw-test")
    process.join(30)
    assert process.exitcode == 1
    assert "RuntimeError: nobody awaits this" in capfd.readouterr().err


def test_signals_do_not_end_them() -> None:
    process = spawn(stand_apart, os.getpgid(0), name="tw-test")
    process.join(60)
    assert process.exitcode == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), "nor does the mask stay here"
