"""The scheduler without threads: each request gets the same tokens as alone."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import numpy as np
import pytest

from tests.engine.fake import VOCAB, expected, make
from torchweave.engine.request import InferenceRequest, Response, SamplingParams
from torchweave.engine.scheduler.scheduler import Scheduler


def request(number: int, prompt: list[int], **params: object) -> InferenceRequest:
    streaming = bool(params.pop("streaming", False))
    return InferenceRequest(number, np.array(prompt), SamplingParams(temperature=0, **params), streaming)  # type: ignore[arg-type]


def drive(scheduler: Scheduler, runner, run_ahead: int = 2, per_step=lambda step: ()) -> dict[int, list[Response]]:
    """Run until all requests are answered, with `run_ahead` steps in flight; returns the responses by request."""
    in_flight: deque = deque()
    responses: dict[int, list[Response]] = {}
    for number in range(100_000):
        said = list(per_step(number))
        step = scheduler.schedule()
        if step is not None:
            in_flight.append((step, runner.launch(step)))
        if in_flight and (step is None or len(in_flight) >= run_ahead):
            done, handle = in_flight.popleft()
            said += scheduler.update(done, runner.collect(handle))
        for response in said:
            responses.setdefault(response.id, []).append(response)
        scheduler.kv.check()
        if step is None and not in_flight and not scheduler.num_active:
            return responses
    raise AssertionError("the run does not end")


def tokens_of(responses: list[Response]) -> list[int]:
    return [int(token) for response in responses for token in response.output.token_ids]


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_tokens_do_not_depend_on_the_batch(run_ahead: int) -> None:
    rng = np.random.default_rng(run_ahead)
    scheduler, runner = make(max_batch_size=6, num_blocks=40)
    wanted = {}
    for number in range(60):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 50)).tolist()
        max_tokens = int(rng.integers(1, 40))
        stops = tuple(rng.integers(0, VOCAB, rng.integers(0, 13)).tolist())
        scheduler.add(
            request(number, prompt, max_tokens=max_tokens, stop_token_ids=stops, streaming=bool(number % 2)), seed=0
        )
        wanted[number] = expected(prompt, max_tokens, stops)
    responses = drive(scheduler, runner, run_ahead)
    assert {number: tokens_of(said) for number, said in responses.items()} == wanted
    for said in responses.values():
        assert [r.final for r in said] == [False] * (len(said) - 1) + [True]
    assert scheduler.kv.num_free == scheduler.kv.num_blocks


def test_finish_reasons_and_streaming() -> None:
    scheduler, runner = make()
    whole = expected([1, 2, 3], 9)
    scheduler.add(request(0, [1, 2, 3], max_tokens=9), 0)
    scheduler.add(request(1, [1, 2, 3], max_tokens=9, streaming=True), 0)
    scheduler.add(request(2, [1, 2, 3], max_tokens=9, stop_token_ids=[whole[4]]), 0)
    responses = drive(scheduler, runner)
    assert len(responses[0]) == 1 and responses[0][0].output.finish_reason == "length"
    assert len(responses[1]) == 9 and tokens_of(responses[1]) == whole
    assert responses[2][0].output.finish_reason == "stop"
    assert tokens_of(responses[2]) == whole[: whole.index(whole[4]) + 1]


def test_min_tokens_holds_back_late_stops() -> None:
    """The host checks stop tokens beyond the device's table, and applies min_tokens too."""
    scheduler, runner = make()
    whole = expected([5], 12)
    others = [token for token in range(VOCAB) if token not in whole][:9]
    scheduler.add(request(0, [5], max_tokens=12, min_tokens=12, stop_token_ids=[*others, whole[2]]), 0)
    assert tokens_of(drive(scheduler, runner)[0]) == whole


def test_prompt_array_may_be_reused_by_the_client() -> None:
    scheduler, runner = make()
    array = np.array([5, 6, 7, 8], np.int32)
    scheduler.add(InferenceRequest(0, array, SamplingParams(temperature=0, max_tokens=5)), 0)
    array[:] = 9
    scheduler.add(InferenceRequest(1, array[1:], SamplingParams(temperature=0, max_tokens=5)), 0)
    array[:] = 11
    responses = drive(scheduler, runner)
    assert tokens_of(responses[0]) == expected([5, 6, 7, 8], 5) and tokens_of(responses[1]) == expected([9, 9, 9], 5)


def test_eos_and_ignore_eos() -> None:
    whole = expected([9, 9], 6)
    scheduler, runner = make(eos=[whole[2]])
    scheduler.add(request(0, [9, 9], max_tokens=6), 0)
    scheduler.add(request(1, [9, 9], max_tokens=6, ignore_eos=True), 0)
    responses = drive(scheduler, runner)
    assert tokens_of(responses[0]) == whole[: whole.index(whole[2]) + 1]
    assert tokens_of(responses[1]) == whole


