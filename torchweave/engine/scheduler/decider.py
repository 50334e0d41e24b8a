"""Ask the policy what the next step does: the snapshot that it decides on, and prompts that are delayed."""

from __future__ import annotations

from dataclasses import replace

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.kv_cache.prefix_index import NO_HIT, PrefixHit
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.policies import Decision, Policy, should_delay_prefill
from torchweave.engine.scheduler.request_state import RequestState, WaitingQueue
from torchweave.engine.scheduler.running_set import RunningSet
from torchweave.engine.scheduler.snapshot import blocks_needed, take_snapshot


class Decider:
    """Takes a decision for each step that needs one.

    Args:
        policy: decides which waiting requests start, which running ones pause, and how much of each prompt is prefilled.
    """

    def __init__(
        self, limits: Limits, kv: BlockManager, running: RunningSet, waiting: WaitingQueue, policy: Policy
    ) -> None:
        self._limits, self._kv, self._running, self._waiting = limits, kv, running, waiting
        self._policy = policy
        self._num_delayed_steps = 0  # consecutive steps without prefill although prompts wait

    def decide(self, step_index: int) -> Decision | None:
        """The decision for step `step_index`; None if all requests decode and have the blocks they need."""
        running, kv, limits = self._running, self._kv, self._limits
        needed = blocks_needed(running, kv, limits.query_len)
        if not self._waiting and not running.prefill and needed.sum() <= kv.free_logical_blocks:
            return None
        in_step = None
        if limits.num_micro_batches > 1:
            in_step = running.micro_batch(running.decoding, step_index, limits.num_micro_batches)
        snapshot = take_snapshot(limits, running, kv, needed, self._waiting.candidates, self.find_prefix, in_step)
        decision = self._policy(snapshot)
        if not should_delay_prefill(
            snapshot, self._num_delayed_steps, limits.batch_wait_timeout_iters, limits.batch_wait_max_tokens_ratio
        ):
            self._num_delayed_steps = 0
            return decision
        self._num_delayed_steps += 1
        return replace(decision, chunks=(0,) * len(snapshot.prefill), admitted=())

    def find_prefix(self, state: RequestState) -> PrefixHit:
        """The cached prefix of a waiting request."""
        return state.find_prefix(self._kv) if self._running.reuse else NO_HIT
