"""What processes of test_processes.py do: ones of a moment, since this module imports neither torch nor a client."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

from torchweave.serving.ipc.processes import critical_task


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
        task = critical_task(fail())
        await asyncio.sleep(60)
        await task

    asyncio.run(wait())
