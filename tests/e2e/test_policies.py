"""Every capacity scheduler policy gives the same tokens, with a KV cache of a few blocks and with prefix caching."""

from __future__ import annotations

from typing import Any

import pytest

from torchweave import LLM, SamplingParams

WORDS = ["pear", "fig", "apple", "plum", "lemon", "mango", "grape", "kiwi", "melon", "peach", "olive", "cherry"]
PROMPTS = [f"sort: {' '.join(WORDS[number % 5 : number % 5 + 7])}" for number in range(16)]
PARAMS = SamplingParams(temperature=0.7, seed=11, max_tokens=24, ignore_eos=True)


def answers(**options: Any) -> tuple[list[list[int]], LLM]:
    eager = {"enable_fullgraph": False}  # a capture takes seconds, and what is tested decides before a step runs
    with LLM("demo", block_size=16, max_batch_size=12, torch_compile_config=eager, **options) as llm:
        found = llm.generate(PROMPTS, PARAMS)
        again = llm.generate(PROMPTS, PARAMS)
        assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in again]
        assert llm.engine.scheduler.kv.num_free == llm.engine.scheduler.kv.num_blocks
        llm.engine.scheduler.kv.check()
    return [output.outputs[0].token_ids for output in found], llm


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    found, llm = answers(enable_prefix_caching=False)
    assert llm.engine.scheduler.kv.reused_total == 0
    return found


def test_prefix_caching_changes_no_token(undisturbed: list[list[int]]) -> None:
    found, llm = answers()
    assert found == undisturbed and llm.engine.scheduler.kv.reused_total >= len(PROMPTS)


@pytest.mark.parametrize("chunking", ["first_come_first_served", "equal_progress"])
def test_max_utilization_with_pauses_changes_no_token(undisturbed: list[list[int]], chunking: str) -> None:
    found, llm = answers(
        capacity_scheduler_policy="max_utilization",
        context_chunking_policy=chunking,
        num_kv_blocks=14,
        max_num_tokens=48,
    )
    assert found == undisturbed and llm.engine.scheduler.paused_total > 0


def test_static_batching_changes_no_token(undisturbed: list[list[int]]) -> None:
    assert answers(capacity_scheduler_policy="static_batch")[0] == undisturbed


@pytest.mark.parametrize("mode", ["backed", "unbacked"])
def test_every_dynamic_shapes_mode_serves_single_token_steps(undisturbed: list[list[int]], mode: str) -> None:
    """A single request decodes one token per step; a graph specialized to sizes from 2 gets it padded."""
    plain = {"enable_inductor": False, "compile_cache": False, "dynamic_shapes": mode}
    with LLM("demo", block_size=16, max_batch_size=12, torch_compile_config=plain) as llm:
        assert llm.generate(PROMPTS[:1], PARAMS)[0].outputs[0].token_ids == undisturbed[0]
        assert llm.generate([[5]], PARAMS)[0].outputs[0].token_ids
