"""Run by test_sampling with TRITON_INTERPRET=1: the kernel and the reference choose the same tokens."""

from __future__ import annotations

import sys

import numpy as np
import torch

from tests.ops.sampling.sampling_cases import PARAMETERS, build
from torchweave.ops.kernels.sampling.layout import BAD_WORD_LOGIT, INVALID_TOKEN
from torchweave.ops.kernels.sampling.sample import launch_sample
from torchweave.ops.sampling.sample import GREEDY_BELOW, sample
from torchweave.ops.slot_state import SlotState


def check_excluded_tokens() -> None:
    """Rows of two chunks, one of which holds only excluded tokens, and bad words among them."""
    logits, slots, state = build(6000)
    logits[:, 4096:] = -torch.inf
    logits[:, 7:90] = BAD_WORD_LOGIT
    expected, got = sample(logits, slots, state), torch.empty(len(slots), dtype=torch.int32)
    launch_sample(logits, slots, state, got, GREEDY_BELOW)
    assert got.tolist() == expected.tolist()


def main() -> None:
    for vocab_size in (5, 300, 9001):
        for seed in range(1):
            logits, slots, state = build(vocab_size, seed=seed)
            expected, got = sample(logits, slots, state), torch.empty(len(slots), dtype=torch.int32)
            launch_sample(logits, slots, state, got, GREEDY_BELOW)
            wrong = (expected != got).nonzero().flatten().tolist()
            assert not wrong, [(vocab_size, seed, i, (*PARAMETERS, "padding")[i], expected[i], got[i]) for i in wrong]
    check_excluded_tokens()
    tied = torch.zeros(3, 6000)
    tied[1, [4500, 17]] = 1.0
    tied[2, 4100:] = -0.0
    greedy, got = SlotState(3, 2), torch.empty(3, dtype=torch.int32)
    launch_sample(tied, torch.arange(3, dtype=torch.int32), greedy, got, GREEDY_BELOW)
    assert got.tolist() == [0, 17, 0], got

    for vocab_size in (300, 4100):  # one chunk and two
        logits, slots, state = build(vocab_size)
        rows = [0, 3, 8, 6, len(slots) - 1]  # greedy, unfiltered, top_p, top_k, padding
        logits, slots, got = logits[rows], slots[rows], torch.empty(len(rows), dtype=torch.int32)
        for value in (torch.nan, torch.inf, -torch.inf):
            broken = torch.full_like(logits, value)
            launch_sample(broken, slots, state, got, GREEDY_BELOW)
            assert got.tolist() == sample(broken, slots, state).tolist() == [INVALID_TOKEN] * 4 + [0]
        logits[::2, vocab_size - 2] = torch.inf  # the other rows are not affected
        launch_sample(logits, slots, state, got, GREEDY_BELOW)
        assert got.tolist() == sample(logits, slots, state).tolist()
        assert (got == INVALID_TOKEN).tolist() == [True, False, True, False, False]


if __name__ == "__main__":
    np.seterr(over="ignore")
    main()
    sys.exit(0)
