"""Models with recurrent layers in a whole engine on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchweave import LLM, SamplingParams
from torchweave.config import EngineConfig, TorchCompileConfig
from torchweave.models import load
from torchweave.report import Report
from torchweave.verify import zoo

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompts(count: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 50, (9,), generator=generator).tolist()[:count]
    return [torch.randint(3, zoo.VOCAB, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lfm2")
    zoo.save(zoo.build(zoo.zoo_model("lfm2")), path)
    return path


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return zoo.reference_tokens(zoo.build(zoo.zoo_model("lfm2")), prompts(9), 12)


def engine(folder: Path, **options: Any) -> LLM:
    compile_config = TorchCompileConfig(enable_inductor=False, compile_cache=False)
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", torch_compile_config=compile_config, **options
    )
    report = Report(show=False)
    return LLM.from_loaded(load(folder, torch.float32, report=report), config, report)


def answers(llm: LLM, count: int) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts(count), GREEDY)]


@pytest.fixture(scope="module")
def three_slots(folder: Path) -> Iterator[LLM]:
    with engine(folder, max_batch_size=3, max_num_tokens=16, num_kv_blocks=64) as llm:
        yield llm


def test_slots_serve_several_requests(three_slots: LLM, expected: list[list[int]]) -> None:
    assert answers(three_slots, 9) == expected
    three_slots.engine.scheduler.check()


def test_prefix_caching_is_off(three_slots: LLM, expected: list[list[int]]) -> None:
    entry = next(entry for entry in three_slots.plan.entries if entry.name == "enable_prefix_caching")
    assert entry.effective is False and "recurrent" in entry.why
    assert answers(three_slots, 3) == expected[:3]
    assert three_slots.engine.scheduler.kv.reused_total == 0


def test_beam_search_is_rejected(three_slots: LLM) -> None:
    with pytest.raises(ValueError, match="Beam search is not supported for models with recurrent layers"):
        three_slots.generate(prompts(1), SamplingParams(beam_width=2, max_tokens=4))


def test_paused_requests_are_computed_again(folder: Path, expected: list[list[int]]) -> None:
    options = {
        "capacity_scheduler_policy": "max_utilization",
        "block_size": 8,
        "num_kv_blocks": 12,
        "max_model_len": 64,
    }
    with engine(folder, max_batch_size=6, max_num_tokens=64, **options) as llm:
        assert answers(llm, 9) == expected
        assert llm.engine.scheduler.paused_total > 0, "the KV cache was large enough for all"


def test_states_of_all_slots_are_allocated(three_slots: LLM) -> None:
    states = three_slots.engine.runner.recurrent_states
    assert len(states) == 3 and all(state.shape == (3, 64, 2) for state in states)


def test_a_model_without_attention_needs_no_kv_cache(tmp_path: Path) -> None:
    model = zoo.build(zoo.zoo_model("mamba2"))
    zoo.save(model, tmp_path)
    with engine(tmp_path, max_batch_size=2, max_num_tokens=32, max_model_len=128) as llm:
        assert answers(llm, 4) == zoo.reference_tokens(model, prompts(4), 12)
        assert not llm.engine.runner.caches
