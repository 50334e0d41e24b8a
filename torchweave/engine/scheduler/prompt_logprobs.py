"""Log-probabilities of a prompt's own tokens: the logits at each position, read where the next token of the prompt stands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.step import Chunk, PromptTargets, StepLogprobs

MAX_SCORED_TOKENS = 256
"""Tokens of a prompt that are scored in a step at the most, since each has logits as wide as the vocabulary."""


def max_reusable_tokens(state: RequestState) -> int:
    """Tokens of its context that a request may find in the KV cache: those that are still to be scored have to be read."""
    known = state.prefill_len - 1
    return known if state.num_prompt_logprobs < 0 or _is_scored(state) else min(known, state.prompt_targets)


def chunk_size(state: RequestState, size: int) -> int:
    """Tokens that are read at once, of `size` that could be."""
    return size if state.num_prompt_logprobs < 0 or _is_scored(state) else min(size, MAX_SCORED_TOKENS)


def _is_scored(state: RequestState) -> bool:
    return state.prompt_targets >= len(state.prompt) - 1


def prompt_targets(rows: Sequence[tuple[int, RequestState, Chunk]], first: int) -> PromptTargets | None:
    """What of a step's chunks, each with its slot and its request, is to be scored; None where nobody asked.

    Args:
        first: tokens of the step before those of the chunks.
    """
    slots: list[tuple[int, int]] = []
    index, targets, most = [], [], 0
    for slot, state, chunk in rows:
        size = len(chunk.tokens)
        begin, end = max(chunk.start, state.prompt_targets), min(chunk.start + size, len(state.prompt) - 1)
        if state.num_prompt_logprobs >= 0 and end > begin:
            slots.append((slot, end - begin))
            index.append(np.arange(begin, end) - chunk.start + first)
            targets.append(state.prompt[begin + 1 : end + 1])
            most = max(most, state.num_prompt_logprobs)
        first += size
    return PromptTargets(tuple(slots), np.concatenate(index), np.concatenate(targets), most) if slots else None


def store_prompt_logprobs(
    wanted: PromptTargets, logprobs: StepLogprobs, requests: Sequence[RequestState | None]
) -> None:
    """Hand each request, by slot, the log-probabilities that a step found."""
    at = 0
    for slot, count in wanted.slots:
        state = requests[slot]
        assert state is not None, "a slot that a step in flight names is not left"
        entries = (logprobs.entry(i, int(wanted.targets[i]), state.num_prompt_logprobs) for i in range(at, at + count))
        state.prompt_logprobs.extend(entries)
        state.prompt_targets += count
        at += count
