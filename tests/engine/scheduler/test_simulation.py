"""Random and chosen request histories: no lost or wrongly shared block, no starvation, one final response each.

A short run of `python -m tests.engine.scheduler.simulate`, a search for short failing histories by hypothesis, and published
counter-examples to similar schedulers.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.fake import VOCAB, make
from tests.engine.scheduler.simulate import Simulation, random_beams, random_options, random_tokens, run
from tests.engine.scheduler.test_scheduler import request
from torchweave.engine.request import SamplingParams
from torchweave.engine.scheduler.policies import POLICIES


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_short_simulation(policy: str) -> None:
    counts = run(policy, steps=1200, seed=11, check_every=2, episode=200)
    assert counts["requests"] > 80 and counts["searches"] > 20 and counts["cancelled"] > 8 and counts["copied"] > 50
    assert counts["together"] > 60  # steps that pipeline stages compute at the same time as the one before
    assert (counts["paused"] > 0) == (policy == "max_utilization")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_short_simulation_of_recurrent_states(policy: str) -> None:
    """A slot's state is that of its tokens, whether it was computed, restored from a snapshot, or copied from another beam."""
    counts = run(policy, steps=1500, seed=5, check_every=2, episode=200, states=True)
    assert counts["states saved"] > 15 and counts["states restored"] >= 4 and counts["cancelled"] > 10
    assert counts["searches"] > 15


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_short_simulation_of_recurrent_states_with_drafts(policy: str) -> None:
    """A state advances by the tokens that a step with drafts keeps, between pauses, cancels and restored snapshots."""
    counts = run(policy, steps=1200, seed=3, check_every=4, episode=200, states=True, drafts=True)
    assert counts["states saved"] > 20 and counts["states restored"] >= 4 and counts["with drafts"] > 100


class Batches(RuleBasedStateMachine):
    """Arrivals, cancels and steps in any order; hypothesis shrinks failing ones."""

    simulation: Simulation

    @initialize(policy=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 2**16))
    def begin(self, policy: str, seed: int) -> None:
        self.simulation = Simulation(policy, seed=seed, **random_options(policy, np.random.default_rng(seed)))

    @rule(
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30), seed=st.integers(0, 99), salt=st.sampled_from("ab")
    )
    def arrive(self, prompt: list[int], seed: int, salt: str) -> None:
        self.simulation.submit(
            prompt, random_tokens(np.random.default_rng(seed)), streaming=bool(seed % 2), cache_salt=salt
        )

    @rule(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12), seed=st.integers(0, 99))
    def search(self, prompt: list[int], seed: int) -> None:
        self.simulation.submit(prompt, random_beams(np.random.default_rng(seed)))

    @precondition(lambda self: self.simulation.pending)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.simulation.on_responses(
            self.simulation.scheduler.cancel(data.draw(st.sampled_from(sorted(self.simulation.pending))))
        )

    @rule(times=st.integers(1, 12), eager=st.booleans())
    def run_on(self, times: int, eager: bool) -> None:
        for _ in range(times):
            self.simulation.step(eager)

    @invariant()
    def everything_agrees(self) -> None:
        self.simulation.check()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()


TestBatches = Batches.TestCase
TestBatches.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_two_identical_prompts_read_in_one_step() -> None:
    """Neither uses a block that the other has not filled yet; of two equal blocks one enters the prefix cache."""
    simulation = Simulation("max_utilization", max_num_tokens=64)
    for _ in range(2):
        simulation.submit([5] * 20, SamplingParams(temperature=0, max_tokens=10))
    simulation.step()
    assert [len(step.chunks) for step, _ in simulation.in_flight] == [2]
    simulation.check()
    simulation.submit([5] * 20, SamplingParams(temperature=0, max_tokens=10))
    simulation.drain()
    assert simulation.scheduler.kv.reused_total == 4


def test_one_request_is_paused_again_and_again() -> None:
    """Each restart reuses the blocks of the previous run, and no token is sent or fed twice."""
    simulation = Simulation("max_utilization", num_blocks=30, block_size=2, max_batch_size=5)
    simulation.submit([1] * 4, SamplingParams(temperature=0, max_tokens=54))
    for number in range(2, 5):
        simulation.submit([number] * 4, SamplingParams(temperature=0, max_tokens=14))
    victim = simulation.submit([9] * 4, SamplingParams(temperature=0, max_tokens=40), streaming=True)
    while simulation.pending:
        simulation.step()
        simulation.check()
    assert victim is not None and simulation.pauses[victim] >= 2
    simulation.drain()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_context_longer_than_the_cache_is_refused_and_delays_nobody(policy: str) -> None:
    simulation = Simulation(policy, num_blocks=10, block_size=4)
    assert simulation.submit([1] * 41, SamplingParams(temperature=0, max_tokens=1)) is None
    assert simulation.submit([1] * 20, SamplingParams(temperature=0, max_tokens=22)) is None
    assert simulation.submit([1] * 20, SamplingParams(beam_width=3, max_tokens=10)) is None
    assert "KV cache blocks" in simulation.scheduler.rejection_reason(request(9, [1] * 41))
    simulation.submit([1] * 20, SamplingParams(temperature=0, max_tokens=21))  # fills every block there is
    simulation.submit([2] * 20, SamplingParams(temperature=0, max_tokens=21))
    simulation.drain()


def test_the_only_request_is_not_paused_and_ends() -> None:
    simulation = Simulation("max_utilization", num_blocks=10, block_size=4)
    simulation.submit([1] * 20, SamplingParams(temperature=0, max_tokens=21))
    simulation.drain()
    simulation.submit([1] * 8, SamplingParams(beam_width=3, n=3, max_tokens=9))
    simulation.drain()
    assert simulation.scheduler.paused_total == 0


def test_a_paused_search_comes_back_whole() -> None:
    simulation = Simulation("max_utilization", num_blocks=16, block_size=4, max_batch_size=6)
    simulation.submit([1] * 10, SamplingParams(temperature=0, max_tokens=40))
    simulation.submit([3] * 6, SamplingParams(beam_width=3, n=3, max_tokens=14))
    simulation.drain()
    assert simulation.scheduler.paused_total > 0


def test_invariant_checks_detect_corruption() -> None:
    scheduler, runner = make()
    scheduler.add(request(0, list(range(20)), max_tokens=20), 0)
    scheduler.add(request(1, list(range(20, 40)), max_tokens=20), 0)
    step = scheduler.schedule()
    assert step is not None
    scheduler.update(step, runner.collect(runner.launch(step)))
    scheduler.check()
    kv = scheduler.kv
    saved = kv.table.copy()
    kv.table[0, 1, 0] = kv.table[0, 0, 0]
    with pytest.raises(AssertionError):
        scheduler.check()
    kv.table[:] = saved
    scheduler._running.slots.free.append(0)
    with pytest.raises(AssertionError, match="slot"):
        scheduler.check()


def test_reading_a_wrong_block_changes_the_tokens() -> None:
    """The simulation detects a corrupted block."""
    simulation = Simulation("guaranteed_no_evict")
    simulation.submit(np.random.default_rng(0).integers(0, VOCAB, 20), SamplingParams(temperature=0, max_tokens=20))
    for _ in range(4):
        simulation.step()
    simulation.runner.cache[
        int(simulation.scheduler.kv.table[0, simulation.scheduler._running.slots.slot_of[0], 0]) * 4
    ] += 1
    with pytest.raises(AssertionError, match="other tokens"):
        simulation.drain()
