"""A server process on a free port, started as a user starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

ENGINE_NAME = "tw-engine-"
QUICK = ("--device", "cpu", "-O0", "--cpu_kv_cache_gib", "0.02", "--port", "0", "--quiet", "--api_server_count", "1")
"""On each machine the same; of options that are given twice the last one counts."""
LONG = {"max_tokens": 450, "temperature": 0, "extra_body": {"ignore_eos": True}}
"""Parameters of an answer that takes a while."""
SHORTER = LONG | {"max_tokens": 200}


@dataclass
class ServerProcess:
    """A server that takes requests."""

    url: str
    process: subprocess.Popen[str]

    def client(self, key: str = "none") -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=240, http_client=http)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """On a connection of its own. `verify=False`, here and in clients: certificates take 25 ms of CPU time to read."""
        return httpx.request(method, self.url + path, timeout=120, verify=False, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        return self.request("POST", path, content=json.dumps(body), headers=headers, **options)

    def engine_pid(self) -> int:
        """The engine process; of one that has just been started as soon as it has its name."""
        wait_until(lambda: bool(self.pids(ENGINE_NAME)))
        return self.pids(ENGINE_NAME)[0]

    def pids(self, beginning: str) -> list[int]:
        """The server's processes whose names begin so, the oldest first."""
        return children(self.process.pid, beginning)


def finish_reason(stream: Iterable[Any]) -> str:
    """Read a stream of completions to its end and return why it ended; empty if it was cut off.

    Events are not counted: on a busy machine one of them holds several tokens.
    """
    reasons = [choice.finish_reason for chunk in stream for choice in chunk.choices if choice.finish_reason]
    return reasons[-1] if reasons else ""


def read_while_killed(streams: Sequence[Any], victim: int) -> list[tuple[str, float]]:
    """How each stream ends when process `victim` is killed: (finish reason, 0), or (the error, seconds until it came)."""
    begin = time.monotonic()

    def rest(stream: Any) -> tuple[str, float]:
        try:
            return finish_reason(stream), 0.0
        except openai.APIError as error:
            return str(error), time.monotonic() - begin

    with ThreadPoolExecutor(len(streams)) as pool:
        reading = [pool.submit(rest, stream) for stream in streams]
        os.kill(victim, signal.SIGKILL)
        return [each.result() for each in reading]


def name(pid: int) -> str:
    """The name of a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, so far."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def children(pid: int, beginning: str = "") -> list[int]:
    """The child processes whose names begin so, the oldest first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(each) for each in (task / "children").read_text().split()]
    return sorted(child for child in found if name(child).startswith(beginning))


def wait_until(holds: Callable[[], bool], seconds: float = 240.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def serve_command(model: str, *options: str, quick: Sequence[str] = QUICK) -> list[str]:
    return [sys.executable, "-m", "torchweave.cli.main", "serve", model, *quick, *options]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def serving(
    *options: str, model: str = "demo", quick: Sequence[str] = QUICK, apart: bool = False
) -> Iterator[ServerProcess]:
    """Start a server (`apart`: in a session and a group of processes of its own), wait until it is ready, and end it."""
    command = serve_command(model, *options, quick=quick)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=apart)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"serves .+ at (http://\S+)", line)
        assert found, f"the server said {line!r} and ended with {process.poll()}"
        yield ServerProcess(found[1], process)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
