"""The built-in model with an FP8 KV cache stays within one point of float32 accuracy on held-out questions."""

from __future__ import annotations

import demo_tasks as tasks
import pytest

from torchweave import LLM, SamplingParams, TorchCompileConfig
from torchweave.config.options import KVCacheDType
from torchweave.report import Report

NUM_QUESTIONS = 25  # of each task
GREEDY = SamplingParams(temperature=0, max_tokens=120)


def accuracy(kv_cache_dtype: KVCacheDType) -> float:
    config = TorchCompileConfig(enable_fullgraph=False)  # attention, which reads the cache, runs as in a compiled step
    report = Report(show=False)
    with LLM("demo", device="cpu", kv_cache_dtype=kv_cache_dtype, torch_compile_config=config, report=report) as llm:
        asked = [one for task in tasks.TASKS for one in tasks.held_out_questions(task, NUM_QUESTIONS)]
        outputs = llm.generate([tasks.plain_prompt(one) for one in asked], GREEDY)
    (cache,) = report.select("kv_cache")
    assert cache["dtype"] == {"auto": "float32", "fp8": "fp8_e4m3"}.get(kv_cache_dtype, kv_cache_dtype)
    said = [output.outputs[0].text.strip() for output in outputs]
    return sum(one == other.answer.strip() for one, other in zip(said, asked, strict=True)) / len(asked)


@pytest.fixture(scope="module")
def full() -> float:
    return accuracy("auto")


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_an_fp8_cache_keeps_the_accuracy_within_one_point(kv_cache_dtype: KVCacheDType, full: float) -> None:
    assert accuracy(kv_cache_dtype) >= full - 0.01
