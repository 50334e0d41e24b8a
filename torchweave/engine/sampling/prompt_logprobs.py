"""Log-probabilities of a prompt's own tokens: the logits at each position, read where the next token of the prompt stands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchweave.engine.scheduler.request_state import Active
from torchweave.engine.scheduler.step import Chunk, Scored, StepLogprobs

AT_ONCE = 256
"""Tokens of a prompt that are scored in a step at the most, since each has logits as wide as the vocabulary."""


def known_tokens(active: Active) -> int:
    """Tokens of its context that a request may find in the KV cache: those that are still to be scored have to be read."""
    known = active.context_len - 1
    return known if active.num_prompt_logprobs < 0 or _is_scored(active) else min(known, active.scored)


def chunk_size(active: Active, size: int) -> int:
    """Tokens that are read at once, of `size` that could be."""
    return size if active.num_prompt_logprobs < 0 or _is_scored(active) else min(size, AT_ONCE)


def _is_scored(active: Active) -> bool:
    return active.scored >= len(active.prompt) - 1


def scored(rows: Sequence[tuple[int, Active, Chunk]], first: int) -> Scored | None:
    """What of a step's chunks, each with its slot and its request, is to be scored; None where nobody asked.

    Args:
        first: tokens of the step before those of the chunks.
    """
    slots: list[tuple[int, int]] = []
    index, targets, most = [], [], 0
    for slot, active, chunk in rows:
        size = len(chunk.tokens)
        begin, end = max(chunk.start, active.scored), min(chunk.start + size, len(active.prompt) - 1)
        if active.num_prompt_logprobs >= 0 and end > begin:
            slots.append((slot, end - begin))
            index.append(np.arange(begin, end) - chunk.start + first)
            targets.append(active.prompt[begin + 1 : end + 1])
            most = max(most, active.num_prompt_logprobs)
        first += size
    return Scored(tuple(slots), np.concatenate(index), np.concatenate(targets), most) if slots else None


def take_in(of: Scored, found: StepLogprobs, requests: Sequence[Active | None]) -> None:
    """Hand each request, by slot, the log-probabilities that a step found."""
    at = 0
    for slot, count in of.slots:
        active = requests[slot]
        assert active is not None, "a slot that a step in flight names is not left"
        entries = (found.entry(i, int(of.targets[i]), active.num_prompt_logprobs) for i in range(at, at + count))
        active.prompt_logprobs.extend(entries)
        active.scored += count
        at += count
