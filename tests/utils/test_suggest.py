"""Suggestions are near in letters and in sense."""

from __future__ import annotations

from typing import Any

import pytest

from torchweave import SamplingParams
from torchweave.serving.openai.protocol import ChatRequest, CompletionRequest
from torchweave.utils.suggest import did_you_mean, suggest_value

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
    "name",
    ["logprob_token_ids", "input_token_ids", "return_hidden_states", "junctions"],
)
def test_a_name_that_shares_words_with_another_is_not_that_one(name: str) -> None:
    assert did_you_mean(name, KNOWN, "leave it out") == "leave it out"


def test_a_name_of_vllm_has_what_to_do_in_its_place() -> None:
    assert "merge the adapter" in did_you_mean("enable_lora", ["enable_fullgraph"], "leave it out")
    assert suggest_value("awq", ["fp8"]) == ""


def test_a_value_is_compared_with_near_values_only() -> None:
    assert suggest_value("cls", ["last", "mean"]) == suggest_value("safetensors", ["auto"]) == ""
    assert suggest_value("eagle", ["ngram", "eagle3"]) == "; did you mean 'eagle3'?"
    assert suggest_value("bf16", ["float16", "bfloat16"]) == "; did you mean 'bfloat16'?"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("best_of", "largest cumulative_logprob"),
        ("tempreature", "did you mean temperature"),
        ("colour", "it takes n, "),
    ],
)
def test_an_unknown_sampling_parameter_is_refused_with_a_suggestion(name: str, words: str) -> None:
    values: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=f"SamplingParams got an unexpected keyword argument '{name}'; .*{words}"):
        SamplingParams(**values)
