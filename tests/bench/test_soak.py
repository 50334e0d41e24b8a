"""`bench/serving/soak.py`: malformed responses and processes that exit during the run."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "serving" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


class Server:
    """Responds with an empty body, then with an error, then correctly."""

    def __init__(self) -> None:
        self.asked = 0

    async def post(self, path: str, body: bytes, on_body: Any) -> int:
        self.asked += 1
        await asyncio.sleep(0)
        if self.asked == 2:
            raise ConnectionError("gone")
        if self.asked > 2:
            on_body(b"data: [DO", 0.0)
            on_body(b"NE]\n\n", 0.0)
        return 200


def test_malformed_response_counts_as_failed_and_the_run_continues(script: ModuleType):
    soak = script.Soak(Server(), "demo", (1, 2), (1, 2))
    asyncio.run(soak.stream(time.monotonic() + 0.1))
    assert soak.counts["failed"] == 2 == len(soak.faults)
    assert soak.faults == ["200: ", "ConnectionError('gone')"]
    assert soak.counts["whole"] > 1 and soak.counts["begun"] == sum(soak.counts.values()) - soak.counts["begun"]


def test_exited_process_has_zero_memory(script: ModuleType):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert script.memory(ended.pid) == {}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert any(name.endswith(f".{child.pid}") for name in script.memory(child.pid))
