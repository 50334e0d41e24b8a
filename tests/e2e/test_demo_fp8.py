"""The built-in model in FP8 stays within one point of float32 accuracy on held-out questions of all tasks."""

from __future__ import annotations

import demo_tasks as tasks
import pytest

from torchweave import LLM, SamplingParams, TorchCompileConfig
from torchweave.config.options import Quantization
from torchweave.report import Report

NUM_QUESTIONS = 25  # of each task
GREEDY = SamplingParams(temperature=0, max_tokens=120)


def accuracy(quantization: Quantization | None) -> float:
    config = TorchCompileConfig(enable_inductor=False, compile_cache=False)
    report = Report(show=False)
    with LLM("demo", device="cpu", quantization=quantization, torch_compile_config=config, report=report) as llm:
        asked = [one for task in tasks.TASKS for one in tasks.held_out_questions(task, NUM_QUESTIONS)]
        outputs = llm.generate([tasks.plain_prompt(one) for one in asked], GREEDY)
        assert not report.select("fallback")
    said = [output.outputs[0].text.strip() for output in outputs]
    return sum(one == other.answer.strip() for one, other in zip(said, asked, strict=True)) / len(asked)


@pytest.fixture(scope="module")
def full() -> float:
    return accuracy(None)


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_block"])
def test_fp8_keeps_the_accuracy_within_one_point(quantization: Quantization, full: float) -> None:
    assert accuracy(quantization) >= full - 0.01
