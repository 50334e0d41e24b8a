"""Starts of one program on one compile cache, each a fork of this process, which imports torch once for all of them.

    python -m tests.compiler.cache.cold_starts FOLDER

Prints a line of JSON for each start that ends: what it did, or in which scenario it was killed and with how many entries stored.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # what a cold start would import
from torch import nn

from tests.compiler.toy import BOUNDARY
from torchweave.compiler import CompileCache, compile_graph
from torchweave.compiler.cache.store import CODE_FOLDER
from torchweave.compiler.runtime.forward import call_op
from torchweave.report import Report


class TwoPieces(nn.Module):
    """A piece before attention and another one behind it: with the graph, three entries."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x.sin() * 2)[:, None]
        out = torch.empty_like(y)
        torch.ops.toy.attention(y, y, y, out, 0, 1.0)
        return torch.tanh(out[:, 0]).cos()


class Cache(CompileCache):
    """A compile cache that calls a function after each stored entry."""

    stored: Callable[[Cache], None] = staticmethod(lambda cache: None)

    def store(self, *args: object, **options: object) -> str:
        key = super().store(*args, **options)  # type: ignore[arg-type]
        self.stored(self)
        return key


def start(scenario: str, folder: Path) -> None:
    report, x = Report(show=False), torch.rand(5, 8)
    graph = compile_graph(
        TwoPieces(), {"x": torch.rand(7, 8)}, {"x": {0: "T"}},
        boundary_ops=BOUNDARY, cache=Cache(folder, report), report=report,
    )  # fmt: skip
    facts = {
        "scenario": scenario,
        "graph": report.select("capture")[0]["source"],
        "pieces": [piece["built"] for piece in report.select("piece")],
        "warnings": [warning["why"] for warning in report.select("warning")],
        "right": torch.allclose(graph(call_op, x), TwoPieces()(x), rtol=2e-5, atol=2e-5),
    }
    tell(facts)


def tell(facts: dict[str, Any]) -> None:
    os.write(sys.stdout.fileno(), f"{json.dumps(facts)}\n".encode())  # at once: other forks write too


def fork(scenario: str, folder: Path) -> int:
    if (pid := os.fork()) == 0:
        try:
            start(scenario, folder)
        finally:
            sys.stderr.flush()
            os._exit(0)
    return pid


def kill_this_process(_: CompileCache) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def remove_folder(cache: CompileCache) -> None:
    Cache.stored = staticmethod(lambda cache: None)
    shutil.rmtree(cache.folder)


def main(folder: Path) -> None:
    shared, killed, removed = (folder / name for name in ("shared", "killed", "removed"))
    for pid in [fork("two at once", shared) for _ in range(2)]:
        os.waitpid(pid, 0)
    os.waitpid(fork("after two at once", shared), 0)
    for name in (killed, removed):  # with Inductor's code, so that no compiler runs
        name.mkdir(mode=0o700)
        shutil.copytree(shared / CODE_FOLDER, name / CODE_FOLDER)
    Cache.stored = staticmethod(kill_this_process)
    for _ in range(4):
        if os.waitstatus_to_exitcode(os.waitpid(fork("after a kill", killed), 0)[1]) == -signal.SIGKILL:
            tell({"scenario": "killed", "entries": len(list(killed.glob("*/*.weave")))})
    Cache.stored = staticmethod(remove_folder)
    os.waitpid(fork("removed", removed), 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
