"""The built-in model in FP8 on a GPU: every quantization scheme, single and batched, in decode and mixed graphs."""

from __future__ import annotations

from pathlib import Path

import demo_tasks as tasks
import pytest

from torchweave import LLM, SamplingParams, TorchCompileConfig
from torchweave.config.options import Quantization
from torchweave.report import Report

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=120)


@pytest.mark.parametrize("enable_inductor", [True, False])
@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_channel", "fp8_per_block"])
def test_every_fp8_scheme_generates_correct_answers(
    quantization: Quantization, enable_inductor: bool, tmp_path: Path
) -> None:
    config = TorchCompileConfig(enable_inductor=enable_inductor, compile_cache_dir=str(tmp_path))
    report = Report(show=False)
    asked = [one for task in tasks.TASKS for one in tasks.held_out_questions(task, 20)]
    with LLM("demo", device="cuda", quantization=quantization, torch_compile_config=config, report=report) as llm:
        assert not report.select("fallback")
        outputs = llm.generate([tasks.plain_prompt(one) for one in asked], GREEDY)
        right = [
            output.outputs[0].text.strip() == one.answer.strip() for output, one in zip(outputs, asked, strict=True)
        ]
        alone = [llm.generate(tasks.plain_prompt(one), GREEDY)[0].outputs[0].text.strip() for one in asked[::20]]
    assert sum(right) / len(right) >= 0.96
    assert sum(said == one.answer.strip() for said, one in zip(alone, asked[::20], strict=True)) >= len(alone) - 1
    merged = next(event for event in report.select("pass") if event["name"] == "merge_fp8_linears")
    assert merged["matches"] == 20, "quantization and product of q/k/v and gate/up in each of 5 layers"
