"""Snapshots of recurrent states: where they are taken, what evicts them, and the copies of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.fake import FakeRunner, make
from tests.engine.scheduler.test_scheduler import request
from torchweave.engine.kv_cache.block_copy import copy_states
from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.kv_cache.state_snapshots import StateSnapshots
from torchweave.engine.request import InferenceRequest
from torchweave.engine.scheduler.scheduler import Scheduler


def names(*letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


def save(snapshots: StateSnapshots, slot: int, *letters: str) -> None:
    """Take a snapshot after all blocks of a new request in `slot`, which has one more token."""
    snapshots.begin(slot, PrefixHit(), 4 * len(letters) + 1)
    snapshots.save(slot, names(*letters), 4 * len(letters))
    snapshots.release(slot)


def rows_of(snapshots: StateSnapshots) -> dict[str, list[list[int]]]:
    return {name: [rows.tolist() for rows in copies] for name, copies in snapshots.take_copies().items()}


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    snapshots = StateSnapshots(first_row=8, count=2, block_size=4)
    save(snapshots, 0, "a")
    save(snapshots, 1, "a", "b")
    assert snapshots.longest(names("a", "b", "c"), 3) == 2 and snapshots.longest(names("a", "x"), 2) == 1
    snapshots.take_copies()
    snapshots.begin(2, PrefixHit(1, names("a")), 9)  # "a" is used again
    save(snapshots, 3, "c")
    assert snapshots.longest(names("a", "b"), 2) == 1 and snapshots.longest(names("c"), 1) == 1
    assert rows_of(snapshots) == {"restores": [[8], [2]], "saves": [[3], [9]]}
    assert snapshots.take_copies() == {}
    snapshots.check()
    snapshots.clear()
    assert snapshots.longest(names("a"), 1) == 0 and snapshots.num_used == 0
    snapshots.check()


def test_a_row_that_is_evicted_in_the_step_of_its_copy_is_written_once() -> None:
    snapshots = StateSnapshots(first_row=4, count=1, block_size=4)
    save(snapshots, 0, "a")
    save(snapshots, 1, "b")
    assert rows_of(snapshots) == {"saves": [[1], [4]]}
    assert snapshots.longest(names("a"), 1) == 0 and snapshots.longest(names("b"), 1) == 1


def test_a_known_prefix_is_not_copied_again() -> None:
    snapshots = StateSnapshots(first_row=4, count=2, block_size=4)
    save(snapshots, 0, "a")
    snapshots.take_copies()
    save(snapshots, 1, "a")
    assert snapshots.take_copies() == {} and snapshots.saved_total == 1


@pytest.mark.parametrize(
    ("cached", "shared", "begin", "size", "expected"),
    [
        (0, 0, 0, 30, 28),  # up to the last full block that a later request may share
        (0, 0, 28, 2, 2),
        (0, 3, 0, 30, 12),  # up to the end of the blocks that another request has
        (0, 3, 12, 18, 16),
        (3, 3, 12, 18, 16),
        (0, 0, 0, 9, 9),  # a chunk that ends before
    ],
)
def test_chunks_end_at_snapshots(cached: int, shared: int, begin: int, size: int, expected: int) -> None:
    snapshots = StateSnapshots(first_row=4, count=2, block_size=4)
    if cached:
        save(snapshots, 1, *"abc"[:cached])
    snapshots.begin(0, PrefixHit(cached, names(*"abc"[:cached]), longest=PrefixHit(shared)), 30)
    assert snapshots.chunk_size(0, begin, size, 30) == expected


def test_a_long_prompt_has_a_snapshot_every_sixteen_blocks() -> None:
    scheduler, runner = make(
        max_num_tokens=70, max_model_len=400, num_blocks=100, num_snapshots=8, has_recurrent_states=True
    )
    scheduler.add(request(0, [1, 2, 3] * 70, max_tokens=2), 0)
    ends = run_to_the_end(scheduler, runner)
    assert ends == [68, 136, 204, 208, 210] and [end % 4 for end in ends[:-1]] == [0] * 4
    snapshots = scheduler.kv.snapshots
    assert snapshots is not None and snapshots.saved_total == 4


def run_to_the_end(scheduler: Scheduler, runner: FakeRunner) -> list[int]:
    """Ends of the chunks of the first prompt."""
    ends = []
    while scheduler.num_active:
        step = scheduler.schedule()
        assert step is not None
        ends += [chunk.start + len(chunk.tokens) for chunk in step.chunks[:1]]
        scheduler.update(step, runner.collect(runner.launch(step)))
    return ends


def test_prompts_are_cut_only_where_chunks_may_be() -> None:
    scheduler, runner = make(chunked=False, max_num_tokens=70, num_snapshots=4, has_recurrent_states=True)
    scheduler.add(request(0, list(range(30)), max_tokens=2), 0)
    assert run_to_the_end(scheduler, runner) == [30]


def test_a_cancelled_request_leaves_no_pending_copy() -> None:
    scheduler, runner = make(num_snapshots=2, has_recurrent_states=True)
    prompt = list(range(20))
    for number in range(2):
        scheduler.add(request(number, prompt, max_tokens=2), 0)
        run_to_the_end(scheduler, runner)
    snapshots = scheduler.kv.snapshots
    assert snapshots is not None and snapshots.restored_total == 1
    scheduler.add(InferenceRequest(2, np.array(prompt)), 0)
    scheduler._start(scheduler._waiting.pop())
    scheduler.cancel(2)
    assert snapshots.take_copies() == {}


def test_rows_of_every_state_are_copied() -> None:
    states = [torch.randn(5, 3, 2), torch.randn(5, 7), torch.randn(5, 4).bfloat16()]
    before = [state.clone() for state in states]
    copy_states(states, np.array([0, 2]), np.array([4, 1]))
    for state, was in zip(states, before, strict=True):
        assert torch.equal(state, was[[0, 2, 2, 3, 0]])
