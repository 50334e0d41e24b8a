"""Finished answers validate: a few of each kind; `python -m tests.serving.openai.json_answers` asks for a thousand."""

from __future__ import annotations

import asyncio

import pytest

from tests.serving.openai.json_answers import KINDS, check
from tests.serving.running import ServerProcess


@pytest.mark.parametrize("kind", KINDS)
def test_finished_answers_validate(server: ServerProcess, kind: str) -> None:
    _, faults = asyncio.run(check(server.url, kind, 4))
    assert not faults
