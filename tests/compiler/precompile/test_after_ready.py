"""Kernels that are compiled after the engine was ready are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchweave.compiler.precompile import after_ready
from torchweave.compiler.precompile.after_ready import watch_builds
from torchweave.ops.kernels.step_io import pinned_copy_kernel
from torchweave.report import Report


def build() -> None:
    signature = {"source": "*i32", "target": "*i32", "count": "i32", "BLOCK": "constexpr"}
    triton.compile(ASTSource(pinned_copy_kernel, signature, {"BLOCK": 32}), target=GPUTarget("cuda", 90, 32))


def test_builds_after_ready_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    heard: list[bool] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **_: heard.append(cache_hit))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # a knob that was set once reads no variable any more
    monkeypatch.setattr(after_ready, "_reports", type(after_ready._reports)())
    torch.compile(lambda x: x, backend="eager")  # imports Dynamo
    report = Report(show=False)
    for _ in range(2):
        watch_builds(report, has_triton=True)
    build()
    assert not report.select("compile_after_ready") and heard == [False]
    report.event("ready")
    build()  # from Triton's cache
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
    events = [(kind, report.select(kind)[0]["what"]) for kind in ("load_after_ready", "compile_after_ready")]
    assert events == [
        ("load_after_ready", "Triton kernel pinned_copy_kernel"),
        ("compile_after_ready", "graph of torch.compile"),
    ]
    assert len(report.select("compile_after_ready")) == 1 and heard == [False, True]
    assert "Compiled graph of torch.compile after the engine was ready" in capfd.readouterr().err
