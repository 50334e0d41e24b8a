"""`models verify`: what it shows when tokens agree, when they do not, and when a model is refused."""

from __future__ import annotations

from typing import Any

import pytest

from torchweave.engine import verify as module
from torchweave.engine.verify import table, verify
from torchweave.log import Report


def test_architectures_pass_through_the_whole_engine() -> None:
    report = Report(show=False)
    result = verify(["gemma2", "qwen3_moe"], report)
    assert (result["passed"], result["total"]) == (2, 2)
    gemma = result["results"][0]
    assert gemma["how"] == "captured"
    assert 0 < gemma["distinct_pieces"] <= gemma["pieces"] == 4
    assert len(report.select("verified")) == 2


def test_a_wrong_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module.zoo.reference_tokens

    def wrong(*args: Any) -> list[list[int]]:
        answers = right(*args)
        answers[1][5] += 1
        return answers

    monkeypatch.setattr(module.zoo, "reference_tokens", wrong)
    result = verify(["llama"])
    assert result["passed"] == 0
    assert "prompt of 70 tokens: token 5 is" in result["results"][0]["reason"]
    assert "**no**" in table(result | {"refused": [{"name": "x", "reason": "a | b"}]})


def test_an_error_is_a_row_and_an_unknown_name_is_not() -> None:
    result = verify(["bloom"])
    assert result["passed"] == 0
    assert "ALiBi" in result["results"][0]["reason"]
    with pytest.raises(ValueError, match="the zoo has llama"):
        verify(["lama"])
