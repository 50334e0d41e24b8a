"""Mixture-of-experts models in the whole engine: routers are fused, tokens equal transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchweave import LLM, SamplingParams
from torchweave.config.options import EngineConfig, TorchCompileConfig
from torchweave.models import load
from torchweave.report import Report
from torchweave.verify import zoo
from torchweave.verify.verify import prompts

NUM_TOKENS = 6
# Steps of the router that join the op, once for each distinct piece with experts; a shared expert of their width is one.
STEPS = {"gpt_oss": 1, "deepseek_v3": 4, "qwen2_moe": 2}


@pytest.mark.parametrize("name", STEPS)
def test_tokens_equal_with_the_router_fused(name: str, tmp_path: Path) -> None:
    entry, report = zoo.zoo_model(name), Report(show=False)
    model = zoo.build(entry)
    expected = zoo.reference_tokens(model, prompts(), NUM_TOKENS)
    zoo.save(model, tmp_path)
    config = EngineConfig(
        model=name, dtype="float32", device="cpu", max_batch_size=len(prompts()), max_num_tokens=64, num_kv_blocks=64,
        torch_compile_config=TorchCompileConfig(enable_inductor=False, compile_cache=False),
    )  # fmt: skip
    with LLM.from_loaded(load(tmp_path, report=report), config, report) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        answers = [list(output.outputs[0].token_ids) for output in llm.generate(prompts(), greedy)]
    assert answers == expected
    routed = [event["matches"] for event in report.select("pass") if event["name"] == "route" and event["enabled"]]
    assert sum(routed) % STEPS[name] == 0 and STEPS[name] <= sum(routed) <= 3 * STEPS[name], routed
    assert not [miss for event in report.select("pass") if event["name"] == "route" for miss in event["near_misses"]]
