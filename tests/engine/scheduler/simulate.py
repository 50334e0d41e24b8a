"""Simulate the scheduler under random arrivals, cancels, pauses and tiny caches, without a model.

Run `python -m tests.engine.scheduler.simulate --help`. The next token of a sequence is a hash of the contents of its *blocks*, so a
block that is shared wrongly, lost, copied too late or read at a wrong position changes tokens. Every answer is compared with that
of the same request alone.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.engine.fake import VOCAB, FakeBlockCopier, expected, expected_beams, hashes, make
from torchweave.engine.kv_cache.block_manager import AttentionWindow
from torchweave.engine.request import InferenceRequest, Response, SamplingParams
from torchweave.engine.scheduler.parts.beams import BeamRows
from torchweave.engine.scheduler.policies import POLICIES
from torchweave.engine.scheduler.speculation import AdaptiveDrafts, StepCosts
from torchweave.engine.scheduler.step import Step

MAX_AGE = 6000  # steps from arrival to answer, with at most `MOST_ACTIVE` requests of some hundred tokens each
MOST_ACTIVE = 24


@dataclass
class PendingRequest:
    """A request in flight and its tokens so far."""

    request: InferenceRequest
    arrived_at: int
    tokens: list[int] = field(default_factory=list)


class RandomDrafts(AdaptiveDrafts):
    """A random number of drafts in each step, or none."""

    def __init__(self, max_slots: int, query_len: int, rng: np.random.Generator) -> None:
        super().__init__(max_slots, StepCosts(max_slots, range(2, query_len + 1)))
        self._rng = rng

    def choose(self, slots: np.ndarray, drafting: np.ndarray) -> int:
        query_lens = self.costs.query_lens
        return int(self._rng.choice(query_lens)) if self._rng.random() < 0.8 else 1


class Simulation:
    """A scheduler, its fake device, and the requests in flight.

    Args:
        policy: name of the capacity policy.
        seed: seed of all random numbers.
        run_ahead: most steps in flight.
        options: arguments of `tests.engine.fake.make`.
    """

    def __init__(self, policy: str, seed: int = 0, run_ahead: int = 2, **options: Any) -> None:
        self.policy = policy
        self.scheduler, self.runner = make(policy=policy, run_ahead=run_ahead, **options)
        self.counts: Counter[str] = Counter()
        self.pauses: Counter[int] = Counter()  # by request
        self.pending: dict[int, PendingRequest] = {}
        self.in_flight: deque[tuple[Step, Any]] = deque()
        self.clock = self.oldest = 0
        self.rng = np.random.default_rng(seed)
        self._run_ahead = run_ahead
        self._next_id = 0
        self._last_step: dict[int, int] = {}  # by slot
        self._stems = [self.rng.integers(0, VOCAB, 64) for _ in range(4)]

    # -- events --------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Add a random request, unless too many are in flight."""
        if len(self.pending) >= MOST_ACTIVE:
            return
        rng = self.rng
        searches = rng.random() < 0.2 and len(self.runner.windows) == 1  # `expected_beams` knows no windows
        params = random_beams(rng) if searches else random_tokens(rng)
        length = rng.integers(0, 60)
        if self.runner.has_states:  # more prompts with equal beginnings
            length -= length % 20
        stem = self._stems[rng.integers(len(self._stems))][:length]
        prompt = np.concatenate([stem, rng.integers(0, VOCAB, rng.integers(1, 6))])
        streaming = params.beam_width == 1 and rng.random() < 0.5
        priority = int(rng.random() < 0.1)
        self.submit(prompt, params, streaming=streaming, priority=priority, cache_salt=str(rng.integers(2)))

    def submit(self, prompt: Iterable[int], params: SamplingParams, **rest: Any) -> int | None:
        request = InferenceRequest(self._next_id, np.array(list(prompt)), params, **rest)
        if self.scheduler.rejection_reason(request):
            self.counts["refused"] += 1
            return None
        self._next_id += 1
        self.pending[request.id] = PendingRequest(request, self.clock)
        self.scheduler.add(request, seed=0)
        self.counts["searches" if params.beam_width > 1 else "requests"] += 1
        return request.id

    def cancel(self) -> None:
        """Cancel a random request, or an unknown id."""
        ids = [*self.pending, self._next_id + 7]
        self.on_responses(self.scheduler.cancel(int(self.rng.choice(ids))))

    def step(self, eager: bool = False) -> bool:
        """Schedule a step, and complete the oldest when enough are in flight; returns whether either happened."""
        self.clock += 1
        step = self.scheduler.schedule()
        if step is not None:
            self._check_step(step)
            self.in_flight.append((step, self.runner.launch(step)))
        done = bool(self.in_flight) and (step is None or eager or len(self.in_flight) >= self._run_ahead)
        if done:
            oldest, handle = self.in_flight.popleft()
            self.on_responses(self.scheduler.update(oldest, self.runner.collect(handle)))
        self.pauses.update(request_id for request_id, change in self.scheduler.state_changes if change == "paused")
        self.scheduler.state_changes.clear()
        return step is not None or done

    def _check_step(self, step: Step) -> None:
        limits = self.scheduler.limits
        assert step.num_tokens <= limits.max_num_tokens, "the budget is exceeded"
        assert step.num_rows <= limits.max_batch_size and len(set(step.slots.tolist())) == step.num_rows
        if limits.num_micro_batches > 1:
            self._check_micro_batch(step)
        self.counts["steps"] += 1
        self.counts["chunks"] += len(step.chunks)
        self.counts["with drafts"] += step.query_len > 1
        beams = step.parts.get("beams")
        self.counts["copied"] += len(beams.copies[0]) if isinstance(beams, BeamRows) and beams.copies else 0

    def _check_micro_batch(self, step: Step) -> None:
        """A request that decodes beside prompts was in none of the last steps, so pipeline stages compute them together."""
        table, count = self.scheduler._running.slots, self.scheduler.limits.num_micro_batches
        decoding = [slot for slot in step.slots[: step.num_decode_rows] if table.group[slot] < 0]
        if step.chunks:
            assert all(step.index - self._last_step.get(int(slot), -count) >= count for slot in decoding)
        assert step.depends_on >= max((self._last_step.get(int(slot), -1) for slot in decoding), default=-1)
        self._last_step.update({int(slot): step.index for slot in step.slots})
        self.counts["together"] += step.depends_on < step.index - 1

    def on_responses(self, responses: Iterable[Response]) -> None:
        for response in responses:
            pending = self.pending.get(response.id)
            assert pending is not None, "a request is answered after its final response"
            assert not response.error
            pending.tokens += response.output.token_ids.tolist()
            if response.final:
                del self.pending[response.id]
                self.oldest = max(self.oldest, self.clock - pending.arrived_at)
                self._verify_answer(pending, response)

    def _verify_answer(self, pending: PendingRequest, response: Response) -> None:
        params, prompt = pending.request.sampling, pending.request.input_ids.tolist()
        stops = tuple(params.stop_token_ids or ())
        assert params.max_tokens is not None
        params = replace(params, max_tokens=min(params.max_tokens, self.scheduler.limits.max_model_len - len(prompt)))
        reason = response.output.finish_reason
        self.counts[str(reason)] += 1
        if params.beam_width > 1:
            if reason != "cancelled":
                beams = [beam.token_ids.tolist() for beam in response.output.beams]
                assert beams == expected_beams(prompt, params, stops), "a search has other beams than alone"
            return
        tokens = expected(prompt, params.max_tokens or 0, stops, self.runner.windows)
        if reason == "cancelled":
            tokens = tokens[: len(pending.tokens)]
        assert pending.tokens == tokens, "a request has other tokens than alone"

    # -- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check()
        assert self.scheduler.num_active == len(self.pending), "a request was lost"
        if self.policy != "max_utilization":
            assert self.scheduler.paused_total == 0
        if self.pending:
            arrived_at = min(pending.arrived_at for pending in self.pending.values())
            assert self.clock - arrived_at <= MAX_AGE, "a request starves"

        self._check_states()

    def _check_states(self) -> None:
        """The recurrent state of a slot that no step in flight contains is that of its tokens, if it has computed any.

        Beams change slots; each step compares the states of its rows.
        """
        running, states = self.scheduler._running, self.runner.states
        for slot in [] if not self.runner.has_states else list(running.slots.slot_of.values()):
            is_beam = running.group_of(slot) is not None
            if not is_beam and not running.in_flight(slot) and running.slots.last_step_index[slot] >= 0:
                ids = running.slots.sequence(slot, int(running.slots.num_computed[slot]))
                assert states[slot] == hashes(ids[None], np.array([len(ids)]))[0], "a slot has another request's state"

    def drain(self) -> None:
        """Run until all requests are answered; then all blocks are free."""
        for _ in range(MAX_AGE):
            if not self.step() and not self.pending:
                break
        assert not self.pending and not self.in_flight, "the simulation does not end"
        self.check()
        assert self.scheduler.kv.num_free == self.scheduler.kv.num_blocks, "a block leaked"


