"""Beam search equals that of transformers in float32, for every length penalty, early stopping mode and cache size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import torchweave.models
from tests.engine.captured import CAPTURED
from torchweave import LLM, SamplingParams
from torchweave.engine.outputs import RequestOutput
from torchweave.verify import zoo

EAGER = {"enable_fullgraph": False}
"""For tests that need an engine of their own, since a capture takes seconds."""
SETTINGS: list[dict[str, Any]] = [
    {"beam_width": 2, "n": 1},
    {"beam_width": 4, "n": 4, "early_stopping": True},
    {"beam_width": 3, "n": 3, "early_stopping": "never", "length_penalty": 2.0},
    {"beam_width": 4, "n": 2, "length_penalty": 0.0, "early_stopping": "never"},
    {"beam_width": 3, "n": 2, "length_penalty": -1.0, "early_stopping": False},
    {"beam_width": 5, "n": 5, "min_tokens": 6, "early_stopping": True},
]


@torch.inference_mode()
def by_transformers(
    model: PreTrainedModel,
    prompt: list[int],
    max_tokens: int,
    stops: list[int],
    settings: dict[str, Any],
    use_cache: bool = True,
) -> list[list[int]]:
    given = torch.tensor([prompt], device=model.device)
    found = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        num_beams=settings["beam_width"],
        num_return_sequences=settings.get("n", 1),
        length_penalty=settings.get("length_penalty", 1.0),
        early_stopping=settings.get("early_stopping", False),
        min_new_tokens=settings.get("min_tokens"),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=stops or None,
        pad_token_id=0,
        use_cache=use_cache,
    )
    return [_until(row[len(prompt) :].tolist(), stops) for row in found]


def _until(ids: list[int], stops: list[int]) -> list[int]:
    ends = [at for at, token in enumerate(ids) if token in stops]
    return ids[: ends[0] + 1] if ends else ids


def by_engine(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    found = [[answer.token_ids for answer in output.outputs] for output in llm.generate(prompts, params)]
    assert llm.engine.scheduler.kv.num_free == llm.engine.scheduler.kv.num_blocks
    llm.engine.scheduler.kv.check()
    return found


def prompts(longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, zoo.VOCAB, (n,), generator=generator).tolist() for n in (3, 16, longest, 1)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, PreTrainedModel]]:
    folder = tmp_path_factory.mktemp("tiny")
    model = zoo.build(zoo.zoo_model("llama"))
    zoo.save(model, folder)
    with LLM(str(folder), device="cpu", dtype="float32", block_size=16, torch_compile_config=CAPTURED) as llm:
        yield llm, model


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=lambda number: str(SETTINGS[number]))
def test_beams_equal_those_of_transformers(tiny: tuple[LLM, PreTrainedModel], number: int) -> None:
    llm, model = tiny
    stops = [[7], [], [7, 9, 30, 41, 77, 130, 131, 132]][number % 3]
    params = SamplingParams(max_tokens=16, ignore_eos=True, stop_token_ids=stops, **SETTINGS[number])
    wanted = [by_transformers(model, prompt, 16, stops, SETTINGS[number]) for prompt in prompts()]
    assert by_engine(llm, prompts(), params) == wanted


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "qwen3_next", "mamba"])
def test_beams_of_recurrent_models_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """A fork copies the recurrent states; a paused search prefills each of its beams."""
    model = zoo.build(zoo.zoo_model(name))
    zoo.save(model, tmp_path)
    settings = SETTINGS[1]
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[7], **settings)
    # Without the model's own cache, which is not what is compared with.
    wanted = [by_transformers(model, prompt, 12, [7], settings, use_cache=False) for prompt in prompts()]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "torch_compile_config": EAGER, "max_num_tokens": 32}
    with LLM(str(tmp_path), **options) as llm:
        assert by_engine(llm, prompts() * 2, params) == wanted * 2
    paused = {"capacity_scheduler_policy": "max_utilization", "max_model_len": 64, "block_size": 4, "num_kv_blocks": 53}
    with LLM(str(tmp_path), max_batch_size=24, **paused, **options) as llm:
        assert by_engine(llm, prompts() * 2, params) == wanted * 2
        assert llm.engine.scheduler.paused_total > 0 or not llm.engine.runner.caches, (
            "the KV cache was large enough for all"
        )


DEMO = ["12+30=", "sort: pear fig apple plum", "907-48="]
DEMO_PARAMS = SamplingParams(beam_width=3, n=3, max_tokens=12, early_stopping=True, logprobs=2)


def of_demo(**options: Any) -> tuple[LLM, list[RequestOutput]]:
    with LLM("demo", device="cpu", dtype="float32", torch_compile_config=EAGER, **options) as llm:
        found = llm.generate(DEMO * 3, DEMO_PARAMS)
        assert tokens(found[:3]) == tokens(found[3:6]) == tokens(found[6:])
        llm.engine.scheduler.kv.check()
    return llm, found[:3]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def demo() -> tuple[LLM, list[RequestOutput]]:
    return of_demo()


def test_beams_of_the_demo_model_equal_those_of_transformers(demo: tuple[LLM, list[RequestOutput]]) -> None:
    llm, found = demo
    folder = Path(torchweave.models.__file__).parent / "demo"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    stops = list(llm.engine.loaded.generation.eos_token_ids)
    settings = {"beam_width": 3, "n": 3, "early_stopping": True}
    assert tokens(found) == [by_transformers(model, llm.encode(text), 12, stops, settings) for text in DEMO]


def test_beam_search_returns_the_n_best_beams(demo: tuple[LLM, list[RequestOutput]]) -> None:
    output = demo[1][0]
    assert output.outputs[0].text == "42"
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    for answer in output.outputs:
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        assert answer.cumulative_logprob is not None and answer.finish_reason in ("stop", "length")


def test_beams_do_not_depend_on_cache_size_or_prefix_caching(
    demo: tuple[LLM, list[RequestOutput]],
) -> None:
    small, paused = of_demo(
        capacity_scheduler_policy="max_utilization",
        enable_prefix_caching=False,
        block_size=16,
        num_kv_blocks=9,
        max_num_tokens=32,
        max_batch_size=12,
    )
    assert tokens(paused) == tokens(demo[1]) and small.engine.scheduler.paused_total > 0


def test_sliding_window_beams_equal_those_of_transformers(tmp_path: Path) -> None:
    """Layer groups have their own block tables and free blocks outside their window."""
    model = zoo.build(zoo.zoo_model("gemma2"))
    zoo.save(model, tmp_path)
    settings = {"beam_width": 4, "n": 4, "early_stopping": True}
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[7], **settings)  # type: ignore[arg-type]
    wanted = [by_transformers(model, prompt, 20, [7], settings) for prompt in prompts(70)]
    with LLM(str(tmp_path), device="cpu", dtype="float32", block_size=8, torch_compile_config=EAGER) as llm:
        assert llm.engine.scheduler.kv.num_groups > 1
        assert by_engine(llm, prompts(70), params) == wanted
        llm.engine.scheduler.check()
