"""A second signal ends a process whose interpreter is busy, and a process that handles the first goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import signal, sys
from torchweave.utils.signals import reset_after_next
print(reset_after_next(signal.SIGTERM))
handled = []
def handle(number, frame):
    handled.append(number)
    signal.signal(signal.SIGTERM, handle)
    reset_after_next(signal.SIGTERM)
    print(len(handled), flush=True)
signal.signal(signal.SIGTERM, handle)
print(reset_after_next(signal.SIGTERM), flush=True)
if sys.argv[1] == "busy":
    sum(range(10**15))  # one call into C
while len(handled) < 3:
    signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone resets signals here")
@pytest.mark.parametrize(("kind", "status"), [("busy", -signal.SIGTERM), ("free", 0)])
def test_the_second_signal_ends_a_busy_process_alone(kind: str, status: int) -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT, kind], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() + process.stdout.readline() == "True\nTrue\n"
        for number in range(1, 4 if kind == "free" else 3):
            time.sleep(0.3)  # two signals that are pending at the same time are one
            process.send_signal(signal.SIGTERM)
            if kind == "free":
                assert process.stdout.readline() == f"{number}\n"
        assert process.wait(30) == status
