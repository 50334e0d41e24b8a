"""Policies, prefix caching and beams on a GPU give the tokens of an undisturbed run and of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_beam_search import SETTINGS, by_engine, by_transformers
from tests.e2e.test_beam_search import prompts as some_prompts
from tests.gpu.test_engine import build
from torchweave import LLM
from torchweave.config.options import TorchCompileConfig
from torchweave.engine.request import SamplingParams
from torchweave.verify import zoo

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
STEM = list(range(100, 170))
PROMPTS = [[*STEM[: 7 * number % 71], *range(number, number + 9)] for number in range(32)]


def answers(**options: object) -> tuple[list[list[int]], LLM]:
    with build(block_size=16, **options) as llm:
        found = llm.generate(PROMPTS, PARAMS)
        again = llm.generate(PROMPTS, PARAMS)
        assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in again]
        assert llm.engine.scheduler.kv.num_free == llm.engine.scheduler.kv.num_blocks
        llm.engine.scheduler.check()
    return [output.outputs[0].token_ids for output in found], llm


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    found, llm = answers(enable_prefix_caching=False)
    assert llm.engine.scheduler.kv.reused_total == 0
    return found


def test_prefix_caching_changes_no_token(undisturbed: list[list[int]]) -> None:
    found, llm = answers()
    assert found == undisturbed and llm.engine.scheduler.kv.reused_total > len(PROMPTS)


@pytest.mark.parametrize("chunking", ["first_come_first_served", "equal_progress"])
def test_max_utilization_with_pauses_changes_no_token(undisturbed: list[list[int]], chunking: str) -> None:
    found, llm = answers(
        capacity_scheduler_policy="max_utilization", context_chunking_policy=chunking, num_kv_blocks=20, max_num_tokens=64,
        max_model_len=320,
    )  # fmt: skip
    assert found == undisturbed and llm.engine.scheduler.paused_total > 0


def test_static_batching_changes_no_token(undisturbed: list[list[int]]) -> None:
    assert answers(capacity_scheduler_policy="static_batch")[0] == undisturbed


@pytest.mark.parametrize("graphs", [True, False])
def test_beams_equal_those_of_transformers(tmp_path: Path, graphs: bool) -> None:
    model = zoo.build(zoo.zoo_model("llama"))
    zoo.save(model, tmp_path)
    model = model.to("cuda")
    config = TorchCompileConfig(enable_inductor=graphs, enable_piecewise_cuda_graph=graphs, compile_cache=False)
    with LLM(
        str(tmp_path), device="cuda", dtype="float32", block_size=16, num_kv_blocks=200, max_batch_size=24,
        max_num_tokens=256, torch_compile_config=config,
    ) as llm:  # fmt: skip
        for number, settings in enumerate(SETTINGS):
            stops = [[7], [], [7, 9, 30, 41, 77, 130, 131, 132]][number % 3]
            params = SamplingParams(max_tokens=16, ignore_eos=True, stop_token_ids=stops, **settings)
            wanted = [by_transformers(model, prompt, 16, stops, settings) for prompt in some_prompts()]
            assert by_engine(llm, some_prompts(), params) == wanted, settings


def test_pauses_change_no_beam() -> None:
    params = SamplingParams(beam_width=4, n=4, max_tokens=24, ignore_eos=True)
    with build(block_size=16) as llm:
        wanted = by_engine(llm, PROMPTS[:8], params)
    with build(
        block_size=16,
        capacity_scheduler_policy="max_utilization",
        num_kv_blocks=24,
        max_model_len=256,
        max_num_tokens=64,
    ) as small:
        assert by_engine(small, PROMPTS[:8], params) == wanted
    assert small.engine.scheduler.paused_total > 0
