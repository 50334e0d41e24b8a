"""KV cache offload: evicted blocks are loaded from host memory while other requests run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.engine.captured import CAPTURED
from tests.engine.fake import FakeBlockCopier, expected, make
from tests.engine.scheduler.test_scheduler import drive, request, tokens_of
from torchweave import LLM, SamplingParams
from torchweave.engine.kv_cache.block_copy import CpuBlockCopier
from torchweave.engine.kv_cache.cpu_offload import HostBlockPool
from torchweave.engine.stats import IterationFacts, iteration_stats
from torchweave.report import Report


def conversations(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Prompts, many with a common prefix."""
    begins = [rng.integers(0, 97, 40).tolist() for _ in range(6)]
    return [[*begins[rng.integers(6)][: rng.integers(8, 41)], *rng.integers(0, 97, 5).tolist()] for _ in range(count)]


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("host_blocks", [2, 9, 200])
@pytest.mark.parametrize("polls_per_copy", [0, 3, 50])
def test_offloading_changes_no_token(policy: str, host_blocks: int, polls_per_copy: int) -> None:
    """Copies complete as late as possible; a block that is written or read too early changes the tokens."""
    rng = np.random.default_rng(host_blocks + polls_per_copy)
    scheduler, runner = make(
        policy=policy, num_blocks=30, max_batch_size=5, copier=FakeBlockCopier(host_blocks, polls_per_copy)
    )
    wanted = {}
    for number, prompt in enumerate(conversations(rng, 80)):
        max_tokens = int(rng.integers(1, 12))
        scheduler.add(request(number, prompt, max_tokens=max_tokens), seed=0)
        wanted[number] = expected(prompt, max_tokens)
    assert {number: tokens_of(said) for number, said in drive(scheduler, runner).items()} == wanted
    scheduler.kv.check()
    assert scheduler.kv.num_free == 30
    host = scheduler.kv.host
    assert host is not None and host.stored_total > 0 and host.num_cached <= host_blocks
    if host_blocks > 2:
        assert scheduler.kv.restored_total == host.loaded_total > 0


def test_other_requests_run_while_blocks_load_from_host() -> None:
    copier = FakeBlockCopier(100, polls_per_copy=1 << 30)
    scheduler, runner = make(num_blocks=24, max_batch_size=4, copier=copier)
    first, others = list(range(32)), [list(range(40 + i, 80 + i)) for i in range(3)]
    for number, prompt in enumerate([first, *others]):
        scheduler.add(request(number, prompt, max_tokens=1), seed=0)
        drive(scheduler, runner)
    scheduler.add(request(8, [5, 6, 7], max_tokens=30), seed=0)
    scheduler.schedule()
    scheduler.add(request(9, [*first, 1, 2], max_tokens=2), seed=0)
    assert scheduler.kv.host is not None and scheduler.kv.host.loaded_total == 0
    for _ in range(6):
        step = scheduler.schedule()
        assert step is not None and step.num_rows == 1, "a new request is not scheduled before its blocks are loaded"
    assert scheduler.is_loading and scheduler.kv.host.loaded_total == 8
    copier.wait_for(copier.begun)
    step = scheduler.schedule()
    assert step is not None and step.num_rows == 2 and step.chunks[0].start == 32
    assert not scheduler.is_loading


def test_a_request_is_cancelled_while_its_blocks_load_from_host() -> None:
    copier = FakeBlockCopier(100, polls_per_copy=1 << 30)
    scheduler, runner = make(num_blocks=12, max_batch_size=4, copier=copier)
    first, second = list(range(32)), list(range(50, 90))
    for number, prompt in enumerate([first, second]):
        scheduler.add(request(number, prompt, max_tokens=1), seed=0)
        drive(scheduler, runner)
    scheduler.add(request(2, [*first, 1, 2], max_tokens=2), seed=0)
    assert scheduler.schedule() is None and scheduler.is_loading
    (said,) = scheduler.cancel(2)
    assert said.final and said.output.finish_reason == "cancelled"
    scheduler.kv.check()
    third = list(range(44, 0, -1))  # takes every block, including targets of pending copies
    scheduler.add(request(3, third, max_tokens=3), seed=0)
    assert scheduler.kv.host is not None
    before = scheduler.kv.host.stalls_total
    assert tokens_of(drive(scheduler, runner)[3]) == expected(third, 3)
    assert scheduler.kv.host.stalls_total > before


def test_statistics_count_blocks_loaded_from_host() -> None:
    scheduler, runner = make(num_blocks=12, max_batch_size=2, copier=FakeBlockCopier(100, 0))
    for number, begin in enumerate([0, 50, 0]):
        scheduler.add(request(number, list(range(begin, begin + 32)), max_tokens=1), seed=0)
        drive(scheduler, runner)
    facts = IterationFacts(0.0, 0, 0, 0, 0, 0, 0, 2)
    scheduler.add(request(7, [1], max_tokens=1), seed=0)
    step = scheduler.schedule()
    assert step is not None
    found = json.loads(iteration_stats(step, scheduler, facts))["kvCacheStats"]
    assert (found["reusedBlocks"], found["restoredBlocks"]) == (7, 3), "the other four were still on the device"
    assert found["hostMaxNumBlocks"] == 100 and 8 <= found["hostUsedNumBlocks"] <= 16


def test_host_pool_evicts_least_recently_used() -> None:
    tensor = torch.arange(24.0).view(6, 4)
    pool = HostBlockPool(CpuBlockCopier([tensor], 2 * 16), max_slots=2)
    a, b, c = ((0, bytes([i])) for i in range(3))
    pool.offload([a, b], [0, 1])
    pool.offload([a], [0])
    pool.offload([c], [2])
    assert a in pool and c in pool and b not in pool and pool.num_cached == pool.num_host_blocks == 2
    host_blocks = pool.pin([a, c])
    pool.offload([b], [1])
    assert b not in pool, "pinned host blocks are not reused"
    pool.restore(host_blocks, np.array([4, 5]))
    assert torch.equal(tensor[4:], tensor[[0, 2]])
    pool.check()
    pool.clear()
    assert a not in pool and pool.num_cached == 0
    pool.check()


def test_demo_model_resumes_from_offloaded_blocks() -> None:
    """A tiny cache, so that every prompt is evicted before it is repeated."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 100, 70).tolist() for _ in range(6)]
    report = Report(show=False)
    with LLM(
        "demo", device="cpu", num_kv_blocks=16, block_size=16, max_model_len=128, max_batch_size=2, kv_offload_gb=0.01,
        torch_compile_config=CAPTURED, report=report,
    ) as llm:  # fmt: skip
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        kv = llm.engine.scheduler.kv
        turns = []
        for restored in (False, True):
            turns.append([output.outputs[0].token_ids for output in llm.generate(prompts, greedy)])
            kv.check()
            assert (kv.restored_total > 0) == restored
        assert turns[0] == turns[1]
    (event,) = report.select("kv_offload")
    assert event["blocks"] > 16 and event["bytes"] <= 0.01 * 2**30
