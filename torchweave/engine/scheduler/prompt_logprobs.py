"""Log-probabilities of prompt tokens, from the logits at the position before each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchweave.engine.scheduler.request_state import RequestState, SlotTable
from torchweave.engine.scheduler.step import Chunk, PromptTargets, StepLogprobs


def make_prompt_targets(table: SlotTable, chunks: Sequence[tuple[int, Chunk]], first: int) -> PromptTargets | None:
    """Prompt tokens that a step scores; None if there are none.

    Args:
        chunks: slot and tokens of each chunk.
        first: tokens of the step before those of the chunks.
    """
    slots: list[tuple[int, int]] = []
    index, targets, most = [], [], 0
    for slot, chunk in chunks:
        state, size = table.state_of(slot), len(chunk.tokens)
        begin, end = max(chunk.start, state.num_scored), min(chunk.start + size, len(state.prompt) - 1)
        if state.num_prompt_logprobs >= 0 and end > begin:
            slots.append((slot, end - begin))
            index.append(np.arange(begin, end) - chunk.start + first)
            targets.append(state.prompt[begin + 1 : end + 1])
            most = max(most, state.num_prompt_logprobs)
        first += size
    return PromptTargets(tuple(slots), np.concatenate(index), np.concatenate(targets), most) if slots else None


def store_prompt_logprobs(
    targets: PromptTargets, logprobs: StepLogprobs, requests: Sequence[RequestState | None]
) -> None:
    """Append the log-probabilities of a step to those of each request; `requests` is by slot."""
    at = 0
    for slot, count in targets.slots:
        state = requests[slot]
        assert state is not None, "a slot of a step in flight is not released"
        entries = (logprobs.entry(i, int(targets.targets[i]), state.num_prompt_logprobs) for i in range(at, at + count))
        state.prompt_logprobs.extend(entries)
        state.num_scored += count
        at += count
