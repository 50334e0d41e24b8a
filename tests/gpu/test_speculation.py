"""Speculation on a GPU: recorded steps with drafts give the tokens of an engine without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.test_speculation import KINDS, SPECULATION, tokens
from torchweave import LLM, TorchCompileConfig
from torchweave.report import Report
from torchweave.verify.verify import verify

pytestmark = pytest.mark.gpu

METHODS: dict[str, dict[str, Any]] = {
    "ngram": SPECULATION | {"adaptive": False},
    "draft_model": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3, "adaptive": False},
    "adaptive": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3},
}
MODELS = ["llama-tied", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3", "glm_moe_dsa"]


def engine(speculative_config: dict[str, Any] | None) -> LLM:
    sizes: dict[str, Any] = {"max_batch_size": 16, "max_num_tokens": 256, "num_kv_blocks": 400}
    return LLM(
        "demo",
        device="cuda",
        dtype="float32",  # in bfloat16 the two attention kernels round differently, and near ties may change
        seed=3,
        torch_compile_config=TorchCompileConfig(compile_cache=False, enable_inductor=False),
        speculative_config=speculative_config,
        report=Report(show=False),
        **sizes,
    )


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with engine(None) as llm:
        yield llm


@pytest.fixture(scope="module", params=METHODS)
def speculating(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with engine(METHODS[request.param]) as llm:
        yield llm


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_speculation(plain: LLM, speculating: LLM, kind: str) -> None:
    assert tokens(speculating, KINDS[kind]) == tokens(plain, KINDS[kind])


def test_drafts_are_accepted_in_recorded_steps(speculating: LLM) -> None:
    counts = speculating.engine.scheduler.speculation
    before = counts.num_draft_tokens, counts.num_accepted_tokens
    tokens(speculating, KINDS["greedy"])
    assert counts.num_draft_tokens > before[0] and counts.num_accepted_tokens > before[1]
    steps = speculating.manager.counts
    assert steps["draft_graph"] > 0 and steps.get("plain", 0) == 0, steps


def test_architectures_give_the_tokens_of_transformers() -> None:
    found = verify(MODELS, num_speculative_tokens=3, device="cuda")
    assert [(row["name"], row["reason"]) for row in found["results"] if not row["passed"]] == []