def test_random_cancels_leave_nothing_behind() -> None:
    rng = np.random.default_rng(1)
    scheduler, runner = make(max_batch_size=5, num_blocks=30)
    number = iter(range(300))
    prompts: dict[int, list[int]] = {}

    def arrivals_and_cancels(step: int) -> list[Response]:
        said = []
        for _ in range(rng.integers(0, 3)):
            if (new := next(number, None)) is not None:
                prompts[new] = rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()
                scheduler.add(request(new, prompts[new], max_tokens=int(rng.integers(1, 30)), streaming=True), 0)
        if rng.random() < 0.3 and prompts:
            said += scheduler.cancel(int(rng.choice(list(prompts))))
        return said

    responses = drive(scheduler, runner, run_ahead=2, per_step=arrivals_and_cancels)
    assert sorted(responses) == sorted(prompts)
    for key, said in responses.items():
        got = tokens_of(said)
        assert got == expected(prompts[key], len(got)), "a request that was cancelled or not got wrong tokens"
        assert sum(response.final for response in said) == 1
    assert scheduler.kv.num_free == scheduler.kv.num_blocks and scheduler.num_active == 0


def test_guaranteed_no_evict_admits_only_what_fits_to_its_end() -> None:
    scheduler, runner = make(num_blocks=10, block_size=4)
    scheduler.add(request(0, [1] * 8, max_tokens=17), 0)  # 24 tokens are stored: 6 blocks
    scheduler.add(request(1, [2] * 8, max_tokens=17), 0)  # does not fit beside the first
    scheduler.add(request(2, [3], max_tokens=2), 0)  # would fit, but must not overtake
    step = scheduler.schedule()
    assert step is not None and step.num_rows == 1
    handle = runner.launch(step)
    assert scheduler.num_waiting == 2
    responses = scheduler.update(step, runner.collect(handle))
    assert not responses
    assert set(drive(scheduler, runner)) == {0, 1, 2}


def test_a_step_never_exceeds_its_budget() -> None:
    scheduler, runner = make(max_num_tokens=10)
    for number in range(12):
        scheduler.add(request(number, list(range(1, 30)), max_tokens=5), 0)
    launch = runner.launch
    sizes = []
    runner.launch = lambda step: (sizes.append(step.num_tokens), launch(step))[1]  # type: ignore[method-assign]
    drive(scheduler, runner)
    assert max(sizes) == 10


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, "outside 0..96"),
        ([-1], {}, "outside"),
        ([1] * 96, {}, "max_model_len is 96"),
        ([1] * 80, {"max_tokens": None}, ""),
    ],
)
def test_impossible_requests_are_rejected_with_a_reason(prompt: list[int], params: dict, words: str) -> None:
    scheduler, _ = make()
    why = scheduler.rejection_reason(request(0, prompt, **params))
    assert (words in why) if words else not why


def test_without_chunked_context_a_prompt_is_read_at_once_or_refused() -> None:
    scheduler, runner = make(chunked=False, max_num_tokens=16)
    assert "enable_chunked_context" in scheduler.rejection_reason(request(0, [1] * 17))
    scheduler.add(request(0, [1] * 12, max_tokens=3), 0)
    scheduler.add(request(1, [2] * 12, max_tokens=3), 0)
    responses = drive(scheduler, runner)
    assert tokens_of(responses[1]) == expected([2] * 12, 3)


def test_more_blocks_than_there_are_is_refused() -> None:
    scheduler, _ = make(num_blocks=3, block_size=4)
    assert "KV cache blocks" in scheduler.rejection_reason(request(0, [1] * 8, max_tokens=20))


# -- micro-batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, sizes", [(1, {1}), (2, {1}), (5, {2, 3}), (8, {4})])
def test_micro_batches_take_turns_and_a_step_depends_on_the_one_before_the_last(count: int, sizes: set[int]) -> None:
    scheduler, runner = make(max_batch_size=8, num_blocks=64, num_micro_batches=2)
    prompts = [[number, 1, 2] for number in range(count)]
    for number, prompt in enumerate(prompts):
        scheduler.add(request(number, prompt, max_tokens=20), seed=0)
    steps, launch = [], runner.launch
    runner.launch = lambda step: (steps.append(step), launch(step))[1]
    responses = drive(scheduler, runner, run_ahead=3)
    assert [tokens_of(responses[number]) for number in range(count)] == [expected(prompt, 20) for prompt in prompts]
    decodes = [step for step in steps if not step.chunks][1:16]
    assert {step.num_rows for step in decodes} == sizes
    for one, other in pairwise(decodes):
        assert bool(set(one.slots.tolist()) & set(other.slots.tolist())) == (count == 1)
        assert other.depends_on == (one.index if count == 1 else one.index - 1)


def test_chunks_of_a_prompt_do_not_wait_for_decode_rows_or_for_one_another() -> None:
    scheduler, runner = make(max_num_tokens=8, max_model_len=90, num_micro_batches=2)
    scheduler.add(request(0, [1, 2], max_tokens=30), seed=0)
    for _ in range(2):
        runner.launch(scheduler.schedule())
    scheduler.add(request(1, list(range(60)), max_tokens=2), seed=0)
    steps = [scheduler.schedule() for _ in range(6)]
    assert [step.num_decode_rows for step in steps if step] == [0, 1, 0, 1, 0, 1]
    assert [step.depends_on for step in steps if step] == [-1, 1, -1, 3, -1, 5]
    assert [step.num_tokens for step in steps if step] == [8] * 6
