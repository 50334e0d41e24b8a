"""`bench startup`: facts reported next to the start-up seconds."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from torchweave.bench.result import rows
from torchweave.cli.commands.start_once import modules_without_bytecode


def test_modules_without_bytecode_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = modules_without_bytecode()
    for name, there in (("kept", True), ("compiled_again", False)):
        module, cached = ModuleType(name), tmp_path / f"{name}.pyc"
        module.__spec__ = ModuleSpec(name, None)
        module.__spec__.cached = str(cached)
        if there:
            cached.touch()
        monkeypatch.setitem(sys.modules, name, module)
    assert modules_without_bytecode() == before + 1


@pytest.mark.parametrize(("without", "told"), [(0, ""), (2731, "; 2,731 modules were imported without bytecode")])
def test_table_reports_modules_without_bytecode(without: int, told: str):
    stages = [{"name": "imports", "seconds": 10.3, "within": None}]
    warm = {"seconds": 15.6, "stages": stages, "modules_without_bytecode": without}
    assert rows({"scenario": "startup", "startup": {"warm": warm}}) == [
        ("Start-up to the first token", "warm", "15.6 s", f"imports 10.3{told}")
    ]
