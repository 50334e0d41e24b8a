"""Capacity policies: each request gets the same tokens as alone, however it is admitted, paused, chunked or shared."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.engine.fake import VOCAB, expected, make
from tests.engine.scheduler.test_scheduler import drive, request, tokens_of
from torchweave.engine.request import Response
from torchweave.engine.scheduler.policies import (
    POLICIES,
    DecodeRequests,
    PrefillRequest,
    Snapshot,
    WaitingRequest,
    chunk_sizes,
    should_delay_prefill,
    step_token_budget,
)
from torchweave.engine.scheduler.snapshot import LazySequence


def prompts(rng: np.random.Generator, count: int, longest: int) -> list[list[int]]:
    """Prompts, many with a common prefix."""
    stems = [rng.integers(0, VOCAB, longest).tolist() for _ in range(3)]
    found = []
    for _ in range(count):
        stem = stems[rng.integers(3)][: rng.integers(0, longest)]
        found.append([*stem, *rng.integers(0, VOCAB, rng.integers(1, 6)).tolist()])
    return found


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("equal_progress", [True, False])
@pytest.mark.parametrize("run_ahead", [1, 3])
def test_tokens_are_those_of_an_undisturbed_run(policy: str, reuse: bool, equal_progress: bool, run_ahead: int) -> None:
    rng = np.random.default_rng(run_ahead)
    scheduler, runner = make(
        policy=policy, reuse=reuse, equal_progress=equal_progress, max_batch_size=6, num_blocks=25, max_num_tokens=24
    )
    launch = runner.launch
    sizes = []
    runner.launch = lambda step: (sizes.append(step.num_tokens), launch(step))[1]  # type: ignore[method-assign]
    wanted = {}
    for number, prompt in enumerate(prompts(rng, 60, 50)):
        max_tokens = int(rng.integers(1, 40))
        stops = tuple(rng.integers(0, VOCAB, rng.integers(0, 13)).tolist())
        streaming = bool(number % 2)
        scheduler.add(request(number, prompt, max_tokens=max_tokens, stop_token_ids=stops, streaming=streaming), seed=0)
        wanted[number] = expected(prompt, max_tokens, stops)
    responses = drive(scheduler, runner, run_ahead)
    assert {number: tokens_of(said) for number, said in responses.items()} == wanted
    assert max(sizes) <= 24
    assert scheduler.kv.num_free == scheduler.kv.num_blocks
    assert (scheduler.kv.reused_total > 0) == reuse
    assert (scheduler.paused_total > 0) == (policy == "max_utilization"), "the cache is small enough to pause"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_random_arrivals_cancels_and_a_tiny_cache(policy: str) -> None:
    """No block is lost and each request is answered once, under arrivals, cancels and pauses."""
    rng = np.random.default_rng(7)
    scheduler, runner = make(policy=policy, max_batch_size=5, num_blocks=24, max_num_tokens=16, equal_progress=True)
    number, asked = iter(range(400)), {}
    texts = prompts(rng, 400, 60)

    def arrivals_and_cancels(step: int) -> Iterator[Response]:
        for _ in range(rng.integers(0, 3)):
            if (new := next(number, None)) is not None:
                asked[new] = texts[new]
                scheduler.add(request(new, texts[new], max_tokens=int(rng.integers(1, 30)), streaming=bool(new % 3)), 0)
        if rng.random() < 0.3 and asked:
            yield from scheduler.cancel(int(rng.choice(list(asked))))

    responses = drive(scheduler, runner, run_ahead=2, per_step=arrivals_and_cancels)
    assert sorted(responses) == sorted(asked)
    for key, said in responses.items():
        got = tokens_of(said)
        assert got == expected(asked[key], len(got))
        assert [response.final for response in said] == [False] * (len(said) - 1) + [True]
    assert scheduler.kv.num_free == scheduler.kv.num_blocks and scheduler.num_active == 0


def test_equal_prompts_in_one_step_share_no_unwritten_blocks() -> None:
    scheduler, runner = make(max_num_tokens=64)
    for number in range(3):
        scheduler.add(request(number, [5] * 20, max_tokens=6), 0)
    responses = drive(scheduler, runner)
    assert scheduler.kv.reused_total == 0
    assert all(tokens_of(responses[number]) == expected([5] * 20, 6) for number in range(3))
    scheduler.add(request(3, [5] * 20, max_tokens=6), 0)
    assert tokens_of(drive(scheduler, runner)[3]) == expected([5] * 20, 6)
    assert scheduler.kv.reused_total == 4, "all blocks but the one with the last token"


def test_answers_are_reused_as_the_next_prompt() -> None:
    """The prompt of a conversation's second turn begins with the first prompt and its answer."""
    scheduler, runner = make()
    first = [1, 2, 3, 4, 5]
    scheduler.add(request(0, first, max_tokens=20), 0)
    answer = tokens_of(drive(scheduler, runner)[0])
    second = [*first, *answer, 9, 9]
    scheduler.add(request(1, second, max_tokens=5), 0)
    assert tokens_of(drive(scheduler, runner)[1]) == expected(second, 5)
    assert scheduler.kv.reused_total == (len(first) + len(answer) - 1) // 4


