"""Run by test_speculation with TRITON_INTERPRET=1: the kernels of speculation against the CPU versions."""

from __future__ import annotations

import numpy as np
import torch

from tests.ops.speculation_cases import BLOCK_SIZE, draft_state, drawn_tokens
from tests.ops.step_cases import Outputs
from torchweave.ops.kernels import speculation as kernels
from torchweave.ops.slot_state import advance
from torchweave.ops.speculation import SAMPLED_FIELDS, DraftBuffers, PromptLookup, accept, prepare_drafts, propose


def main() -> None:
    # Small tiles, so that a history takes several programs and several tiles of each.
    kernels._TOKENS, kernels._SPLITS, kernels._ALL_ROWS, kernels._ROWS = 8, 2, 4, 4
    cpu = torch.device("cpu")
    for seed in range(6):
        generator = np.random.default_rng(seed)
        synthetic = None if seed % 3 else 0.6
        lookup = PromptLookup(int(generator.integers(1, 6)), int(generator.integers(1, 3)), 4, synthetic)
        state, slots = draft_state(generator, tables=1 + seed % 2)
        twin, _ = draft_state(np.random.default_rng(0), tables=1 + seed % 2)
        twin.arena.copy_(state.arena)
        num_rows, query_len = slots.numel(), lookup.num_tokens + 1
        buffers, other = DraftBuffers(num_rows, lookup, cpu), DraftBuffers(num_rows, lookup, cpu)
        rows, others = buffers.rows(num_rows), other.rows(num_rows)
        for step in range(2):
            inputs, got = (Outputs.empty(num_rows, num_rows * query_len, tables=1 + seed % 2) for _ in range(2))
            propose(state, slots, lookup, rows)
            prepare_drafts(state, slots, buffers, rows, inputs, BLOCK_SIZE)
            kernels.launch_propose(twin, slots, lookup.min_ngram, lookup.max_ngram, others.matches)
            kernels.launch_prepare_drafts(
                twin, other.sampled, slots, others, got, BLOCK_SIZE, lookup.num_tokens, synthetic is not None
            )
            assert inputs.lists() == got.lists()
            for name in ("num_drafts", "query_start", "logits_index", "entries"):
                assert getattr(rows, name).tolist() == getattr(others, name).tolist(), name
            wanted = np.arange(lookup.num_tokens) < rows.num_drafts.numpy()[:, None]
            assert (rows.drafts.numpy().reshape(wanted.shape) == others.drafts.numpy().reshape(wanted.shape))[
                wanted
            ].all()
            drawn = rows.entries >= 0
            for name in (*SAMPLED_FIELDS, "position", "stop_ids"):
                values = getattr(buffers.sampled, name)[: drawn.numel()][drawn]
                assert values.equal(getattr(other.sampled, name)[: drawn.numel()][drawn]), name

            rows.tokens.copy_(drawn_tokens(generator, rows, query_len))
            others.tokens.copy_(rows.tokens)
            accept(state, slots, lookup, rows)
            kernels.launch_accept(
                twin, slots, others, lookup.num_tokens, -1 if synthetic is None else round(0.6 * 2**32)
            )
            assert rows.out.tolist() == others.out.tolist()
            assert state.arena.tolist() == twin.arena.tolist() and not others.matches.any()

            emit = torch.from_numpy(generator.integers(0, 2, num_rows) > 0)
            tokens, out = rows.tokens[:num_rows], torch.empty(num_rows, dtype=torch.int32)
            advance(tokens, slots, emit, state, out)
            running = slots[emit & (slots >= 0)].long()
            twin.last_token[running], twin.position[running] = state.last_token[running], state.position[running]
            kernels.launch_record(twin, slots, emit)
            assert state.arena.tolist() == twin.arena.tolist(), step


if __name__ == "__main__":
    main()
