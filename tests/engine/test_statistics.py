"""Statistics of the batch manager (requirement B5), key by key."""

from __future__ import annotations

import time
from datetime import datetime

import numpy as np

from tests.engine.test_batch_manager import Harness
from torchweave.engine.request import InferenceRequest, SamplingParams

GENERAL = {"Timestamp", "Iteration Counter", "Active Request Count", "Max Request Count"}
PAGED = {
    "Max KV cache blocks",
    "Free KV cache blocks",
    "Used KV cache blocks",
    "Tokens per KV cache block",
    "Scheduled Requests",
}
INFLIGHT = {"Scheduled Requests", "Context Requests", "Generation Requests", "Total Context Tokens", "MicroBatch ID"}
STATIC = {
    "Scheduled Requests", "Context Requests", "Total Generation Tokens", "Total Context Tokens", "Empty Generation Slots",
}  # fmt: skip
TODAY = {
    "iter", "iterLatencyMS", "numNewActiveRequests", "numActiveRequests", "numQueuedRequests", "numCompletedRequests",
    "maxNumActiveRequests", "kvCacheStats",
}  # fmt: skip
CACHE = {
    "maxNumBlocks", "freeNumBlocks", "usedNumBlocks", "tokensPerBlock", "allocTotalBlocks", "allocNewBlocks", "reusedBlocks",
    "missedBlocks",
}  # fmt: skip
BATCHING = {
    "numScheduledRequests",
    "numContextRequests",
    "numGenRequests",
    "numPausedRequests",
    "numCtxTokens",
    "microBatchId",
}


def test_the_keys_of_in_flight_batching_are_the_documented_ones() -> None:
    with (h := Harness()).manager:
        h.ask(1, [1] * 40, max_tokens=3)
        h.wait_final(1)
    for record in h.stats:
        assert set(record) == GENERAL | PAGED | INFLIGHT | TODAY | {"inflightBatchingStats"}, (
            "no GPU, so no gpuMemUsage"
        )
        assert set(record["kvCacheStats"]) - {"cacheHitRate"} == CACHE
    first, last = h.stats[0], h.stats[-1]
    assert set(first["inflightBatchingStats"]) == BATCHING, "nothing was decoded, so there is no average of it"
    assert set(last["inflightBatchingStats"]) == BATCHING | {"avgNumDecodedTokensPerIter"}
    assert set(list(first)[:4]) == GENERAL


def test_micro_batches_are_numbered() -> None:
    with (h := Harness(sizes={"num_micro_batches": 2})).manager:
        for number in (1, 2):
            h.ask(number, [number] * 5, max_tokens=9)
        h.wait_final(1, 2)
    numbers = [record["MicroBatch ID"] for record in h.stats]
    assert numbers == [record["inflightBatchingStats"]["microBatchId"] for record in h.stats]
    assert numbers == [step % 2 for step in range(len(numbers))] and len(numbers) > 9


def test_drafts_are_counted() -> None:
    with (h := Harness(sizes={"query_len": 4, "max_drafting_rows": 8})).manager:
        h.ask(1, [1] * 5, max_tokens=30)
        h.wait_final(1)
    counts = h.stats[-1]["spec_decode"]
    assert 0 < counts["num_accepted_tokens"] == sum(counts["num_accepted_tokens_per_pos"]) <= counts["num_draft_tokens"]
    means = [record["inflightBatchingStats"].get("avgNumDecodedTokensPerIter", 0) for record in h.stats]
    assert 1 < max(means) <= 4


def test_the_keys_of_static_batching_are_the_documented_ones() -> None:
    with (h := Harness(sizes={"policy": "static_batch"})).manager:
        h.ask(1, [1] * 5, max_tokens=3)
        h.wait_final(1)
    for record in h.stats:
        assert set(record) == GENERAL | PAGED | STATIC | TODAY | {"staticBatchingStats"}
    assert [s["Total Generation Tokens"] for s in h.stats] == [0, 1, 1]
    assert [s["staticBatchingStats"]["numCtxTokens"] for s in h.stats] == [5, 0, 0]
    assert {s["Empty Generation Slots"] for s in h.stats} == {0}


def test_empty_slots_are_those_of_requests_that_ended_before_their_static_batch() -> None:
    with (h := Harness(sizes={"policy": "static_batch"})).manager:
        h.todo += [  # in one assignment: the loop takes them together
            InferenceRequest(number, np.full(5, number), SamplingParams(temperature=0, max_tokens=length))
            for number, length in enumerate((2, 4, 5), 1)
        ]
        h.manager.wake()
        h.wait_final(1, 2, 3)
    rows = [s["Total Generation Tokens"] for s in h.stats]
    assert [s["Empty Generation Slots"] for s in h.stats] == [3 - count if count else 0 for count in rows]
    assert rows == [0, 3, 2, 2, 1] and h.stats[-1]["staticBatchingStats"]["emptyGenSlots"] == 2


