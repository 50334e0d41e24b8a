"""Damaged libraries under the compile cache, as a power loss or a kill at the moment of linking leaves them, are compiled again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.codecache import CppPythonBindingsCodeCache

from torchweave.compiler import CompileCache, compile_graph
from torchweave.compiler.cache.libraries import _is_cut
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2


def start(folder: Path) -> tuple[list[str], set[str]]:
    """Warnings and outcomes of a start with this cache, of which this process remembers nothing."""
    CppPythonBindingsCodeCache.cache.clear()
    for name in CppPythonBindingsCodeCache._loaded_module_names:
        sys.modules.pop(name, None)
    report, x = Report(show=False), torch.arange(6.0)
    cache = CompileCache(folder, report)
    config = TorchCompileConfig()
    graph = compile_graph(Doubled(), {"x": x}, {"x": {0: "T"}}, config=config, cache=cache, report=report)
    torch.testing.assert_close(graph(call_op, x), x.sin() * 2)
    return [each["why"] for each in report.select("warning")], {each["outcome"] for each in report.select("cache")}


def damage(library: Path, content: bytes) -> None:
    library.unlink()  # this process has mapped it
    library.write_bytes(content)


def test_damaged_libraries_are_repaired_once(tmp_path: Path) -> None:
    assert start(tmp_path)[0] == []
    assert not list(tmp_path.glob("inductor/**/.writing-*"))
    (library,) = tmp_path.glob("inductor/**/*.main.so")
    for damaged in (b"", library.read_bytes()[:-999] + bytes(999)):  # a power loss may leave zeros
        damage(library, damaged)
        warnings, _ = start(tmp_path)
        assert sum("compiled again" in each for each in warnings) >= 1, warnings
        assert library.stat().st_size > 1000 and not _is_cut(library)
    assert start(tmp_path) == ([], {"hit"})


@pytest.mark.parametrize(
    ("content", "is_cut"), [(b"", True), (bytes(100), True), (b"\x7fELF\x02", True), (b"text", False)]
)
def test_cut_libraries_are_known_by_their_header(content: bytes, is_cut: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(content)
    assert _is_cut(path) is is_cut
    path.write_bytes(Path(sys.executable).resolve().read_bytes())
    assert not _is_cut(path)
