"""Prompt log-probabilities equal those of the plain model, however the prompt is split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.engine import fake
from tests.engine.captured import CAPTURED
from torchweave import LLM, SamplingParams
from torchweave.config.options import EngineConfig
from torchweave.engine.outputs import RequestOutput
from torchweave.engine.request import InferenceRequest
from torchweave.engine.scheduler import request_state
from torchweave.engine.scheduler.parts.prompt_logprobs import PromptTargets
from torchweave.models import load
from torchweave.report import Report
from torchweave.verify import zoo

PROMPTS = [np.random.default_rng(n).integers(3, zoo.VOCAB, 5 + 17 * n).tolist() for n in range(4)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder, made = tmp_path_factory.mktemp("llama"), zoo.build(zoo.zoo_model("llama"))
    zoo.save(made, folder)
    return made, folder


def engine(folder: Path, fullgraph: bool = False, **options: Any) -> LLM:
    report = Report(show=False)
    compiling = replace(CAPTURED, enable_fullgraph=fullgraph)
    defaults: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 64, "num_kv_blocks": 64, "block_size": 8}
    config = EngineConfig(
        "llama", dtype="float32", device="cpu", torch_compile_config=compiling, **(defaults | options)
    )
    return LLM.from_loaded(load(folder, report=report), config, report)


@pytest.fixture(scope="module")
def llm(model: tuple[PreTrainedModel, Path]) -> Iterator[LLM]:
    with engine(model[1], fullgraph=True) as found:
        yield found


def check(model: PreTrainedModel, output: RequestOutput, top: int = 3) -> None:
    prompt, found = output.prompt_token_ids, output.prompt_logprobs
    assert found is not None and len(found) == len(prompt) and found[0] is None
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(dim=-1)
    for at, entry in enumerate(found[1:], start=1):
        assert entry is not None
        best = expected[at - 1].topk(top)
        wanted = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        wanted[prompt[at]] = float(expected[at - 1, prompt[at]])
        assert entry == pytest.approx(wanted, abs=1e-4)


def test_prompt_logprobs_equal_the_plain_model(llm: LLM, model: tuple[PreTrainedModel, Path]) -> None:
    plain = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SamplingParams(**_without(PARAMS)))]
    for _ in range(2):  # the second time all blocks of the prompts are known, and are not taken
        outputs = llm.generate(PROMPTS, PARAMS)
        for output in outputs:
            check(model[0], output)
        assert [output.outputs[0].token_ids for output in outputs] == plain


def _without(params: SamplingParams) -> dict[str, Any]:
    return {"temperature": params.temperature, "max_tokens": params.max_tokens, "ignore_eos": params.ignore_eos}


def test_prompt_logprobs_only_for_requests_that_ask(llm: LLM, model: tuple[PreTrainedModel, Path]) -> None:
    other = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, n=2)
    outputs = llm.generate(PROMPTS + PROMPTS, [PARAMS] * 4 + [other] * 4)
    for output in outputs[:4]:
        check(model[0], output)
    assert all(output.prompt_logprobs is None for output in outputs[4:])
    several = llm.generate([PROMPTS[1]], SamplingParams(temperature=0.9, n=3, max_tokens=4, prompt_logprobs=0))[0]
    check(model[0], several, top=0)
    assert len(several.outputs) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_tokens": 13},
        {"max_num_tokens": 24, "num_kv_blocks": 12, "capacity_scheduler_policy": "max_utilization"},
        {"enable_chunked_context": False, "context_chunking_policy": "equal_progress"},
    ],
    ids=["chunked", "paused", "in one piece"],
)
def test_prompt_logprobs_do_not_depend_on_chunking(
    model: tuple[PreTrainedModel, Path], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_state, "MAX_SCORED_TOKENS", 10)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prompt_logprobs=3)
    with engine(model[1], **options) as llm:
        for output in llm.generate(PROMPTS, params):
            check(model[0], output)
        if "num_kv_blocks" in options:
            assert llm.engine.scheduler.paused_total > 0


def test_one_token_prompt_has_no_logprobs(llm: LLM) -> None:
    assert llm.generate([[5]], PARAMS)[0].prompt_logprobs == [None]


def test_prompt_logprobs_limit_prefix_reuse() -> None:
    scheduler, runner = fake.make()
    prompt = np.arange(2, 30, dtype=np.int32)
    scheduler.add(InferenceRequest(0, prompt, SamplingParams(max_tokens=2)), seed=0)
    while (step := scheduler.schedule()) is not None:
        scheduler.update(step, runner.collect(runner.launch(step)))
    scheduler.add(InferenceRequest(1, prompt, SamplingParams(max_tokens=2, prompt_logprobs=1)), seed=0)
    step = scheduler.schedule()
    assert step is not None and step.chunks[0].start == 0
    targets = step.parts["prompt_logprobs"]
    assert isinstance(targets, PromptTargets)
    assert targets.targets.tolist() == prompt[1:].tolist() and targets.slots[0][1] == 27
