"""A slice of the fuzz of the parsers of tool calls; `python -m tests.serving.openai.parser_fuzz` runs more."""

from __future__ import annotations

import random

import pytest

from tests.serving.openai.answer_writers import WRITERS
from tests.serving.openai.parser_fuzz import difference
from torchweave.serving.openai.tools.families import FAMILIES


@pytest.mark.parametrize("parser", WRITERS)
def test_answers_are_parsed_as_they_were_written(parser: str) -> None:
    for at in range(8):
        assert difference(random.Random(f"{parser} test {at}"), parser) is None


def test_every_family_has_a_writer() -> None:
    assert set(FAMILIES) <= set(WRITERS)
