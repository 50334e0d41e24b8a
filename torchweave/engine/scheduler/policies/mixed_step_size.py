"""How many tokens a step holds that reads prompts while others generate: few enough that these hardly notice.

Source: the stall-free batching of Sarathi-Serve (arXiv 2403.02310). A GPU carries out a step of a few hundred tokens in little
more time than a decode step, because both read all weights once; a whole prompt in one step would keep everyone waiting.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_SHARE = 16
"""Of the prompt tokens that wait, one in so many is read at least: a queue of prompts shrinks as fast as it grows. More in a step
would empty a short queue a little sooner, and everyone who generates would wait for it."""


def step_token_budget(most: int, sizes: Sequence[int], num_decoding: int, backlog: int) -> int:
    """Tokens of the next step, those that are generated included.

    Args:
        most: what a step can hold.
        sizes: those to choose from, ascending, at least half of the first one for prompts; empty: always `most`.
        num_decoding: rows that take a token each.
        backlog: tokens of prompts that could be read now; from `most` on, reading them fast is all that counts.
    """
    if not sizes or not num_decoding or backlog >= most:
        return most
    wanted = num_decoding + max(sizes[0] // 2, backlog // _SHARE)
    at = bisect_left(sizes, wanted)
    return min(sizes[at], most) if at < len(sizes) else most
