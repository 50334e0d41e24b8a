"""The built-in model with quantized weights: its accuracy in FP8 and 4 bits, and engines over checkpoints as tools publish them."""

from __future__ import annotations

from pathlib import Path

import demo_tasks as tasks
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.captured import CAPTURED
from tests.models.weights.packings import FORMS, write
from tests.parameters import few
from torchweave import LLM, SamplingParams, TorchCompileConfig
from torchweave.config.model_source import resolve
from torchweave.config.options import Quantization
from torchweave.report import Report
from torchweave.verify import zoo

NUM_QUESTIONS = 25  # of each task
GREEDY = SamplingParams(temperature=0, max_tokens=120)
PROMPTS = [[5, 17, 40, 22], [9, 31, 8, 60, 44, 71, 12]]


def accuracy(quantization: Quantization | None, compiled: bool = False) -> float:
    config = TorchCompileConfig(enable_fullgraph=compiled, enable_inductor=False, compile_cache=False)
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


@pytest.mark.parametrize("quantization", few(["fp8", "fp8_per_block"], ["fp8"]))
def test_fp8_keeps_the_accuracy_within_one_point(quantization: Quantization, full: float) -> None:
    assert accuracy(quantization, compiled=quantization == "fp8") >= full - 0.01


def test_int4_keeps_the_accuracy_within_two_points(full: float) -> None:
    assert accuracy("int4") >= full - 0.02


@pytest.mark.parametrize("form", ["awq", "gptq-int4-desc-act", "gptq-int8"])
def test_tokens_of_an_engine_are_those_of_the_dequantised_model(form: str, tmp_path: Path) -> None:
    """The whole engine with compiled pieces and merged linears, against transformers in float32."""
    source = resolve("demo").folder
    assert source is not None
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    write(model, FORMS[form], tmp_path, zoo.save)
    expected = zoo.reference_tokens(model, PROMPTS, 12)
    report = Report(show=False)
    with LLM(str(tmp_path), device="cpu", torch_compile_config=CAPTURED, report=report) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    merged = next(event for event in report.select("pass") if event["name"] == "merge_int_linears")
    assert merged["matches"] == 10, "q/k/v and gate/up in each of 5 layers"