def random_tokens(rng: np.random.Generator) -> SamplingParams:
    stops = rng.integers(0, VOCAB, rng.integers(0, 12)).tolist()
    return SamplingParams(temperature=0, max_tokens=int(rng.integers(1, 40)), stop_token_ids=stops)


def random_beams(rng: np.random.Generator) -> SamplingParams:
    width, max_tokens = int(rng.integers(2, 5)), int(rng.integers(1, 16))
    return SamplingParams(
        beam_width=width,
        n=int(rng.integers(1, width + 1)),
        max_tokens=max_tokens,
        length_penalty=float(rng.choice([0.0, 1.0, -1.0])),
        early_stopping=[True, False, "never"][rng.integers(3)],
        stop_token_ids=rng.integers(0, VOCAB, rng.integers(0, 4)).tolist(),
    )


def random_options(policy: str, rng: np.random.Generator, drafts: bool = False, states: bool = False) -> dict[str, Any]:
    """Small random sizes, so that every resource runs out; with `drafts` also of steps that speculate, and of windows.

    With `states` each slot has a recurrent state, of which there are few snapshots.

    `max_utilization` is combined with chunked context only, as in the engine: the prefill of a resumed request may not fit into a
    step otherwise.
    """
    chunked = bool(rng.random() < 0.8) or policy == "max_utilization"
    options = {
        "run_ahead": int(rng.integers(1, 4)),
        "max_batch_size": int(rng.integers(4, 9)),
        "max_num_tokens": int(rng.integers(8, 33)) if chunked else 70,
        "num_blocks": int(rng.integers(20, 60)),
        "block_size": int(rng.choice([2, 4, 8])),
        "chunked": chunked,
        "equal_progress": bool(rng.integers(2)),
        "mixed_step_sizes": ((), (3, 6, 9), (8, 12))[rng.integers(3)],
        "reuse": bool(rng.random() < 0.8),
        "copier": FakeBlockCopier(int(rng.integers(4, 40))) if rng.random() < 0.3 else None,
        "batch_wait_timeout_iters": int(rng.choice([0, 0, 5])),
        "batch_wait_max_tokens_ratio": 0.5,
    }
    if rng.random() < 0.4 and not drafts:
        options["num_micro_batches"] = int(rng.integers(2, 5))
        options["run_ahead"] += options["num_micro_batches"] - 1
    if states:
        options |= {"num_snapshots": int(rng.integers(1, 25)), "has_recurrent_states": True}
        if rng.random() < 0.3:
            options |= {"windows": (AttentionWindow(int(rng.integers(1, 20))), AttentionWindow()), "copier": None}
    if drafts:
        query_len = int(rng.integers(2, 7))
        options |= {"query_len": query_len, "max_drafting_rows": options["max_num_tokens"] // query_len}
        options["drafts_by_model"] = bool(rng.random() < 0.5)
        if rng.random() < 0.7:
            options["adaptive_drafts"] = RandomDrafts(options["max_batch_size"], query_len, rng)
        if rng.random() < 0.4:
            options |= {"windows": (AttentionWindow(int(rng.integers(1, 20))), AttentionWindow()), "copier": None}
    return options


def run(
    policy: str,
    steps: int,
    seed: int,
    check_every: int = 1,
    episode: int = 400,
    drafts: bool = False,
    states: bool = False,
) -> Counter[str]:
    """Simulate random sizes, `episode` steps each, until `steps` steps ran; returns counts of events."""
    rng, counts, number = np.random.default_rng(seed), Counter(), 0
    while counts["steps"] < steps:
        options = random_options(policy, rng, drafts, states)
        simulation = Simulation(policy, seed=int(rng.integers(2**32)), **options)
        rate, cancels = rng.uniform(0.05, 0.6), rng.uniform(0, 0.1)
        try:
            for _ in range(episode):
                if simulation.rng.random() < rate:
                    simulation.arrive()
                if simulation.rng.random() < cancels:
                    simulation.cancel()
                simulation.step(eager=bool(simulation.rng.random() < 0.1))
                if simulation.clock % check_every == 0:
                    simulation.check()
            simulation.drain()
        except AssertionError as error:
            raise AssertionError(
                f"{policy}, seed {seed}, episode {number}, step {simulation.clock}: {error} ({options})"
            ) from error
        oldest = max(counts["oldest"], simulation.oldest)
        counts += simulation.counts
        if (snapshots := simulation.scheduler.kv.snapshots) is not None:
            counts += Counter({"states saved": snapshots.saved_total, "states restored": snapshots.restored_total})
        counts["paused"] += simulation.pauses.total()
        counts["caught up"] += simulation.runner.num_caught_up
        counts["most pauses"] = max(counts["most pauses"], *simulation.pauses.values(), 0)
        counts["oldest"], number = oldest, number + 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=sorted(POLICIES), action="append", help="default: all")
    parser.add_argument("--steps", type=int, default=1_000_000, help="for each policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=5, help="steps between two checks of all blocks")
    parser.add_argument("--drafts", action="store_true", help="speculate, with random drafts")
    parser.add_argument("--states", action="store_true", help="slots with a recurrent state, and snapshots")
    args = parser.parse_args()
    for policy in args.policy or sorted(POLICIES):
        begin = time.monotonic()
        counts = run(policy, args.steps, args.seed, args.check_every, drafts=args.drafts, states=args.states)
        facts = ", ".join(f"{count:,} {event}" for event, count in sorted(counts.items()))
        print(f"{policy}: {facts}; {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