def test_different_cache_salts_share_no_blocks() -> None:
    scheduler, runner = make()
    for number, salt in enumerate(["a", "b", "a"]):
        one = request(number, [7] * 16, max_tokens=2)
        scheduler.add(type(one)(one.id, one.input_ids, one.sampling, cache_salt=salt), 0)
        drive(scheduler, runner)
        assert scheduler.kv.reused_total == (3 if number == 2 else 0)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [({}, [2, 3, 0, 1]), ({"priority_order": -1}, [0, 1, 3, 2]), ({"priority_order": 0}, [0, 1, 2, 3])],
)
def test_requests_start_by_priority_then_by_arrival(sizes: dict[str, int], expected: list[int]) -> None:
    scheduler, runner = make(max_batch_size=1, **sizes)  # type: ignore[arg-type]
    order: list[int] = []
    for number, priority in enumerate([0, 0, 5, 1]):
        one = request(number, [number + 1], max_tokens=2)
        scheduler.add(type(one)(one.id, one.input_ids, one.sampling, priority=priority), 0)

    def note(step: int) -> tuple[()]:
        order.extend(key for key in scheduler._running.slots.slot_of if key not in order)
        return ()

    drive(scheduler, runner, per_step=note)
    assert order == expected


def test_last_started_request_is_paused_and_resumes() -> None:
    scheduler, runner = make(policy="max_utilization", num_blocks=10, block_size=4, reuse=False)
    for number in range(3):
        scheduler.add(request(number, [number] * 8, max_tokens=17), 0)
    paused: set[int] = set()

    def note(step: int) -> tuple[()]:
        paused.update(state.request.id for state in scheduler._waiting if state.paused)
        return ()

    responses = drive(scheduler, runner, per_step=note)
    assert scheduler.paused_total > 0 and 0 not in paused and 2 in paused
    assert all(tokens_of(responses[number]) == expected([number] * 8, 17) for number in range(3))


def test_the_only_request_is_never_paused() -> None:
    scheduler, runner = make(policy="max_utilization", num_blocks=6, block_size=4)
    scheduler.add(request(0, [1] * 8, max_tokens=17), 0)  # takes every block there is
    assert tokens_of(drive(scheduler, runner)[0]) == expected([1] * 8, 17)
    assert scheduler.paused_total == 0


def test_a_static_batch_starts_and_ends_together() -> None:
    scheduler, runner = make(policy="static_batch", max_batch_size=2)
    for number, length in enumerate([2, 9, 3, 3]):
        scheduler.add(request(number, [number + 1] * 5, max_tokens=length), 0)
    together: set[frozenset[int]] = set()

    def note(step: int) -> tuple[()]:
        together.add(frozenset(scheduler._running.slots.slot_of))
        return ()

    drive(scheduler, runner, per_step=note)
    assert frozenset({0, 1}) in together and frozenset({2, 3}) in together
    assert not any(one & {0, 1} and one & {2, 3} for one in together)


