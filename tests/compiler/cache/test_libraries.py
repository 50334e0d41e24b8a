"""Damaged libraries under the compile cache, as a power loss or a kill at the moment of linking leaves them, are compiled again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchweave.compiler.cache.libraries import _is_cut

START = """
import json, sys, torch
from torch import nn
from torchweave.compiler import CompileCache, compile_graph
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

class Doubled(nn.Module):
    def forward(self, x):
        return x.sin() * 2

report, x = Report(show=False), torch.arange(6.0)
cache = CompileCache(sys.argv[1], report)
graph = compile_graph(Doubled(), {"x": x}, {"x": {0: "T"}}, config=TorchCompileConfig(), cache=cache, report=report)
torch.testing.assert_close(graph(call_op, x), x.sin() * 2)
print(json.dumps({"warnings": [each["why"] for each in report.select("warning")],
                  "outcomes": [each["outcome"] for each in report.select("cache")]}))
"""


def start(folder: Path) -> dict[str, Any]:
    """What a new process reports of a start with this cache."""
    ended = subprocess.run([sys.executable, "-c", START, str(folder)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])


def libraries(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.glob("inductor/**/*.so")}


def test_damaged_libraries_are_repaired_once(tmp_path: Path) -> None:
    assert start(tmp_path)["warnings"] == []
    whole = libraries(tmp_path)
    assert whole and not list(tmp_path.glob("inductor/**/.writing-*"))
    damages = [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[:-999] + bytes(999)]
    for damage in damages:
        for path in whole:
            path.write_bytes(damage(path.read_bytes()))
        repaired = start(tmp_path)
        assert any("compiled again" in each for each in repaired["warnings"]), repaired
        assert libraries(tmp_path) == whole
    warm = start(tmp_path)
    assert warm["warnings"] == [] and set(warm["outcomes"]) == {"hit"}


@pytest.mark.parametrize(
    ("content", "cut"), [(b"", True), (bytes(100), True), (b"\x7fELF\x02", True), (b"text", False)]
)
def test_cut_libraries_are_known_by_their_header(content: bytes, cut: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(content)
    assert _is_cut(path) is cut
    path.write_bytes(Path(sys.executable).resolve().read_bytes())
    assert not _is_cut(path)
