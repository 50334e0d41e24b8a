"""Processes of a server stand apart from its group, and what they start does as other processes do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from torchweave.serving.processes import spawn


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


@pytest.mark.parametrize("number", [1, 2])
def test_what_they_start_can_be_ended(number: int) -> None:
    """The first process of all was started otherwise than later ones, which hung here."""
    process = spawn(end_a_child, name=f"tw-test-{number}")
    process.join(60)
    assert process.exitcode == 0


def test_signals_do_not_end_them() -> None:
    process = spawn(stand_apart, os.getpgid(0), name="tw-test")
    process.join(60)
    assert process.exitcode == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), "nor does the mask stay here"
