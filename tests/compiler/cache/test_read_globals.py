"""A cached graph is loaded only while the globals that its forward read are what they were when it was captured."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweave
from torchweave.compiler.cache.keys import describe
from torchweave.compiler.cache.read_globals import global_digests, globals_of
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

SCALE = 2.0
SETTINGS = SimpleNamespace(scale=2.0)
MODULES = {"weights": nn, "this": torch}


def scaled(x: Tensor) -> Tensor:
    return x * 2


def _scaled_by(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


class Scaling:
    by = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


scaling = Scaling()
inner = nn.Linear(4, 4, bias=False).requires_grad_(False)


class Reads(nn.Module):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(scaling(scaled(inner(x)))) * SCALE * SETTINGS.scale * self.factor

    def shifted(self, x: Tensor) -> Tensor:
        return x + 1


def _result(folder: Path) -> tuple[Tensor, str]:
    """The result of compiled code, and whether its graph came from Dynamo or from the cache."""
    report = Report(show=False)
    config = TorchCompileConfig(enable_inductor=False, compile_cache_dir=str(folder))
    compiled = torchweave.compile(Reads(), {"x": torch.zeros(5, 4)}, {"x": {0: "T"}}, config, report)
    return compiled(torch.ones(3, 4)), report.select("capture")[-1]["source"]


HERE = sys.modules[__name__]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (HERE, "scaled", lambda x: x * 3),
        (HERE, "scaled", _scaled_by(5)),
        (HERE, "SCALE", 3.0),
        (HERE, "SETTINGS", SimpleNamespace(scale=3.0)),
        (SETTINGS, "scale", 3.0),
        (Scaling, "by", 3.0),
        (Scaling, "__call__", lambda self, x: x * 7),
        (Reads, "factor", 3.0),
        (Reads, "shifted", lambda self, x: x + 2),
    ],
)
def test_another_global_is_a_miss(
    owner: Any, name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, source = _result(tmp_path / "cache")
    assert source == "dynamo" and torch.equal(first, Reads()(torch.ones(3, 4)))
    assert _result(tmp_path / "cache")[1] == "cache"
    monkeypatch.setattr(owner, name, value)
    got, source = _result(tmp_path / "cache")
    assert source == "dynamo" and torch.equal(got, Reads()(torch.ones(3, 4))) and not torch.equal(got, first)


_MODULE = """
import torch, torchweave
import user_numbers

class Module(torch.nn.Module):
    def forward(self, x):
        from user_numbers import SHIFT
        return x * user_numbers.SCALE + SHIFT

def result(folder):
    config = torchweave.TorchCompileConfig(enable_inductor=False, compile_cache_dir=folder)
    compiled = torchweave.compile(Module(), {"x": torch.zeros(5, 4)}, {"x": {0: "T"}}, config)
    return compiled(torch.ones(3, 4)).mean().item()
"""


def test_a_setting_edited_between_processes_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "user_of_numbers.py").write_text(_MODULE)
    (tmp_path / "user_numbers.py").write_text("SCALE, SHIFT = 2, 1\n")
    user, folder = importlib.import_module("user_of_numbers"), str(tmp_path / "cache")
    assert user.result(folder) == 3
    (tmp_path / "user_numbers.py").write_text(
        "SCALE, SHIFT = 30, 40\n"
    )  # of another size, or Python reads its own cache
    run = [sys.executable, "-c", f"import user_of_numbers; print(user_of_numbers.result({folder!r}))"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert float(done.stdout) == 70


def _reads_names(x: Tensor) -> Any:
    from os import path as where

    return [torch.nn.functional.silu(each) + missing for each in x], where  # type: ignore[name-defined] # noqa: F821


def _reads_signature(x: Tensor) -> Tensor:
    """As transformers' `apply_chunking_to_forward`, of BERT's models."""
    return x * len(inspect.signature(scaled).parameters) * len(MODULES)


def test_loaded_modules_are_not_described() -> None:
    """`inspect.signature` reads `sys.modules`, whose lazy packages would be imported, and differ between processes."""
    inner_names = globals_of(inspect.unwrap.__code__, "inspect")
    names = {*globals_of(_reads_signature.__code__, __name__), *inner_names, "inspect:sys.modules.get"}
    digests = global_digests(names)
    assert set(digests) == {f"{__name__}:{name}" for name in ("scaled", "len", "MODULES")}
    assert describe(MODULES) == "{weights: module torch.nn, this: module torch}"


def test_names_and_digests() -> None:
    names = set(globals_of(_reads_names.__code__, __name__))
    here = f"{__name__}:"
    assert names == {f"{here}torch.nn.functional.silu", f"{here}missing", "os:path"}
    digests = global_digests(names | {f"{here}HERE"})
    assert digests == {**global_digests([f"{here}torch.nn.functional.silu"]), f"{here}missing": "missing"}
