"""Blocks that the device has lost come back from host memory: right, late, and in nobody's way."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.engine.fake import FakeMover, expected, make
from tests.engine.scheduler.test_scheduler import drive, request, tokens_of
from torchweave import LLM, SamplingParams, TorchCompileConfig
from torchweave.engine.kv_cache.block_copy import PlainMover
from torchweave.engine.kv_cache.cpu_offload import HostPool
from torchweave.engine.stats import IterationFacts, statistics
from torchweave.report import Report


def conversations(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Prompts of which many begin alike."""
    begins = [rng.integers(0, 97, 40).tolist() for _ in range(6)]
    return [[*begins[rng.integers(6)][: rng.integers(8, 41)], *rng.integers(0, 97, 5).tolist()] for _ in range(count)]


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("places", [2, 9, 200])
@pytest.mark.parametrize("patience", [0, 3, 50])
def test_B11_tokens_are_those_of_a_cache_that_loses_nothing(policy: str, places: int, patience: int) -> None:
    """Copies land as late as they may; a block that is written too soon, or read too soon, changes the tokens."""
    rng = np.random.default_rng(places + patience)
    batch, runner = make(policy=policy, num_blocks=30, max_batch_size=5, mover=FakeMover(places, patience))
    wanted = {}
    for number, prompt in enumerate(conversations(rng, 80)):
        max_tokens = int(rng.integers(1, 12))
        batch.add(request(number, prompt, max_tokens=max_tokens), seed=0)
        wanted[number] = expected(prompt, max_tokens)
    assert {number: tokens_of(said) for number, said in drive(batch, runner).items()} == wanted
    batch.kv.check()
    assert batch.kv.num_free == 30
    host = batch.kv.host
    assert host is not None and host.stored_total > 0 and host.num_known <= places
    if places > 2:
        assert batch.kv.restored_total == host.loaded_total > 0


def test_others_go_on_while_a_request_waits_for_its_blocks() -> None:
    mover = FakeMover(100, patience=1 << 30)
    batch, runner = make(num_blocks=24, max_batch_size=4, mover=mover)
    first, others = list(range(32)), [list(range(40 + i, 80 + i)) for i in range(3)]
    for number, prompt in enumerate([first, *others]):
        batch.add(request(number, prompt, max_tokens=1), seed=0)
        drive(batch, runner)
    batch.add(request(8, [5, 6, 7], max_tokens=30), seed=0)
    batch.next_step()
    batch.add(request(9, [*first, 1, 2], max_tokens=2), seed=0)
    assert batch.kv.host is not None and batch.kv.host.loaded_total == 0
    for _ in range(6):
        step = batch.next_step()
        assert step is not None and step.num_rows == 1, "the newcomer must not be named before its blocks are there"
    assert batch.is_landing and batch.kv.host.loaded_total == 8
    mover.hold(mover.begun)
    step = batch.next_step()
    assert step is not None and step.num_rows == 2 and step.chunks[0].start == 32
    assert not batch.is_landing


def test_a_request_that_is_stopped_while_its_blocks_are_on_their_way() -> None:
    mover = FakeMover(100, patience=1 << 30)
    batch, runner = make(num_blocks=12, max_batch_size=4, mover=mover)
    first, second = list(range(32)), list(range(50, 90))
    for number, prompt in enumerate([first, second]):
        batch.add(request(number, prompt, max_tokens=1), seed=0)
        drive(batch, runner)
    batch.add(request(2, [*first, 1, 2], max_tokens=2), seed=0)
    assert batch.next_step() is None and batch.is_landing
    (said,) = batch.cancel(2)
    assert said.final and said.output.finish_reason == "cancelled"
    batch.kv.check()
    third = list(range(44, 0, -1))  # takes every block, also those that a copy is still to write
    batch.add(request(3, third, max_tokens=3), seed=0)
    assert batch.kv.host is not None
    before = batch.kv.host.held_total
    assert tokens_of(drive(batch, runner)[3]) == expected(third, 3)
    assert batch.kv.host.held_total > before


def test_statistics_count_what_came_from_the_host_apart() -> None:
    batch, runner = make(num_blocks=12, max_batch_size=2, mover=FakeMover(100, 0))
    for number, begin in enumerate([0, 50, 0]):
        batch.add(request(number, list(range(begin, begin + 32)), max_tokens=1), seed=0)
        drive(batch, runner)
    facts = IterationFacts(0.0, 0, 0, 0, 0, 0, 2)
    batch.add(request(7, [1], max_tokens=1), seed=0)
    step = batch.next_step()
    assert step is not None
    found = json.loads(statistics(step, batch.kv, facts))["kvCacheStats"]
    assert (found["reusedBlocks"], found["restoredBlocks"]) == (7, 3), "the other four were still on the device"
    assert found["hostMaxNumBlocks"] == 100 and 8 <= found["hostUsedNumBlocks"] <= 16


def test_the_host_forgets_the_least_recently_used() -> None:
    tensor = torch.arange(24.0).view(6, 4)
    pool = HostPool(PlainMover([tensor], 2 * 16), max_slots=2)
    a, b, c = ((0, bytes([i])) for i in range(3))
    pool.keep([a, b], [0, 1])
    pool.keep([a], [0])
    pool.keep([c], [2])
    assert a in pool and c in pool and b not in pool and pool.num_known == pool.num_places == 2
    places = pool.claim([a, c])
    pool.keep([b], [1])
    assert b not in pool, "claimed places are not taken"
    pool.restore(places, np.array([4, 5]))
    assert torch.equal(tensor[4:], tensor[[0, 2]])
    pool.check()
    pool.clear()
    assert a not in pool and pool.num_known == 0
    pool.check()


def test_B11_the_demo_model_goes_on_from_host_memory() -> None:
    """A tiny cache, so that every prompt is lost on the device before it comes again."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 100, 70).tolist() for _ in range(6)]
    report = Report(show=False)
    with LLM(
        "demo", device="cpu", num_kv_blocks=16, block_size=16, max_model_len=128, max_batch_size=2, kv_offload_gb=0.01,
        torch_compile_config=TorchCompileConfig(enable_inductor=False, compile_cache=False), report=report,
    ) as llm:  # fmt: skip
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        kv = llm.engine.batch.kv
        turns = []
        for restored in (False, True):
            turns.append([output.outputs[0].token_ids for output in llm.generate(prompts, greedy)])
            kv.check()
            assert (kv.restored_total > 0) == restored
        assert turns[0] == turns[1]
    (event,) = report.select("kv_offload")
    assert event["blocks"] > 16 and event["bytes"] <= 0.01 * 2**30
