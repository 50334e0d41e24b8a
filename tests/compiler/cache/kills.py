"""Cold starts that are killed once they have linked a library: the next start repairs what they left, and the one after it is warm.

    python -m tests.compiler.cache.kills              # twenty kills, some minutes
    python -m tests.compiler.cache.kills --kills 3

Every other kill empties or cuts a library, too, as a power loss does. Prints a line for each kill; exits with 1 if a start failed,
was wrong, or was not warm.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.compiler.cache.cold_starts import start

_POLL_SECONDS = 0.005
_LONGEST_DELAY = 3.0  # seconds from the first library to the kill
_START_SECONDS = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance, failed = random.Random(given.seed), 0
    for number in range(given.kills):
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder, "cache")
            killed = _kill(cache, chance.uniform(0, _LONGEST_DELAY))
            damaged = _damage(cache, chance) if number % 2 else ""
            second, third = _run(cache), _run(cache)
            fault = _fault(second, third)
            failed += bool(fault)
            libraries = f"{killed} libraries, {damaged or 'none'} damaged"
            print(
                f"{number + 1:3d}: {libraries}; second start {_short(second)}; third {_short(third)} {fault}",
                flush=True,
            )
    print(f"{given.kills} kills, {failed} faults")
    return 1 if failed else 0


def _fork(cache: Path, writing: int) -> int:
    """A start in a process group of its own, with what it says written to a pipe."""
    if (pid := os.fork()) == 0:
        os.setpgid(0, 0)
        os.dup2(writing, sys.stdout.fileno())
        try:
            start("", cache)
        finally:
            os._exit(0)
    return pid


def _libraries(cache: Path) -> list[Path]:
    """Those that were linked; names with a point are of files that are being written."""
    return sorted(path for path in cache.glob("**/*.main.so") if not path.name.startswith("."))


def _kill(cache: Path, delay: float) -> int:
    """Kill a cold start, and its compilers, `delay` seconds after its first library; returns how many it had linked."""
    reading, writing = os.pipe()
    pid = _fork(cache, writing)
    until = time.monotonic() + _START_SECONDS
    while not _libraries(cache) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    time.sleep(delay)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)
    return len(_libraries(cache))


def _damage(cache: Path, chance: random.Random) -> str:
    """Leave a library as a power loss may: empty, cut, or with zeros at its end; returns its name."""
    path = chance.choice(_libraries(cache))
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(chance.choice((b"", content[: len(content) // 2], content[:-4096] + bytes(4096))))
    return path.name


def _run(cache: Path) -> dict[str, Any]:
    """A start that nothing disturbs: what it did; empty if it failed."""
    reading, writing = os.pipe()
    pid = _fork(cache, writing)
    os.close(writing)
    with os.fdopen(reading) as said:
        lines = said.read().splitlines()
    os.waitpid(pid, 0)
    return json.loads(lines[-1]) if lines else {}


def _fault(second: dict[str, Any], third: dict[str, Any]) -> str:
    if not (second.get("right") and third.get("right")):
        return "WRONG"
    warm = third["graph"] == "cache" and set(third["pieces"]) == {"cache"} and not third["warnings"]
    return "" if warm else "NOT WARM"


def _short(facts: dict[str, Any]) -> str:
    if not facts:
        return "failed"
    warnings = f", {len(facts['warnings'])} warnings" if facts["warnings"] else ""
    return f"({facts['graph']}; {', '.join(facts['pieces'])}{warnings})"


if __name__ == "__main__":
    sys.exit(main())
