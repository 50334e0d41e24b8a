"""Cold starts that share a compile cache, are killed after each stored entry, or lose the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchweave.compiler import CompileCache
from torchweave.compiler.cache.store import SUFFIX, read_entry
from torchweave.report import Report

COLD = {"graph": "dynamo", "pieces": ["inductor"] * 2, "warnings": [], "right": True}
WARM = {"graph": "cache", "pieces": ["cache"] * 2, "warnings": [], "right": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def starts(folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.compiler.cache.cold_starts", str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def of(starts: list[dict[str, Any]], scenario: str) -> list[dict[str, Any]]:
    return [{key: each[key] for key in each if key != "scenario"} for each in starts if each["scenario"] == scenario]


def check_whole(folder: Path) -> None:
    """The folder holds three readable entries and nothing besides them."""
    paths = list(CompileCache(folder, Report(show=False)).entries())
    assert len([read_entry(path) for path in paths]) == 3
    assert all(path.suffix == SUFFIX for kind in ("graph", "piece") for path in (folder / kind).iterdir())


def test_two_cold_starts_on_one_cache_leave_it_whole(folder: Path, starts: list[dict[str, Any]]) -> None:
    both = of(starts, "two at once")
    assert len(both) == 2 and all(each["right"] and not each["warnings"] for each in both)
    assert COLD in both, "one of them found nothing"
    assert of(starts, "after two at once") == [WARM]
    check_whole(folder / "shared")


def test_a_start_continues_behind_the_last_entry_of_a_killed_one(folder: Path, starts: list[dict[str, Any]]) -> None:
    assert of(starts, "killed") == [{"entries": 1}, {"entries": 2}, {"entries": 3}]
    assert of(starts, "after a kill") == [WARM]
    check_whole(folder / "killed")


def test_a_folder_removed_during_a_cold_start_costs_no_start(starts: list[dict[str, Any]]) -> None:
    (start,) = of(starts, "removed")
    assert start["right"] and start["graph"] == "dynamo" and len(start["warnings"]) <= 1
