"""Run by test_sampling_adjust with TRITON_INTERPRET=1: the kernels and the reference do the same."""

from __future__ import annotations

import sys

import numpy as np
import torch

from tests.ops.sampling.logits_processor_cases import Case, build
from torchweave.ops.kernels.sampling import logits_processors
from torchweave.ops.sampling.logits_processors import (
    LogitsProcessorState,
    process_logits_reference,
    resample,
    rewind_reference,
)


def launch(case: Case, processor_state: LogitsProcessorState) -> torch.Tensor:
    changed = torch.empty(case.rows.shape[1], case.logits.shape[1])
    logits_processors.launch_process_logits(case.logits, case.rows, case.masks, processor_state, changed)
    logits_processors.launch_rewind(case.rows, case.state, processor_state, changed)
    return changed


def main() -> None:
    for vocab_size, seed, dtype in ((40, 0, torch.float32), (4500, 1, torch.float32), (300, 2, torch.bfloat16)):
        case, twin = build(vocab_size, seed, dtype), build(vocab_size, seed, dtype)
        processor_state, others = case.processor_state(), twin.processor_state()
        changed = launch(case, processor_state)
        expected = torch.empty_like(changed)
        process_logits_reference(twin.logits, twin.rows, twin.masks, others, expected)
        rewind_reference(twin.rows, twin.state, others, expected)
        assert (expected <= -1e30).any() and (expected > -1e30).any()
        torch.testing.assert_close(changed, expected, rtol=0, atol=0)
        assert case.state.arena.equal(twin.state.arena)

        # The rest of a redraw, from here on: what the reference draws goes through the kernel, too.
        whole = build(vocab_size, seed, dtype)
        third = whole.processor_state()
        resample(whole.logits, whole.rows, whole.masks, whole.state, third, whole.tokens, whole.out)
        assert not whole.tokens.equal(case.tokens)
        case.state.arena.copy_(whole.state.arena)
        index = whole.rows[0].long()
        logits_processors.launch_commit(
            case.rows, whole.tokens[index], whole.out[index], case.state, processor_state, case.tokens, case.out
        )
        assert case.tokens.equal(whole.tokens) and case.out.equal(whole.out)
        for name in ("counts", "recent_tokens", "words", "bias"):
            assert getattr(processor_state, name).equal(getattr(third, name)), name


if __name__ == "__main__":
    np.seterr(over="ignore")
    main()
    sys.exit(0)
