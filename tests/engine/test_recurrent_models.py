"""Models with recurrent layers in a whole engine on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.captured import CAPTURED
from tests.ranks import run_ranks
from torchweave import LLM, SamplingParams
from torchweave.config import EngineConfig, TorchCompileConfig
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.engine.request import InferenceRequest, Response
from torchweave.engine.startup.build import Engine, build
from torchweave.models import load
from torchweave.report import Report
from torchweave.verify import zoo
from torchweave.verify.ranks import run_step

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


EAGER = TorchCompileConfig(enable_fullgraph=False)
"""For tests of the scheduler and the KV cache, since a capture takes seconds; each kind of layer is compiled in another test, some
between steps with drafts (`tests/engine/test_recurrent_speculation.py`)."""


def engine(folder: Path, compile_config: TorchCompileConfig = EAGER, **options: Any) -> LLM:
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", torch_compile_config=compile_config, **options
    )
    report = Report(show=False)
    return LLM.from_loaded(load(folder, torch.float32, report=report), config, report)


def engine_without_loop(
    folder: Path,
    compile_config: TorchCompileConfig = EAGER,
    process_groups: ProcessGroups | None = None,
    **options: Any,
) -> Engine:
    """An engine whose steps the test runs itself."""
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", torch_compile_config=compile_config, **options
    )
    report = Report(show=False)
    loaded = load(folder, torch.float32, report=report, process_groups=process_groups)
    return build(config, report, loaded, process_groups)


def answers(llm: LLM, count: int) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts(count), GREEDY)]


@pytest.fixture(scope="module")
def three_slots(folder: Path) -> Iterator[LLM]:
    with engine(folder, CAPTURED, max_batch_size=3, max_num_tokens=16, num_kv_blocks=64) as llm:
        yield llm


def test_slots_serve_several_requests(three_slots: LLM, expected: list[list[int]]) -> None:
    assert answers(three_slots, 9) == expected
    three_slots.engine.scheduler.check()


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


def test_states_of_all_slots_and_snapshots_are_allocated(three_slots: LLM) -> None:
    states = three_slots.engine.runner.recurrent_states
    assert len(states) == 3 and all(state.shape == (3 + 3, 64, 2) for state in states)


def test_a_model_without_attention_needs_no_kv_cache(tmp_path: Path) -> None:
    model = zoo.build(zoo.zoo_model("mamba2"))
    zoo.save(model, tmp_path)
    with engine(tmp_path, max_batch_size=2, max_num_tokens=32, max_model_len=128) as llm:
        assert answers(llm, 4) == zoo.reference_tokens(model, prompts(4), 12)
        assert not llm.engine.runner.caches


def test_a_model_without_attention_offloads_no_block(tmp_path: Path) -> None:
    zoo.save(zoo.build(zoo.zoo_model("mamba2")), tmp_path)
    built = engine_without_loop(tmp_path, max_batch_size=2, num_state_snapshots=2, kv_offload_gb=0.01, **REUSE)
    assert built.scheduler.kv.host is None and built.plan.kv_offload_gb == 0
    assert "no layer has a KV cache" in built.plan.table()


# -- prefix reuse ------------------------------------------------------------------------------------------------------

FEW = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
REUSE: dict[str, Any] = {"block_size": 8, "num_kv_blocks": 120, "max_model_len": 96, "max_num_tokens": 24}


def with_common_beginning(count: int = 4) -> list[list[int]]:
    """Prompts with 43 tokens in common, then two that are parts of these tokens."""
    begin = torch.randint(3, zoo.VOCAB, (43,), generator=torch.Generator().manual_seed(5)).tolist()
    return [*([*begin, *prompt[:20]] for prompt in prompts(count)), begin, begin[:33]]


def generate_one(llm: LLM, prompt: list[int], params: SamplingParams = FEW) -> tuple[list[int], int]:
    """The tokens of a prompt, and how many blocks of it were cached."""
    kv = llm.engine.scheduler.kv
    missed = kv.missed_total
    tokens = list(llm.generate([prompt], params)[0].outputs[0].token_ids)
    return tokens, len(prompt) // kv.block_size - (kv.missed_total - missed)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon_h1", "lfm2", "recurrent_gemma", "kimi_linear"])
def test_a_shared_prefix_restores_states_and_blocks_together(name: str, tmp_path: Path) -> None:
    """One after the other, then beside each other, in chunks."""
    model, shared = zoo.build(zoo.zoo_model(name)), with_common_beginning()
    zoo.save(model, tmp_path)
    expected = zoo.reference_tokens(model, shared, 6)
    compile_config = CAPTURED if name in ("mamba2", "falcon_h1") else EAGER  # the others are compiled in other tests
    with engine(tmp_path, compile_config, max_batch_size=3, num_state_snapshots=6, **REUSE) as llm:
        kv = llm.engine.scheduler.kv
        first, again = ([generate_one(llm, prompt) for prompt in shared] for _ in range(2))
        assert [tokens for tokens, _ in first] == [tokens for tokens, _ in again] == expected
        # The second prompt shows where the beginning ends, and the third one starts from there.
        assert [blocks for _, blocks in first[:4]] == [0, 0, 5, 5]
        assert [blocks for _, blocks in again] == [(len(prompt) - 1) // 8 for prompt in shared]
        assert kv.snapshots is not None
        assert kv.snapshots.restored_total == sum(blocks > 0 for _, blocks in [*first, *again])
        assert [list(output.outputs[0].token_ids) for output in llm.generate(shared, FEW)] == expected
        llm.engine.scheduler.check()
        assert kv.num_free == kv.num_blocks


@pytest.fixture(scope="module")
def expected_of_shared() -> list[list[int]]:
    return zoo.reference_tokens(zoo.build(zoo.zoo_model("lfm2")), with_common_beginning(), 6)


def test_without_snapshots_prefix_caching_is_off(folder: Path, expected_of_shared: list[list[int]]) -> None:
    with engine(folder, max_batch_size=2, num_state_snapshots=0, **REUSE) as llm:
        entry = next(entry for entry in llm.plan.entries if entry.name == "enable_prefix_caching")
        assert entry.effective is False and "num_state_snapshots is 0" in entry.why
        assert [generate_one(llm, prompt) for prompt in with_common_beginning()] == [
            (tokens, 0) for tokens in expected_of_shared
        ]
        assert llm.engine.scheduler.kv.snapshots is None
        assert all(len(state) == 2 for state in llm.engine.runner.recurrent_states)


def test_a_salt_keeps_states_apart(folder: Path, expected_of_shared: list[list[int]]) -> None:
    prompt, tokens = with_common_beginning()[0], expected_of_shared[0]
    built = engine_without_loop(folder, max_batch_size=2, **REUSE)
    scheduler, runner = built.scheduler, built.runner
    snapshots = scheduler.kv.snapshots
    assert snapshots is not None and snapshots.count == 2, "the default is a snapshot for each slot"
    for number, (salt, restored) in enumerate((("a", 0), ("b", 0), ("a", 1), ("b", 2))):
        scheduler.add(InferenceRequest(number, np.asarray(prompt), FEW, cache_salt=salt), seed=0)
        responses: list[Response] = []
        while not responses:
            step = scheduler.schedule()
            assert step is not None
            responses += scheduler.update(step, runner.collect(runner.launch(step)))
        assert responses[0].output.token_ids.tolist() == tokens and snapshots.restored_total == restored


def test_blocks_from_host_memory_meet_their_state(folder: Path, expected_of_shared: list[list[int]]) -> None:
    shared = with_common_beginning()
    options = REUSE | {"num_kv_blocks": 12, "kv_offload_gb": 0.01, "num_state_snapshots": 8}
    with engine(folder, max_batch_size=2, **options) as llm:
        for _ in range(2):
            assert [generate_one(llm, prompt)[0] for prompt in shared] == expected_of_shared
            assert [list(output.outputs[0].token_ids) for output in llm.generate(shared, FEW)] == expected_of_shared
        kv = llm.engine.scheduler.kv
        assert kv.restored_total > 0 and kv.snapshots is not None and kv.snapshots.restored_total > 6
        llm.engine.scheduler.check()


# -- leaks -------------------------------------------------------------------------------------------------------------


MIXED: dict[str, Any] = REUSE | {
    "max_batch_size": 4,
    "num_kv_blocks": 14,
    "capacity_scheduler_policy": "max_utilization",
    "num_state_snapshots": 3,
}


def serve_mixed_requests(
    built: Engine,
    given: list[list[int]],
    expected: list[list[int]],
    count: int,
    process_groups: ProcessGroups | None = None,
) -> None:
    """Serve `count` requests over few slots, blocks and snapshots, some of which are cancelled at a random moment.

    Every token of an answer is compared, those of cancelled requests too; in the end every slot and block is free.
    """
    process_groups = process_groups or ProcessGroups.single_rank()
    rng = np.random.default_rng(0)
    scheduler, runner = built.scheduler, built.runner
    arrived, prompt_of, cancelled = 0, {}, 0
    while arrived < count or prompt_of:
        while arrived < count and len(prompt_of) < 9 and rng.random() < 0.7:
            prompt_of[arrived] = int(rng.integers(len(given)))
            params = SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 7)), ignore_eos=True)
            scheduler.add(InferenceRequest(arrived, np.asarray(given[prompt_of[arrived]]), params), seed=0)
            arrived += 1
        responses: list[Response] = []
        if prompt_of and rng.random() < 0.1:
            responses += scheduler.cancel(int(rng.choice(list(prompt_of))))
        step = scheduler.schedule()
        if step is not None:
            responses += scheduler.update(step, run_step(process_groups, runner, step))
        for response in responses:
            assert response.final and not response.error
            cancelled += response.output.finish_reason == "cancelled"
            tokens = response.output.token_ids.tolist()
            assert tokens == expected[prompt_of.pop(response.id)][: len(tokens)]
    assert cancelled > count // 20
    scheduler.check()
    assert scheduler.num_active == 0
    assert scheduler.kv.num_free == scheduler.kv.num_blocks
    assert sorted(scheduler._running.slots.free) == list(range(4)), "a state slot leaked"
    assert scheduler.kv.snapshots is not None and scheduler.kv.snapshots.restored_total > count // 15


def test_mixed_requests_with_cancels_leave_every_state_slot_free(
    folder: Path, expected_of_shared: list[list[int]]
) -> None:
    serve_mixed_requests(engine_without_loop(folder, **MIXED), with_common_beginning(), expected_of_shared, 150)


def serve_mixed_requests_on_a_stage(
    process_groups: ProcessGroups, folder: Path, expected: list[list[int]]
) -> tuple[int, int, int]:
    """The number of states, of KV caches and of paused requests on this stage."""
    built = engine_without_loop(folder, CAPTURED, process_groups, **MIXED)
    built.runner.start()
    serve_mixed_requests(built, with_common_beginning(), expected, 60, process_groups)
    return len(built.runner.recurrent_states), len(built.runner.caches), built.scheduler.paused_total


def test_mixed_requests_on_pipeline_stages_of_which_one_has_the_states(tmp_path: Path) -> None:
    """The leader, which hands out slots and snapshots, has attention alone."""
    options = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "full_attn_idxs": None}
    entry = zoo.zoo_model("lfm2")
    model = zoo.build(replace(entry, options=entry.options | options))
    zoo.save(model, tmp_path)
    expected = zoo.reference_tokens(model, with_common_beginning(), 6)
    last, first = run_ranks(serve_mixed_requests_on_a_stage, 2, tmp_path, expected, pipeline_parallel_size=2)
    assert last[:2] == (0, 1) and first[:2] == (1, 0)
    assert last[2] == first[2] > 0, "no request was paused"


def test_padding_rows_touch_no_state(folder: Path) -> None:
    built = engine_without_loop(folder, CAPTURED, max_batch_size=3, **REUSE)
    runner, scheduler = built.runner, built.scheduler
    for state in runner.recurrent_states:
        state.copy_(torch.randn(state.shape, generator=torch.Generator().manual_seed(1)))
    before = [state.clone() for state in runner.recurrent_states]
    runner.run_dummy_step(16)
    runner.run_dummy_decode_step(3)
    assert all(torch.equal(state, was) for state, was in zip(runner.recurrent_states, before, strict=True))
    scheduler.add(InferenceRequest(0, np.array([5, 6, 7]), GREEDY), seed=0)
    while scheduler.num_active:
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(step, runner.collect(runner.launch(step)))
    changed = [(state != was).flatten(1).any(1) for state, was in zip(runner.recurrent_states, before, strict=True)]
    assert all(rows.tolist() == [True] + [False] * 5 for rows in changed), "only the request's own state changes"
