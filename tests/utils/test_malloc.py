"""Large allocations are returned to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

_BODIES = """
import re, sys
from torchweave.utils.malloc import return_large_allocations
if sys.argv[1] == "returned" and not return_large_allocations():
    sys.exit(3)
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) // 1024
before = resident()
for _ in range(3):
    bodies = [bytearray(24_000_000 + index) for index in range(4)]
    texts = [bytes(body).decode() for body in bodies]
    kept = [bytearray(200_000) for _ in range(3)]
    del bodies, texts
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and sets an option of glibc")
def test_large_allocations_are_returned() -> None:
    def mib(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", _BODIES, how], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode == 3:
            pytest.skip("another C library")
        assert done.returncode == 0, done.stderr[-1000:]
        return int(done.stdout)

    assert mib("returned") < 10 < mib("kept")
