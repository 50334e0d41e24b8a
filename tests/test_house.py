"""Rules of the house that no other tool holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "torchweave").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "bench").glob("*.md"))]


def test_files_stay_below_400_lines() -> None:
    long = {path.name: lines for path in SOURCES if (lines := path.read_text(encoding="utf-8").count("\n")) > 400}
    assert not long, f"each wants a wall: {long}"


def test_only_config_reads_the_environment() -> None:
    reads = re.compile(r"\bos\.(environ|getenv)\b")
    readers = [path.name for path in SOURCES if path.name != "config.py" and reads.search(path.read_text(encoding="utf-8"))]
    assert not readers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken, f"{page.name}: {broken}"


def test_the_built_in_models_fit_their_budget() -> None:
    folders = [ROOT / "torchweave" / "models" / name for name in ("demo", "demo_draft")]
    size = sum(path.stat().st_size for folder in folders for path in folder.iterdir())
    assert size <= 6_000_000
