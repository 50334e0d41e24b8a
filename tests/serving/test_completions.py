"""`/v1/completions` through the official client."""

from __future__ import annotations

import openai
import pytest

from tests.serving.running import Running


def test_E1_completions_answer(server: Running) -> None:
    answer = server.client().completions.create(model="demo", prompt="12+30=", temperature=0, max_tokens=8)
    assert [choice.text for choice in answer.choices] == ["42"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 3, 10)


def test_E1_completions_take_several_prompts_and_token_ids(server: Running) -> None:
    client = server.client()
    answer = client.completions.create(model="demo", prompt=["12+30=", "1+1="], n=2, temperature=0)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "42"), (1, "42"), (2, "2"), (3, "2")]


def test_E1_bad_requests_are_one_sentence(server: Running) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match=r"temperature must be 0 \(greedy\) or a positive number"):
        client.completions.create(model="demo", prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="did you mean top_k"):
        client.completions.create(model="demo", prompt="a", extra_body={"topk": 3})
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here; 'demo' or 'sums' is"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_model_len is 512"):
        client.completions.create(model="demo", prompt="a" * 600)
    with pytest.raises(openai.BadRequestError, match=r"outside 0\.\.103"):
        client.completions.create(model="demo", prompt=[104])