# -- policies alone ------------------------------------------------------------------------------------------------------


def snapshot(**facts: object) -> Snapshot:
    given = {"max_num_tokens": 100, "free_slots": 8, "block_size": 4, "free_blocks": 10, "unreserved_blocks": 10}
    return Snapshot(**{**given, **facts})  # type: ignore[arg-type]


def decode(*rows: tuple[int, int, int]) -> DecodeRequests:
    blocks_needed, held_blocks, start_order = np.array(rows).T
    return DecodeRequests(blocks_needed, held_blocks, start_order)


def test_max_utilization_pauses_no_more_than_is_needed() -> None:
    decide = POLICIES["max_utilization"]
    running = decode((1, 5, 0), (1, 5, 1), (1, 2, 2))
    tight = decide(snapshot(free_blocks=1, decode=running))
    assert tight.paused == (2,) and tight.skipped == (1,), "the second waits a step for the third's blocks"
    assert decide(snapshot(free_blocks=1, pending_free_blocks=4, decode=running)).paused == ()
    assert decide(snapshot(free_blocks=3, decode=running)).skipped == ()


def test_max_utilization_never_pauses_the_request_that_started_first() -> None:
    decide = POLICIES["max_utilization"]
    for rows in ([(9, 1, 0), (1, 1, 1), (1, 1, 2)], [(1, 1, 2), (1, 1, 1), (9, 1, 0)]):
        paused = decide(snapshot(free_blocks=0, decode=decode(*rows))).paused
        assert sorted(rows[index][2] for index in paused) == [1, 2], "all others, though it lacks blocks even so"
    assert decide(snapshot(free_blocks=0, decode=decode((9, 1, 0)))).paused == ()


def test_max_utilization_reserves_a_block_per_running_request() -> None:
    decide = POLICIES["max_utilization"]
    running = decode((0, 5, 0), (0, 5, 1))
    waiting = (WaitingRequest(remaining_tokens=8, max_blocks=9),)
    assert decide(snapshot(free_blocks=4, decode=running, waiting=waiting)).admitted == (8,)
    assert decide(snapshot(free_blocks=2, decode=running, waiting=waiting)).admitted == ()
    assert decide(snapshot(free_blocks=9, pending_free_blocks=1, decode=running, waiting=waiting)).admitted == ()


def test_max_utilization_reads_as_much_of_a_prompt_as_fits() -> None:
    prefill = (PrefillRequest(remaining_tokens=40, allocated_tokens=2, held_blocks=3, start_order=0),)
    assert POLICIES["max_utilization"](snapshot(free_blocks=3, prefill=prefill)).chunks == (14,)


def test_guaranteed_no_evict_never_pauses_and_never_overtakes() -> None:
    waiting = (WaitingRequest(4, 6), WaitingRequest(4, 6), WaitingRequest(4, 1))
    decision = POLICIES["guaranteed_no_evict"](snapshot(waiting=waiting))
    assert decision.admitted == (4,) and not decision.paused and not decision.skipped


@pytest.mark.parametrize(
    ("remaining_tokens", "budget", "sizes"),
    [
        ([10, 10], 30, [10, 10]),
        ([10, 10], 12, [8, 4]),
        ([40, 40, 2], 24, [12, 10, 2]),
        ([9, 50], 40, [9, 31]),
        ([50, 50], 3, [3, 0]),
    ],
)
def test_equal_progress(remaining_tokens: list[int], budget: int, sizes: list[int]) -> None:
    found = chunk_sizes(remaining_tokens, budget, chunked=True, equal=True, unit=4)
    assert found == sizes and sum(found) == min(budget, sum(remaining_tokens))


def test_without_chunks_a_prompt_is_read_at_once_or_not() -> None:
    assert chunk_sizes([5, 9, 3], 10, chunked=False, equal=True, unit=4) == [5, 0, 3]


