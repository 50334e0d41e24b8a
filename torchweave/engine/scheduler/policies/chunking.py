"""How the tokens of a step are divided among the prompts that are being read.

Sources: FIRST_COME_FIRST_SERVED and EQUAL_PROGRESS of TensorRT-LLM's context chunking.
"""

from __future__ import annotations

from collections.abc import Sequence


def chunk_sizes(remaining_tokens: Sequence[int], budget: int, *, chunked: bool, equal: bool, unit: int) -> list[int]:
    """Tokens of each prompt that a step reads, oldest first.

    Args:
        remaining_tokens: tokens that each prompt has still to read.
        budget: tokens that the step has room for.
        chunked: off, a prompt is read at once or not at all.
        equal: with `chunked`, all prompts get on by as many tokens (a multiple of `unit`, but for the last chunk of a prompt).
        unit: tokens in a block.
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
    """A unit each in turn, oldest first, until the budget has no room for the next."""
    sizes = [0] * len(remaining_tokens)
    going = list(range(len(remaining_tokens)))
    while going and budget > 0:
        rounds = max(budget // (unit * len(going)), 1)  # so many whole rounds at once
        for index in list(going):
            size = min(unit * rounds, remaining_tokens[index] - sizes[index], budget)
            sizes[index] += size
            budget -= size
            if sizes[index] == remaining_tokens[index]:
                going.remove(index)
    return sizes
