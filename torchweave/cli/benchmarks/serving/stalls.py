"""Whether the machine itself stood still while it was measured: how long a process overslept that sleeps a millisecond at a time.

Where cores are shared, or lent by a hypervisor, they are taken away for some milliseconds now and then. Clients see that as a
server that stalls, and p99 between tokens tells nothing else. Run as a script, with nothing but the standard library, this file is
that process: it watches until its input ends, and prints what it saw.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from types import TracebackType

_NAP = 0.001
_LONG = 2.0  # milliseconds; below that, waking up on a busy machine takes as long
_PATIENCE = 10.0


class Watch:
    """A context in which the machine is watched.

    Attributes:
        seen: `longest_ms` that the process overslept, and how often it did by more than 2 ms (`over_2_ms`); empty until the context
            ends, and where the process cannot run.
    """

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Watch:
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has begun
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        try:
            text, _ = self._process.communicate(timeout=_PATIENCE)
            self.seen = json.loads(text)
        except (subprocess.TimeoutExpired, ValueError):  # what it saw is no part of the figures
            self._process.kill()
            self._process.wait()


def summary(overslept: Iterable[float]) -> dict[str, float]:
    """Of naps, each of which was so many seconds too long."""
    late = [seconds * 1e3 for seconds in overslept]
    return {"longest_ms": round(max(late, default=0.0), 3), "over_2_ms": sum(each > _LONG for each in late)}


def _naps() -> Iterable[float]:
    last = time.perf_counter()
    print("watching", flush=True)
    while True:
        ended = select.select([sys.stdin], [], [], _NAP)[0]
        now = time.perf_counter()
        if now - last > 2 * _NAP:
            yield now - last - _NAP
        last = now
        if ended:
            return


if __name__ == "__main__":
    print(json.dumps(summary(_naps())))