def test_mixed_step_token_budget() -> None:
    sizes = (256, 384, 512, 768)
    assert step_token_budget(8192, sizes, 0, 1000) == 8192, "nobody waits"
    assert step_token_budget(8192, (), 40, 1000) == 8192, "switched off"
    assert step_token_budget(8192, sizes, 40, 544) == 256
    assert step_token_budget(8192, sizes, 200, 544) == 384, "half of 256 is left for prompts"
    assert step_token_budget(8192, sizes, 40, 3000) == 256, "few more wait: nobody notices"
    assert step_token_budget(8192, sizes, 40, 8000) == 768, "a sixteenth of what waits"
    assert step_token_budget(8192, sizes, 40, 9000) == 8192, "many wait: all that counts is to read them"
    assert step_token_budget(8192, sizes, 800, 544) == 8192, "none of the sizes is large enough"
    assert step_token_budget(300, sizes, 200, 250) == 300


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_a_long_prefill_does_not_stall_decodes(policy: str) -> None:
    scheduler, runner = make(policy=policy, max_num_tokens=128, mixed_step_sizes=(8, 16, 24), reuse=False)
    sizes = []
    for number, length in enumerate((3, 30, 126)):
        scheduler.add(request(number, list(range(length)), max_tokens=30), 0)
        for _ in range(12):
            step = scheduler.schedule()
            assert step is not None
            sizes.append((step.num_decode_rows, step.num_prefill_tokens))
            scheduler.update(step, runner.collect(runner.launch(step)))
    assert sizes[0] == (0, 3), "alone, a prompt is read at once"
    assert [size for size in sizes[:24] if size[1]][1:] == [(1, 7), (1, 7), (1, 7), (1, 7), (1, 2)]
    assert max(sum(size) for size in sizes[24:]) == 16, "a sixteenth of 126, beside two"


def test_prefills_are_delayed_only_while_others_decode() -> None:
    few = snapshot(decode=decode((0, 1, 0)), waiting=(WaitingRequest(10, 3),))
    assert should_delay_prefill(few, 0, timeout_iters=5, max_tokens_ratio=0.5)
    assert not should_delay_prefill(few, 5, timeout_iters=5, max_tokens_ratio=0.5)
    assert not should_delay_prefill(few, 0, timeout_iters=5, max_tokens_ratio=0.1)
    assert not should_delay_prefill(
        snapshot(waiting=(WaitingRequest(10, 3),)), 0, timeout_iters=5, max_tokens_ratio=0.5
    )


def test_delayed_prefills_start_after_the_timeout() -> None:
    scheduler, runner = make(batch_wait_timeout_iters=4, batch_wait_max_tokens_ratio=0.9)
    scheduler.add(request(0, [1], max_tokens=30), 0)
    first = scheduler.schedule()
    assert first is not None
    scheduler.update(first, runner.collect(runner.launch(first)))
    scheduler.add(request(1, [2, 3], max_tokens=4), 0)
    steps = [scheduler.schedule() for _ in range(5)]
    assert [len(step.chunks) for step in steps if step is not None] == [0, 0, 0, 0, 1]


def test_waiting_requests_are_evaluated_lazily() -> None:
    evaluated: list[int] = []

    def requests() -> Iterator[WaitingRequest]:
        for number in range(6):
            evaluated.append(number)
            yield WaitingRequest(number, 1)

    waiting = LazySequence(requests())
    assert waiting[0].remaining_tokens == 0 and evaluated == [0]
    assert [each.remaining_tokens for each in waiting[:3]] == [0, 1, 2] == evaluated
    assert not waiting[:0] and waiting[1].remaining_tokens == 1 and len(evaluated) == 3
    assert waiting[-1].remaining_tokens == 5 and len(waiting) == 6 and waiting[2:][0].remaining_tokens == 2
    assert [each.remaining_tokens for each in waiting] == evaluated == list(range(6))
    with pytest.raises(IndexError):
        waiting[6]
    assert [each.remaining_tokens for each in LazySequence(requests())][:0] == [] and len(
        LazySequence(requests())[1:]
    ) == 5
