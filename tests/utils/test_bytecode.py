"""An installation without bytecode gets it in the compile cache; every other one keeps Python's own."""

from __future__ import annotations

import importlib
import os
import stat
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from torchweave.config.options import EngineConfig, TorchCompileConfig
from torchweave.engine.startup.early_start import stored_bytecode
from torchweave.utils import bytecode
from torchweave.utils.bytecode import bytecode_in, is_bytecode_missing

NAME = "module_without_bytecode"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module's file in a folder of `sys.path` where Python stores no bytecode."""
    (tmp_path / "code").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "code" / f"{NAME}.py"
    path.write_text("answer = 1\n")
    yield path
    sys.modules.pop(NAME, None)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, cached: bool | None) -> None:
    """Let torch be in `folder`, with bytecode, without it, or (None) of a kind that has none."""
    spec = ModuleSpec("torch", None, origin=str(folder / "__init__.py"))
    if cached is not None:
        spec.cached = str(folder / "__init__.pyc")
    if cached:
        (folder / "__init__.pyc").touch()
    monkeypatch.setattr(bytecode, "find_spec", lambda name: spec)


def test_bytecode_is_stored_in_the_folder_only(source: Path, tmp_path: Path) -> None:
    before = sys.pycache_prefix, sys.dont_write_bytecode
    with pytest.raises(ImportError), bytecode_in(tmp_path / "bytecode"):
        importlib.import_module(NAME)
        importlib.import_module("no_such_module_anywhere")
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == before
    assert [path.name.split(".")[0] for path in (tmp_path / "bytecode").rglob("*.pyc")] == [NAME]
    assert not (source.parent / "__pycache__").exists()


@pytest.mark.parametrize(
    ("cached", "dont_write", "writable", "missing"),
    [
        (True, True, False, False),
        (False, True, True, True),
        (False, False, False, True),
        (False, False, True, False),
        (None, True, False, False),
    ],
)
def test_bytecode_is_missing_where_python_does_not_store_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cached: bool | None,
    dont_write: bool,
    writable: bool,
    missing: bool,
) -> None:
    install(monkeypatch, tmp_path, cached)
    monkeypatch.setattr(sys, "dont_write_bytecode", dont_write)
    monkeypatch.setattr(os, "access", lambda path, mode: writable and path == str(tmp_path) and mode == os.W_OK)
    assert is_bytecode_missing() == missing


def test_folder_that_the_user_set_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path, cached=False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "own"))
    assert not is_bytecode_missing()


def test_a_program_without_torch_misses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytecode, "find_spec", lambda name: None)
    assert not is_bytecode_missing()


@pytest.mark.parametrize("why_not", ["", "installed", "no cache", "shared with others", "a file"])
def test_engine_keeps_bytecode_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why_not: str) -> None:
    install(monkeypatch, tmp_path, cached=why_not == "installed")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    folder, before = tmp_path / "cache", sys.pycache_prefix
    if why_not == "shared with others":
        folder.mkdir()
        folder.chmod(0o777)
    if why_not == "a file":
        folder.touch()
    options = TorchCompileConfig(compile_cache_dir=str(folder), compile_cache=why_not != "no cache")
    with stored_bytecode(EngineConfig("demo", torch_compile_config=options)):
        prefix, stores = sys.pycache_prefix, not sys.dont_write_bytecode
        of_commands = os.environ.get("PYTHONPYCACHEPREFIX")
    assert "PYTHONPYCACHEPREFIX" not in os.environ
    assert of_commands == (None if why_not else str(folder / "bytecode"))
    assert (prefix, stores) == ((before, False) if why_not else (str(folder / "bytecode"), True))
    if not why_not:
        assert stat.S_IMODE((folder / "bytecode").stat().st_mode) == 0o700
