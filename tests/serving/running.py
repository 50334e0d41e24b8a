"""A server as a user starts it: a process of its own, on a free port."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import openai

QUICK = ("--device", "cpu", "-O0", "--cpu_kv_cache_gib", "0.02", "--port", "0", "--quiet")


@dataclass
class Running:
    """A server that takes requests."""

    url: str
    process: subprocess.Popen[str]

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)


@contextmanager
def serving(*options: str, model: str = "demo", quick: Sequence[str] = QUICK) -> Iterator[Running]:
    """Start a server, wait until it is ready, and end it."""
    command = [sys.executable, "-m", "torchweave.cli.main", "serve", model, *quick, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"serves .+ at (http://\S+)", line)
        assert found, f"the server said {line!r} and ended with {process.poll()}"
        yield Running(found[1], process)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
