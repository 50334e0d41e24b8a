"""Suggestions are near in letters and in sense."""

from __future__ import annotations

import pytest

from torchweave.serving.openai.protocol import ChatRequest, CompletionRequest
from torchweave.utils.suggest import did_you_mean

KNOWN = [*ChatRequest.model_fields, *CompletionRequest.model_fields]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("max_token", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("topk", "top_k"),
        ("temprature", "temperature"),
        ("prompt_tokens_ids", "prompt_token_ids"),
        ("presence_penality", "presence_penalty"),
        ("stop_tokens", "stop_token_ids"),
    ],
)
def test_a_misspelt_name_is_recognised(name: str, suggestion: str) -> None:
    assert did_you_mean(name, KNOWN, "leave it out") == f"did you mean {suggestion}?"


@pytest.mark.parametrize(
    "name", ["logprob_token_ids", "input_token_ids", "return_hidden_states", "thinking_token_budget"]
)
def test_a_name_that_shares_words_with_another_is_not_that_one(name: str) -> None:
    assert did_you_mean(name, KNOWN, "leave it out") == "leave it out"
