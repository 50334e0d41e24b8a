"""Admission: how many prompt tokens a step holds, and how prompts share them.

Sources: FIRST_COME_FIRST_SERVED and EQUAL_PROGRESS of TensorRT-LLM's context chunking; its `batch_wait_timeout_iters` and
`batch_wait_max_tokens_ratio`; the stall-free batching of Sarathi-Serve (arXiv 2403.02310).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from torchweave.engine.scheduler.policies.base import Decision, Snapshot

_SHARE = 16
"""A mixed step prefills at least a sixteenth of the waiting prompt tokens, so a queue of prompts shrinks as fast as it grows. A
larger share would empty a short queue a little sooner and delay every decode request."""


def admit(snapshot: Snapshot, num_fitting: int) -> Decision:
    """Continue prefills, and start those of the first `num_fitting` waiting requests for which the step has tokens left."""
    remaining_tokens = [request.remaining_tokens for request in snapshot.prefill]
    remaining_tokens += [request.remaining_tokens for request in snapshot.waiting[:num_fitting]]
    num_decoding = snapshot.decode.num_tokens
    steps = snapshot.mixed_step_sizes if snapshot.chunked_context else ()
    sizes = chunk_sizes(
        remaining_tokens,
        step_token_budget(snapshot.max_num_tokens, steps, num_decoding, sum(remaining_tokens)) - num_decoding,
        chunked=snapshot.chunked_context,
        equal=snapshot.equal_progress,
        unit=snapshot.block_size,
    )
    running, starting = sizes[: len(snapshot.prefill)], sizes[len(snapshot.prefill) :]
    if 0 in starting:
        starting = starting[: starting.index(0)]
    return Decision(tuple(running), tuple(starting))


def chunk_sizes(remaining_tokens: Sequence[int], budget: int, *, chunked: bool, equal: bool, unit: int) -> list[int]:
    """Tokens of each prompt in a step, oldest prompt first.

    Args:
        remaining_tokens: tokens left to prefill, by prompt.
        budget: prompt tokens that fit into the step.
        chunked: prompts may be split; else each is prefilled in one step.
        equal: with `chunked`, all prompts advance by the same number of tokens: a multiple of `unit`, except a last chunk.
        unit: block size in tokens.
    """
    if chunked and equal and sum(remaining_tokens) > budget:
        return _equal_progress(remaining_tokens, budget, unit)
    sizes = []
    for tokens in remaining_tokens:
        size = min(tokens, budget) if chunked else (tokens if tokens <= budget else 0)
        sizes.append(max(size, 0))
        budget -= sizes[-1]
    return sizes


def _equal_progress(remaining_tokens: Sequence[int], budget: int, unit: int) -> list[int]:
    """A unit each in turn, oldest first, until the budget is used up."""
    sizes = [0] * len(remaining_tokens)
    unfinished = list(range(len(remaining_tokens)))
    while unfinished and budget > 0:
        rounds = max(budget // (unit * len(unfinished)), 1)  # whole rounds at once
        for index in list(unfinished):
            size = min(unit * rounds, remaining_tokens[index] - sizes[index], budget)
            sizes[index] += size
            budget -= size
            if sizes[index] == remaining_tokens[index]:
                unfinished.remove(index)
    return sizes


def step_token_budget(max_tokens: int, sizes: Sequence[int], num_decoding: int, backlog: int) -> int:
    """Tokens of the next step, decode tokens included: few enough that decode requests are hardly slowed down.

    A GPU runs a step of a few hundred tokens in little more time than a decode step, because both read all weights once; a whole
    prompt in one step would stall every decode request.

    Args:
        max_tokens: most tokens in a step.
        sizes: sizes to choose from, ascending, at least half of the first one for prompts; empty: always `max_tokens`.
        num_decoding: rows that take one token each.
        backlog: prompt tokens that could be prefilled now; from `max_tokens` on, only throughput counts.
    """
    if not sizes or not num_decoding or backlog >= max_tokens:
        return max_tokens
    tokens = num_decoding + max(sizes[0] // 2, backlog // _SHARE)
    at = bisect_left(sizes, tokens)
    return min(sizes[at], max_tokens) if at < len(sizes) else max_tokens


def should_delay_prefill(
    snapshot: Snapshot, num_delayed_steps: int, timeout_iters: int, max_tokens_ratio: float
) -> bool:
    """Whether the step should leave prompts out, so that later ones join them and fill a step better.

    Prompts are delayed only while a request decodes.

    Args:
        num_delayed_steps: consecutive steps that the prompts were delayed so far.
        timeout_iters: most steps of delay; 0: no delay.
        max_tokens_ratio: prompts that fill this part of a step are not delayed.
    """
    if not len(snapshot.decode) or num_delayed_steps >= timeout_iters:
        return False
    tokens = sum(request.remaining_tokens for request in (*snapshot.prefill, *snapshot.waiting))
    return snapshot.decode.num_tokens + tokens < max_tokens_ratio * snapshot.max_num_tokens