def test_a_request_of_a_static_batch_that_skips_a_step_has_not_ended() -> None:
    """A beam search waits for its own results, while other requests run ahead."""
    with (h := Harness(sizes={"policy": "static_batch"})).manager:
        h.todo += [
            InferenceRequest(1, np.full(5, 1), SamplingParams(temperature=0, max_tokens=6, beam_width=2)),
            InferenceRequest(2, np.full(5, 2), SamplingParams(temperature=0, max_tokens=3)),
        ]
        h.manager.wake()
        h.wait_final(1, 2)
    both = [s for s in h.stats if s["Active Request Count"] == 2]
    assert {s["Scheduled Requests"] for s in both} == {1, 2} and {s["Empty Generation Slots"] for s in both} == {0}
    assert {s["Empty Generation Slots"] for s in h.stats if s not in both} == {1}
    assert h.stats[-1]["Total Generation Tokens"] == 2, "one for each beam"


def test_tokens_of_accepted_drafts_are_generated_tokens() -> None:
    with (h := Harness(sizes={"policy": "static_batch", "query_len": 4, "max_drafting_rows": 8})).manager:
        h.ask(1, [1] * 5, max_tokens=30)
        h.wait_final(1)
    generated = sum(s["Total Generation Tokens"] for s in h.stats)
    assert generated == sum(s["staticBatchingStats"]["numGenTokens"] for s in h.stats)
    assert len(h.stats) < 29 <= generated, (
        "the first token is of the context phase; the last step may keep more than is sent"
    )


def test_the_count_of_requests_is_bounded_by_what_the_manager_takes() -> None:
    for options, most in (({"max_num_requests": 3}, 3), ({}, None)):
        with (h := Harness(**options)).manager:  # type: ignore[arg-type]
            h.ask(1, [1] * 5, max_tokens=2)
            h.wait_final(1)
        assert {s["Max Request Count"] for s in h.stats} == {most or h.scheduler.limits.max_batch_size}


def test_the_figures_are_those_of_the_steps() -> None:
    with (h := Harness()).manager:
        h.ask(1, [1] * 40, max_tokens=3)
        h.wait_final(1)
        h.ask(2, [1] * 40, max_tokens=1)
        h.wait_final(2)
    assert [s["Total Context Tokens"] for s in h.stats] == [32, 8, 0, 0, 4]
    assert [s["Iteration Counter"] for s in h.stats] == list(range(5))
    assert [s["Context Requests"] for s in h.stats] == [1, 1, 0, 0, 1]
    assert [s["Generation Requests"] for s in h.stats] == [0, 0, 1, 1, 0]
    assert [s["numCompletedRequests"] for s in h.stats] == [0, 0, 0, 1, 1]
    assert sum(s["numNewActiveRequests"] for s in h.stats) == 2
    cache = h.stats[-1]["kvCacheStats"]
    assert cache["reusedBlocks"] == 9 and cache["missedBlocks"] == 10 + 1 and cache["cacheHitRate"] == 9 / 20
    assert all(s["Free KV cache blocks"] + s["Used KV cache blocks"] == s["Max KV cache blocks"] for s in h.stats)
    for record in h.stats:
        assert abs(datetime.strptime(record["Timestamp"], "%m-%d-%Y %H:%M:%S").timestamp() - time.time()) < 60
        assert 0 < record["iterLatencyMS"] < 10_000


def test_a_beam_search_is_one_request() -> None:
    with (h := Harness()).manager:
        h.ask(1, [1] * 5, beam_width=4, max_tokens=4)
        h.wait_final(1)
    assert [s["Scheduled Requests"] for s in h.stats] == [1] * 4
    assert [s["Generation Requests"] for s in h.stats] == [0, 1, 1, 1]


def test_no_statistics_when_nothing_is_active() -> None:
    with (h := Harness()).manager:
        time.sleep(0.05)
        assert not h.stats
        h.ask(1, [1], max_tokens=3)
        h.wait_final(1)
        end = time.monotonic() + 60
        while len(h.stats) < 3 and time.monotonic() < end:  # the last one follows the answer
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(h.stats) == 3


def test_the_latency_of_an_iteration_is_not_that_of_the_pause_before() -> None:
    with (h := Harness()).manager:
        for number in range(1, 5):
            h.ask(number, [1], max_tokens=1)
            h.wait_final(number)
            time.sleep(0.3)
    assert min(record["iterLatencyMS"] for record in h.stats[1:]) < 250, "a busy machine may delay some, not all"


def test_stats_interval_loses_no_request() -> None:
    """The last statistics before the manager is idle are always sent, so that monitors do not show ended requests."""
    with (h := Harness(stats_interval=0.02, sizes={"max_model_len": 1000, "num_blocks": 400})).manager:
        begin = time.monotonic()
        h.ask(1, [1], max_tokens=900)
        h.wait_final(1)
        time.sleep(0.05)
        seconds = time.monotonic() - begin
    assert 1 < len(h.stats) <= min(seconds / 0.02 + 2, 899)
    assert sum(s["numCompletedRequests"] for s in h.stats) == sum(s["numNewActiveRequests"] for s in h.stats) == 1
