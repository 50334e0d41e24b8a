"""Models with sliding windows in the whole engine: tokens equal transformers' for prompts several windows long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from torchweave import LLM, SamplingParams
from torchweave.config.options import EngineConfig, TorchCompileConfig
from torchweave.models import load
from torchweave.report import Report
from torchweave.verify import zoo

NUM_TOKENS = 16
GROUPS = {"gemma3": 6, "gpt_oss": 2, "mistral": 1, "qwen2-sliding": 3}
"""Groups of layers; every specimen has a window of 16."""


@pytest.mark.parametrize("name", GROUPS)
def test_tokens_equal_transformers_when_windows_give_blocks_back(name: str, tmp_path: Path) -> None:
    """Chunks of 24 tokens over a cache so small that requests are paused; the second round finds what the first one left."""
    rng = np.random.default_rng(1)
    model = zoo.build(zoo.zoo_model(name))
    begin = rng.integers(3, 90, 40).tolist()
    prompts = [[*begin, *rng.integers(3, 90, length).tolist()] for length in (30, 9, 50, 44, 21)]
    expected = zoo.reference_tokens(model, prompts, NUM_TOKENS)
    zoo.save(model, tmp_path)
    report = Report(show=False)
    config = EngineConfig(
        model=name, dtype="float32", device="cpu", max_batch_size=5, max_num_tokens=24, max_model_len=112, block_size=8,
        num_kv_blocks=12 * GROUPS[name], capacity_scheduler_policy="max_utilization",
        torch_compile_config=TorchCompileConfig(enable_fullgraph=False, compile_cache=False),
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM.from_loaded(load(tmp_path, report=report), config, report) as llm:
        kv = llm.engine.scheduler.kv
        for _ in range(2):
            assert [list(each.outputs[0].token_ids) for each in llm.generate(prompts, greedy)] == expected
            kv.check()
        assert kv.num_groups == GROUPS[name] and kv.reused_total > 0
        assert kv.num_free == kv.num_blocks
        assert llm.engine.scheduler.paused_total > 0 or name not in ("gemma3", "gpt_oss"), "the cache is small enough"
    (event,) = report.select("kv_cache")
    assert sorted({group["window"] for group in event["groups"]})[-1] == 16
