"""Speculation on a GPU: recorded steps with drafts give the tokens of an engine without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_speculation import DRAFT_MODEL, DRAFTERS, KINDS, TEXTS, tokens
from torchweave import LLM, SamplingParams, TorchCompileConfig
from torchweave.engine.scheduler.speculation import StepCosts
from torchweave.report import Report
from torchweave.verify.verify import verify

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

METHODS: dict[str, dict[str, Any]] = DRAFTERS | {"adaptive": DRAFT_MODEL | {"adaptive": True}}
MODELS = ["llama-tied", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3", "glm_moe_dsa"]
IMAGE_MODELS = ["qwen3_vl-images", "qwen3_5-images", "gemma3-images"]
"""Positions of three axes, with recurrent layers, and image tokens that see each other."""


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


@pytest.fixture(scope="module", params=METHODS)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """An engine without speculation, and one with it."""
    with engine(None) as plain, engine(METHODS[request.param]) as speculating:
        yield plain, speculating


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_speculation(engines: tuple[LLM, LLM], kind: str) -> None:
    plain, speculating = engines
    assert tokens(speculating, KINDS[kind]) == tokens(plain, KINDS[kind])


def with_equal_costs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptive drafts choose as if every step took the same time: a draft of `demo` can cost as much as a step of it."""
    adaptive = llm.engine.scheduler.resources.adaptive_drafts
    assert adaptive is not None and adaptive.costs.of(1)[1].all()
    sizes = adaptive.costs.query_lens
    equal = StepCosts(16, sizes[1:], [(rows, size, 1e-3) for rows in (1, 2, 4, 8, 16) for size in sizes])
    monkeypatch.setattr(equal, "add", lambda *_: None)
    monkeypatch.setattr(adaptive, "costs", equal)


def test_drafts_are_accepted_in_recorded_steps(engines: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    _, speculating = engines
    if speculating.engine.scheduler.resources.adaptive_drafts is not None:
        with_equal_costs(speculating, monkeypatch)
    counts = speculating.engine.scheduler.speculation
    before = counts.num_draft_tokens, counts.num_accepted_tokens
    tokens(speculating, KINDS["greedy"])
    assert counts.num_draft_tokens > before[0] and counts.num_accepted_tokens > before[1]
    steps = speculating.manager.counts
    assert steps["draft_graph"] > 0 and steps.get("plain", 0) == 0, steps


def test_adaptive_drafts_after_steps_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step costs are measured when graphs are recorded; a draft model computes what steps without drafts left out."""
    long, short = (
        SamplingParams(temperature=0, max_tokens=80, ignore_eos=True),
        SamplingParams(max_tokens=30, seed=1, ignore_eos=True),
    )
    with engine(None) as plain, engine(DRAFT_MODEL | {"adaptive": True, "disable_by_batch_size": 1}) as speculating:
        with_equal_costs(speculating, monkeypatch)
        answers = [
            [output.outputs[0].token_ids for output in llm.generate([TEXTS[1], TEXTS[4]], [long, short])]
            for llm in (plain, speculating)
        ]
        assert answers[0] == answers[1]
        assert speculating.engine.scheduler.speculation.num_accepted_tokens > 0


def test_a_first_start_builds_all_kernels_before_it_is_ready(tmp_path: Path) -> None:
    """A head's prompts, steps with and without drafts, and what follows steps without them."""
    head = {"method": "eagle3", "model": "demo-eagle", "num_speculative_tokens": 3, "disable_by_batch_size": 1}
    sizes: dict[str, Any] = {"max_batch_size": 16, "max_num_tokens": 256, "num_kv_blocks": 400}
    compile_config = TorchCompileConfig(compile_cache_dir=str(tmp_path), enable_inductor=True)
    report = Report(show=False)
    with LLM(
        "demo", device="cuda", torch_compile_config=compile_config, speculative_config=head, report=report, **sizes
    ) as llm:
        for many, few in ((80, 30), (20, 120)):
            params = [SamplingParams(max_tokens=count, seed=1, ignore_eos=True) for count in (many, few)]
            llm.generate([TEXTS[1], TEXTS[4]], params)
        llm.generate(TEXTS, GREEDY)
        llm.generate([TEXTS[0]], GREEDY)
    assert [event["what"] for event in report.select("compile_after_ready")] == []


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_architectures_give_the_tokens_of_transformers(method: Any) -> None:
    models = MODELS if method == "ngram" else [name for name in MODELS if name != "glm_moe_dsa"]
    found = verify(models, num_speculative_tokens=3, device="cuda", speculative_method=method)
    assert [(row["name"], row["reason"]) for row in found["results"] if not row["passed"]] == []


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_image_text_models_give_the_tokens_of_transformers(method: Any) -> None:
    found = verify(IMAGE_MODELS, num_speculative_tokens=3, device="cuda", speculative_method=method)
    assert [(row["name"], row["reason"]) for row in found["results"] if not row["passed"]] == []
