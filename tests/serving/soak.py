"""A server under load while its processes are killed and stopped, its clients leave, and the disk under its cache is full.

    python -m tests.serving.soak                      # ten minutes
    python -m tests.serving.soak --minutes 2 --seed 5

Every answer is compared with the one that the server gave before the load: a whole one is equal, one that was cut is the beginning.
Answers may be cut only after an HTTP process was killed or stopped, and no status is an error's. At the end nothing runs any
more, and the memory of the first HTTP process and of the engine is what it was after the first fifth. Exits with 1 otherwise.
Needs the right to mount a file system for the full disk; without it that fault is left out, which is said.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.serving.running import ServerProcess, serving

_TIMEOUT = 5  # --engine_timeout: a stopped process is killed after it
_AFTERMATH_SECONDS = 30.0  # after a kill, within which answers may be cut
_GROWTH_MIB = 50
_PROMPTS = [f"{left}+{right}=" for left in range(11, 15) for right in range(20, 24)]


@dataclass
class Soak:
    """Attributes:
    right: the answer to each prompt, from a server without load.
    counts: answers that came whole, were cut, or whose clients left.
    wrong: what should not have been.
    kills: when an HTTP process was killed or stopped.
    """

    server: ServerProcess
    end: float
    draw: random.Random
    right: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)

    async def client(self) -> None:
        """Ask one question after the other, each on a connection of its own."""
        while time.monotonic() < self.end:
            prompt, text = self.draw.choice(_PROMPTS), ""
            leaves = self.draw.random() < 0.3
            try:
                async with asyncio.timeout(self.draw.uniform(0.01, 1.0) if leaves else 120):
                    async for part in self._answer(prompt):
                        text += part
                self.counts["whole"] += 1
                if text != self.right[prompt]:
                    self.wrong.append(f"{prompt} whole {text[:80]!r}, not {self.right[prompt][:80]!r}")
            except TimeoutError:
                self._cut("left" if leaves else "late", prompt, text)
            except httpx.HTTPError as error:
                self._cut("cut", prompt, text)
                if not self.kills or time.monotonic() - self.kills[-1] > _AFTERMATH_SECONDS:
                    self.wrong.append(f"{prompt} without a kill: {error!r}")

    def _cut(self, how: str, prompt: str, text: str) -> None:
        self.counts[how] += 1
        if how == "late" or not self.right[prompt].startswith(text):
            self.wrong.append(f"{prompt} {how} {text[:80]!r}")

    async def _answer(self, prompt: str) -> AsyncIterator[str]:
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(base_url=self.server.url, timeout=120, verify=False) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            if response.status_code != 200:
                self.wrong.append(f"status {response.status_code}: {(await response.aread())[:200]!r}")
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        self.wrong.append(line[:200])
                        return
                    yield chunk["choices"][0]["text"]

    async def learn(self) -> None:
        async def whole(prompt: str) -> str:
            return "".join([part async for part in self._answer(prompt)])

        self.right = dict(zip(_PROMPTS, await asyncio.gather(*map(whole, _PROMPTS)), strict=True))
        print(f"{len(self.right)} answers are known", flush=True)

    async def faults(self, disk: Path | None) -> None:
        """Kill, stop, and fill the disk, in turn."""
        while time.monotonic() < self.end - _AFTERMATH_SECONDS:
            for fault in ("kill", "stop", *(["fill"] if disk else [])):
                await asyncio.sleep(self.draw.uniform(8, 16))
                pids = self.server.pids("tw-http-")
                if fault == "fill" and disk is not None:
                    with contextlib.suppress(OSError):
                        (disk / "filling").write_bytes(bytes(1 << 26))
                elif pids:
                    self.kills.append(time.monotonic())
                    os.kill(self.draw.choice(pids), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
                self.counts[fault] += 1
                if fault == "stop":
                    await asyncio.sleep(2 * _TIMEOUT)
                    self.kills.append(time.monotonic())  # until then its connections only hang
            if disk is not None:
                (disk / "filling").unlink(missing_ok=True)

    def memory(self) -> dict[str, int]:
        """Resident MiB of the first HTTP process and of the engine."""
        pids = {"http": self.server.process.pid, "engine": self.server.engine_pid()}
        return {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4 >> 10 for name, pid in pids.items()}


async def _run(it: Soak, minutes: float, clients: int, disk: Path | None) -> None:
    await it.learn()
    begin = time.monotonic()
    it.end = begin + 60 * minutes
    tasks = [asyncio.create_task(it.client()) for _ in range(clients)] + [asyncio.create_task(it.faults(disk))]
    first: dict[str, int] = {}
    while not all(task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=15)
        now = it.memory()
        first = first or (now if time.monotonic() - begin > 12 * minutes else {})
        print(f"{time.monotonic() - begin:5.0f} s", dict(it.counts), now, f"{len(it.wrong)} wrong", flush=True)
    await asyncio.gather(*tasks)
    await asyncio.sleep(2 * _TIMEOUT)
    async with httpx.AsyncClient(base_url=it.server.url, timeout=60, verify=False) as http:
        load, live = [(await http.get(path)).json() for path in ("/load", "/live")]
    if load["server_load"] or live["blocks"]["used"]:
        it.wrong.append(f"something runs after the end: {load}, {live['blocks']}")
    last = it.memory()
    it.wrong += [
        f"{name} grew: {first[name]} -> {last[name]} MiB" for name in last if last[name] > first[name] + _GROWTH_MIB
    ]
    print("memory", first, "->", last)


@contextlib.contextmanager
def _small_disk() -> Iterator[Path | None]:
    """A folder on a file system of 32 MiB; None where this user may not mount one."""
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,mode=700", "tmpfs", folder], check=False).returncode:
            print("no disk is filled: mount is not allowed")
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with _small_disk() as disk:
        cache = [] if disk is None else ["--torch_compile_config.compile_cache_dir", str(disk / "cache")]
        with serving("--api_server_count", "3", "--engine_timeout", str(_TIMEOUT), *cache) as server:
            it = Soak(server, 0.0, random.Random(given.seed))
            asyncio.run(_run(it, given.minutes, given.clients, disk))
            ended = server.process.poll()
    if ended is not None:
        it.wrong.append(f"the server ended with {ended}")
    print(dict(it.counts), *it.wrong[:20], f"{len(it.wrong)} wrong", sep="\n")
    return 1 if it.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
