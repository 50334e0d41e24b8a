"""Each requirement of peers' published tests holds, or is listed in docs/reference/http.md with the reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.serving.peers import chat, completions, messages, responses, tokens, tools
from tests.serving.peers.requirement import REQUIREMENTS, Requirement
from tests.serving.running import ServerProcess

AREAS = (completions, chat, tokens, tools, responses, messages)
ROOT = Path(__file__).resolve().parents[3]


def _parameter(each: Requirement) -> object:
    marks = [] if each.missing is None else [pytest.mark.xfail(strict=True, reason=each.missing)]
    return pytest.param(each, marks=marks, id=f"{each.area}: {each.sentence[:70]}")


@pytest.mark.parametrize("requirement", [_parameter(each) for each in REQUIREMENTS])
def test_requirement(server: ServerProcess, requirement: Requirement) -> None:
    requirement.check(server)


def test_the_page_counts_them() -> None:
    spec = importlib.util.spec_from_file_location("page", ROOT / "scripts" / "docs" / "write_peer_requirements.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run scripts/docs/write_peer_requirements.py"
    assert sum(each.missing is None for each in REQUIREMENTS) >= 0.95 * len(REQUIREMENTS)
