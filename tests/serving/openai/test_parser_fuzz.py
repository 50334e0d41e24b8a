"""A slice of the fuzz of the parsers of tool calls; `python -m tests.serving.openai.parser_fuzz` runs more."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

from tests.serving.openai.answer_writers import WRITERS
from tests.serving.openai.parser_fuzz import difference
from torchweave.serving.openai.tools.families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("parser", WRITERS)
def test_answers_are_parsed_as_they_were_written(parser: str) -> None:
    for at in range(8):
        assert difference(random.Random(f"{parser} test {at}"), parser) is None


def test_the_page_of_formats_is_current() -> None:
    spec = importlib.util.spec_from_file_location("write_tool_formats", ROOT / "scripts/docs/write_tool_formats.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs/reference/tool-formats.md").read_text(encoding="utf-8")
    assert page == script.page(), "run scripts/docs/write_tool_formats.py"


def test_every_family_has_a_writer() -> None:
    assert set(FAMILIES) <= set(WRITERS)
