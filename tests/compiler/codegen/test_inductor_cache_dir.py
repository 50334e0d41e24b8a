"""Inductor's working folder on a CPU: next to the entries if possible, else its own, with one warning."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor.cpu_vec_isa import VecAVX2, VecISA
from torch._inductor.exc import CppCompileError, InductorError
from torch._inductor.runtime.cache_dir_utils import cache_dir

from torchweave.compiler import CompileCache, compile_graph
from torchweave.compiler.cache.inductor_folder import InductorCacheDir
from torchweave.compiler.cache.store import CODE_FOLDER
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report


@pytest.fixture
def report() -> Report:
    return Report(show=False)


def test_build_falls_back_to_inductors_own_folder(tmp_path: Path, report: Report) -> None:
    cache = CompileCache(tmp_path / "cache", report)
    beside, tried = str(cache.folder / CODE_FOLDER), []

    def build() -> str:
        tried.append(cache_dir() == beside)
        if tried[-1]:
            raise InductorError(
                CppCompileError(["g++", *["-I"] * 400], "fatal error: a.o: No space left on device"), None
            )
        return "built"

    with InductorCacheDir(cache) as code:
        assert code.run(lambda: cache_dir()) == beside
        assert code.run(build) == "built" and tried == [True, False]
        assert code.run(build) == "built" and tried == [True, False, False]
    assert [each["why"].partition("inductor: ")[2] for each in report.select("warning")] == ["No space left on device"]


def test_failure_in_both_folders_is_raised(tmp_path: Path, report: Report) -> None:
    def fail() -> None:
        raise InductorError(ValueError("no such operation"), None)

    with InductorCacheDir(CompileCache(tmp_path, report)) as code, pytest.raises(InductorError):
        code.run(fail)
    with InductorCacheDir(None) as code, pytest.raises(InductorError):
        code.run(fail)


def test_full_disk_is_found_before_inductor_tries_it(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CompileCache(tmp_path, report)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=60 << 10))
    with InductorCacheDir(cache) as code:
        assert not code.run(cache_dir).startswith(str(tmp_path))
    assert "No space left on device" in report.select("warning")[0]["why"]


@pytest.mark.parametrize("cached", [True, False])
def test_full_disk_of_inductors_own_folder_is_one_sentence(tmp_path: Path, report: Report, cached: bool) -> None:
    def fail() -> None:
        raise InductorError(OSError(errno.ENOSPC, "No space left on device"), None)

    cache = CompileCache(tmp_path, report) if cached else None
    with (
        InductorCacheDir(cache) as code,
        pytest.raises(ValueError, match=r"^Inductor cannot write to .*: No space left .*; free"),
    ):
        code.run(fail)


@pytest.mark.parametrize("name", ["with space", "it's", "no\\thing"])
def test_folder_name_that_the_shell_splits_is_not_used(tmp_path: Path, report: Report, name: str) -> None:
    with InductorCacheDir(CompileCache(tmp_path / name, report)) as code:
        assert not code.run(cache_dir).startswith(str(tmp_path))
    assert ["Inductor cannot use a folder" in each["why"] for each in report.select("warning")] == [True]


def test_unusable_cache_folder_does_not_stop_the_start(tmp_path: Path, report: Report) -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() * 2

    cache = CompileCache(tmp_path / "with space", report)
    (cache.folder / CODE_FOLDER).write_text("")
    x = torch.arange(6.0)
    compiled_graph = compile_graph(
        Doubled(), {"x": x}, {"x": {0: "T"}}, config=TorchCompileConfig(), cache=cache, report=report
    )
    torch.testing.assert_close(compiled_graph(call_op, x), x.sin() * 2)
    assert len(report.select("warning")) == 1 and len(list(cache.entries())) == 2


def test_trial_library_that_loads_is_not_tried_again(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def probe_load(_: VecISA, library: str) -> bool:
        tried.append(Path(library).name)
        return "unloadable" not in library

    monkeypatch.setattr(VecISA, "_probe_load", probe_load, raising=False)  # of torch 2.13
    for _ in range(2):  # two starts
        with InductorCacheDir(CompileCache(tmp_path / "cache", report)):
            probe = VecISA._probe_load
            assert probe(VecAVX2(), str(tmp_path / "avx2.so")) and not probe(VecAVX2(), str(tmp_path / "unloadable.so"))
        assert VecISA._probe_load is probe_load
    assert tried == ["avx2.so", "unloadable.so", "unloadable.so"]
