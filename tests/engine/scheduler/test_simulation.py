"""Batches under random and chosen histories: no block is lost or shared wrongly, nobody starves or is answered twice.

`python -m tests.engine.scheduler.simulate` runs the same for as long as one likes; here is a small part of it, hypothesis
looking for short
histories that break something, and the counter-examples that were published against designs like this one.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.fake import VOCAB, make
from tests.engine.scheduler.simulate import World, random_beams, random_options, random_tokens, run
from tests.engine.scheduler.test_scheduler import request
from torchweave.engine.request import SamplingParams
from torchweave.engine.scheduler.policies import POLICIES


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_B4_a_small_part_of_the_simulation(policy: str) -> None:
    seen = run(policy, steps=1200, seed=11, check_every=2, episode=200)
    assert seen["requests"] > 100 and seen["searches"] > 20 and seen["cancelled"] > 10 and seen["copied"] > 50
    assert (seen["paused"] > 0) == (policy == "max_utilization")


class Batches(RuleBasedStateMachine):
    """Any order of arrivals, cancels and steps; hypothesis makes a failing one short."""

    world: World

    @initialize(policy=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 2**16))
    def begin(self, policy: str, seed: int) -> None:
        self.world = World(policy, seed=seed, **random_options(policy, np.random.default_rng(seed)))

    @rule(
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30), seed=st.integers(0, 99), salt=st.sampled_from("ab")
    )
    def arrive(self, prompt: list[int], seed: int, salt: str) -> None:
        self.world.ask(prompt, random_tokens(np.random.default_rng(seed)), streaming=bool(seed % 2), cache_salt=salt)

    @rule(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12), seed=st.integers(0, 99))
    def search(self, prompt: list[int], seed: int) -> None:
        self.world.ask(prompt, random_beams(np.random.default_rng(seed)))

    @precondition(lambda self: self.world.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.hear(self.world.batch.cancel(data.draw(st.sampled_from(sorted(self.world.asked)))))

    @rule(times=st.integers(1, 12), eager=st.booleans())
    def run_on(self, times: int, eager: bool) -> None:
        for _ in range(times):
            self.world.step(eager)

    @invariant()
    def everything_agrees(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestBatches = Batches.TestCase
TestBatches.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_B11_two_identical_prompts_read_in_one_step() -> None:
    """Neither may use a block that the other is only about to fill, and one that both filled is known once."""
    world = World("max_utilization", max_num_tokens=64)
    for _ in range(2):
        world.ask([5] * 20, SamplingParams(temperature=0, max_tokens=10))
    world.step()
    assert [len(step.chunks) for step, _ in world.flight] == [2]
    world.check()
    world.ask([5] * 20, SamplingParams(temperature=0, max_tokens=10))
    world.drain()
    assert world.batch.kv.reused_total == 4


def test_B4_one_request_is_paused_again_and_again() -> None:
    """Each new start finds the blocks of the one before, and no token is told or fed twice."""
    world = World("max_utilization", num_blocks=30, block_size=2, max_batch_size=5)
    world.ask([1] * 4, SamplingParams(temperature=0, max_tokens=54))
    for number in range(2, 5):
        world.ask([number] * 4, SamplingParams(temperature=0, max_tokens=14))
    victim = world.ask([9] * 4, SamplingParams(temperature=0, max_tokens=40), streaming=True)
    while world.asked:
        world.step()
        world.check()
    assert victim is not None and world.pauses[victim] >= 2
    world.drain()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_B4_a_context_longer_than_the_cache_is_refused_and_delays_nobody(policy: str) -> None:
    world = World(policy, num_blocks=10, block_size=4)
    assert world.ask([1] * 41, SamplingParams(temperature=0, max_tokens=1)) is None
    assert world.ask([1] * 20, SamplingParams(temperature=0, max_tokens=22)) is None
    assert world.ask([1] * 20, SamplingParams(beam_width=3, max_tokens=10)) is None
    assert "KV cache blocks" in world.batch.why_not(request(9, [1] * 41))
    world.ask([1] * 20, SamplingParams(temperature=0, max_tokens=21))  # fills every block there is
    world.ask([2] * 20, SamplingParams(temperature=0, max_tokens=21))
    world.drain()


def test_B4_the_only_request_is_not_paused_and_ends() -> None:
    world = World("max_utilization", num_blocks=10, block_size=4)
    world.ask([1] * 20, SamplingParams(temperature=0, max_tokens=21))
    world.drain()
    world.ask([1] * 8, SamplingParams(beam_width=3, n=3, max_tokens=9))
    world.drain()
    assert world.batch.paused_total == 0


def test_B4_a_paused_search_comes_back_whole() -> None:
    world = World("max_utilization", num_blocks=16, block_size=4, max_batch_size=6)
    world.ask([1] * 10, SamplingParams(temperature=0, max_tokens=40))
    world.ask([3] * 6, SamplingParams(beam_width=3, n=3, max_tokens=14))
    world.drain()
    assert world.batch.paused_total > 0


def test_the_checks_see_what_is_wrong() -> None:
    batch, runner = make()
    batch.add(request(0, list(range(20)), max_tokens=20), 0)
    batch.add(request(1, list(range(20, 40)), max_tokens=20), 0)
    step = batch.next_step()
    assert step is not None
    batch.absorb(step, runner.collect(runner.launch(step)))
    batch.check()
    kv = batch.kv
    saved = kv.table.copy()
    kv.table[0, 1, 0] = kv.table[0, 0, 0]
    with pytest.raises(AssertionError):
        batch.check()
    kv.table[:] = saved
    batch._slots.free.append(0)
    with pytest.raises(AssertionError, match="slot"):
        batch.check()


def test_a_wrong_block_changes_the_tokens() -> None:
    """The simulation is worth something: what it looks for can be seen."""
    world = World("guaranteed_no_evict")
    world.ask(np.random.default_rng(0).integers(0, VOCAB, 20), SamplingParams(temperature=0, max_tokens=20))
    for _ in range(4):
        world.step()
    world.runner.cache[int(world.batch.kv.table[0, world.batch._slots.of[0], 0]) * 4] += 1
    with pytest.raises(AssertionError, match="other tokens"):
        world.drain()
