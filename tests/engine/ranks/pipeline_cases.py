"""What an engine of several stages is asked, and how its answers are compared: on a CPU and on GPUs."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import pytest

from torchweave.engine.llm import LLM
from torchweave.engine.request import SamplingParams, StructuredOutputs

PROMPTS = ["Once upon a time", "The cat sat", "1 + 1 =", "A"]
FORM = StructuredOutputs(regex="[0-9]{3}-[a-c]+") if find_spec("llguidance") else None


def agreed(llm: LLM, ranks: int, seconds: float = 60.0) -> bool:
    """Whether all ranks have come to the same, which they tell when the engine falls idle."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = list(llm.engine.steps.digests)  # type: ignore[attr-defined]
        if found:
            return len(found) == ranks and len(set(found)) == 1
        time.sleep(0.01)
    return False


def asked(llm: LLM) -> list[Any]:
    """What is known of the tokens beside the tokens: their log-probabilities, those of prompts, and forms."""
    params = [
        SamplingParams(temperature=0.7, seed=5, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=16, logit_bias={40: 3.0}, bad_words=["th"]),
        SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=FORM),
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=1),
    ]
    found = llm.generate(PROMPTS, params)
    return [(request.prompt_logprobs, [(o.token_ids, o.logprobs) for o in request.outputs]) for request in found]


def assert_alike(one: Any, other: Any) -> None:
    """Equal but for the last bits of numbers."""
    if isinstance(one, float):
        assert one == pytest.approx(other, abs=1e-3)
    elif isinstance(one, dict):
        assert_alike(sorted(one.items()), sorted(other.items()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_alike(mine, theirs)
    else:
        assert one == other
