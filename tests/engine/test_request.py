"""Validation of requests: each field out of range is rejected in a sentence that names it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchweave import LLM
from torchweave.engine.request import SamplingParams, StructuredOutputs
from torchweave.models import GenerationDefaults

FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 2.5}, "between -2 and 2"),
    ({"frequency_penalty": float("nan")}, "between -2 and 2"),
    ({"repetition_penalty": 0.0}, "between 1e-30 and"),
    ({"repetition_penalty": float("inf")}, "between 1e-30 and"),
    ({"temperature": 1e39}, "up to 1e\\+30"),
    ({"temperature": "hot"}, "a number, but is 'hot'"),
    ({"top_p": None}, "a number, but is None"),
    ({"top_k": 1.5}, "a whole number"),
    ({"seed": 1.5}, "a whole number"),
    ({"n": None}, "a whole number"),
    ({"logprobs": 2.5}, "a whole number"),
    ({"stop": [3]}, "a list of strings"),
    ({"stop": 3}, "a list of strings"),
    ({"stop_token_ids": [-1]}, "a list of token ids"),
    ({"length_penalty": 2000}, "between -5 and 5"),
    ({"logit_bias": {3: 101.0}}, "between -100 and 100"),
    ({"logit_bias": {-1: 1.0}}, "token ids"),
    ({"logit_bias": {"3": 1.0}}, "token ids"),
    ({"logit_bias": [3]}, "token ids"),
    ({"allowed_token_ids": []}, "at least one token id"),
    ({"allowed_token_ids": [True]}, "at least one token id"),
    ({"bad_words": ["a", ""]}, "non-empty strings"),
    ({"bad_words": [[]]}, "non-empty strings"),
    ({"bad_words": "word"}, "a list of non-empty strings"),
    ({"prompt_logprobs": -2}, "at least 0, -1 for the vocabulary"),
    ({"stop": ["a"] * 2000}, "holds 2000 strings; give at most 1024"),
    ({"stop": "a" * 20_000}, "holds 20000 characters in all; give at most 16384"),
    ({"bad_words": [[1]] * 30_000}, "holds 30000 words"),
    ({"logit_bias": dict.fromkeys(range(1000), 1000.0)}, r"\.\.\.\."),
]


@pytest.mark.parametrize(("fields", "words"), FAULTS, ids=[str(fields)[:80] for fields, _ in FAULTS])
def test_a_field_out_of_range_is_refused_in_a_sentence_that_names_it(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        SamplingParams(**fields)
    assert next(iter(fields)) in str(refusal.value)


STRUCTURED_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one"),
    ({"json_object": False}, "exactly one"),
    ({"regex": "a", "json": {}}, "json and regex"),
    ({"regex": 3}, "a regular expression"),
    ({"choice": []}, "a list of non-empty strings"),
    ({"choice": ["a", ""]}, "a list of non-empty strings"),
    ({"choice": "ab"}, "a list of non-empty strings"),
    ({"json": 3}, "a JSON schema"),
    ({"grammar": ["start: A"]}, "a grammar in Lark or EBNF"),
]


@pytest.mark.parametrize(("fields", "words"), STRUCTURED_FAULTS, ids=[str(fields) for fields, _ in STRUCTURED_FAULTS])
def test_exactly_one_structured_output_kind(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StructuredOutputs(**fields)


def test_structured_outputs_may_be_a_dict_as_in_vllm() -> None:
    schema = {"json": {"type": "object"}}
    assert SamplingParams(structured_outputs=schema) == SamplingParams(structured_outputs=StructuredOutputs(**schema))  # type: ignore[arg-type]
    for fields, error, words in (
        ({"json": {}, "regex": "a"}, ValueError, "exactly one"),
        ({"jsn": {}}, TypeError, "did you mean json"),
    ):
        with pytest.raises(error, match=words):
            SamplingParams(structured_outputs=fields)  # type: ignore[arg-type]


def test_values_in_range_are_accepted() -> None:
    SamplingParams(
        presence_penalty=-2, frequency_penalty=2.0, repetition_penalty=1.3, logit_bias={0: -100, 7: 1.5},
        allowed_token_ids=[1, 2], bad_words=["no", [1, 2]], prompt_logprobs=0,
        structured_outputs=StructuredOutputs(json={"type": "object"}),
    )  # fmt: skip


def test_generation_config_gives_the_defaults() -> None:
    llm = SimpleNamespace(engine=SimpleNamespace(loaded=SimpleNamespace(generation=GenerationDefaults())))
    plain = LLM.default_sampling_params(cast(LLM, llm))
    assert (plain.temperature, plain.repetition_penalty) == (0.0, 1.0)
    llm.engine.loaded.generation = GenerationDefaults(top_k=5, repetition_penalty=1.3)
    asked = LLM.default_sampling_params(cast(LLM, llm))
    assert (asked.top_k, asked.repetition_penalty) == (5, 1.3)
