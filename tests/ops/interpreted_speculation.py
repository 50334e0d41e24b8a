"""Run by test_speculation with TRITON_INTERPRET=1: the kernels of speculation against the CPU versions."""

from __future__ import annotations

import numpy as np
import torch

from tests.ops.speculation_cases import BLOCK_SIZE, HISTORY, draft_state, drawn_tokens
from tests.ops.step_cases import Outputs
from torchweave.ops.kernels import speculation as kernels
from torchweave.ops.slot_fields import SAMPLED
from torchweave.ops.slot_state import advance
from torchweave.ops.speculation import (
    DraftBuffers,
    DraftOptions,
    accept,
    catch_up,
    feed_draft,
    finish_catch_up,
    next_tokens,
    note_computed,
    prepare_drafts,
    propose,
)


def check_model_drafts(seed: int, shift: int) -> None:
    """A step with a draft model whose tokens are random, after two that only compute what it lacks, then a step with prompts.

    shift: 1 for a draft head.
    """
    cpu = torch.device("cpu")
    generator = np.random.default_rng(seed)
    options = DraftOptions(int(generator.integers(1, 5)), from_model=True, token_shift=shift)
    state, slots = draft_state(generator, tables=1 + seed % 2)
    twin, _ = draft_state(np.random.default_rng(0), tables=1 + seed % 2)
    twin.arena.copy_(state.arena)
    num_rows, query_len = slots.numel(), options.num_tokens + 1
    buffers, other = DraftBuffers(num_rows, options, cpu), DraftBuffers(num_rows, options, cpu)
    rows, others = buffers.rows(num_rows), other.rows(num_rows)

    def compare(wanted: Outputs, got: Outputs, *names: str) -> None:
        assert wanted.lists() == got.lists()
        for name in ("num_drafts", "query_start", "matches", "model_entries", *names):
            assert getattr(rows, name).tolist() == getattr(others, name).tolist(), name

    def outputs(tokens: int) -> tuple[Outputs, Outputs]:
        inputs, got = (Outputs.empty(num_rows, tokens, tables=1 + seed % 2) for _ in range(2))
        return inputs, got

    for most in (1, query_len, 7):
        inputs, got = outputs(num_rows * most)
        catch_up(state, slots, buffers, rows, inputs, BLOCK_SIZE)
        kernels.launch_catch_up(twin, other.sampled, slots, others, got, BLOCK_SIZE, most, shift)
        compare(inputs, got)
        assert rows.logits_index[:num_rows].tolist() == others.logits_index[:num_rows].tolist()
        drawn = rows.model_entries[rows.model_entries >= 0]
        for name in (*SAMPLED, "position", "stop_ids"):
            assert getattr(buffers.sampled, name)[drawn].equal(getattr(other.sampled, name)[drawn]), name
        if most != 7:
            finish_catch_up(state, slots, rows)
            kernels.launch_finish_catch_up(twin, slots, others)
        assert state.arena.tolist() == twin.arena.tolist() and rows.matches.tolist() == others.matches.tolist()
    rows.model_tokens.copy_(torch.from_numpy(generator.integers(-1, 4, tuple(rows.model_tokens.shape))))
    others.model_tokens.copy_(rows.model_tokens)
    for place in range(1, query_len - 1):
        inputs, got = outputs(num_rows)
        feed_draft(state, slots, rows, place, inputs, BLOCK_SIZE, shift)
        kernels.launch_feed_draft(twin, slots, others, place, got, BLOCK_SIZE, shift)
        compare(inputs, got, "model_slots")
    inputs, got = outputs(num_rows * query_len)
    prepare_drafts(state, slots, buffers, rows, inputs, BLOCK_SIZE)
    kernels.launch_prepare_drafts(twin, other.sampled, slots, others, got, BLOCK_SIZE, False, True)
    compare(inputs, got, "logits_index", "entries")
    rows.tokens.copy_(drawn_tokens(generator, rows, query_len))
    others.tokens.copy_(rows.tokens)
    accept(state, slots, options, rows)
    kernels.launch_accept(twin, slots, others, -1, True, shift)
    assert rows.out.tolist() == others.out.tolist()
    assert state.arena.tolist() == twin.arena.tolist() and not others.matches.any()

    starts = torch.tensor([0, *np.cumsum(generator.integers(0, 4, num_rows))], dtype=torch.int32)
    positions = torch.from_numpy(generator.integers(0, 40, int(starts[-1]) + 1))
    note_computed(state, slots, starts, positions)
    kernels.launch_note_computed(twin, slots, starts, positions)
    assert state.arena.tolist() == twin.arena.tolist()

    history = state.host_arrays["history"]
    history[slots[0]] = -1  # of a slot without drafts
    twin.host_arrays["history"][slots[0]] = -1
    positions = torch.from_numpy(generator.integers(40, HISTORY, int(starts[-1]) + 3))
    behind, others_behind = torch.full_like(positions, -7), torch.full_like(positions, -7)
    next_tokens(state, slots, starts, positions, behind)
    kernels.launch_next_tokens(twin, slots, starts, positions, others_behind)
    assert behind.tolist() == others_behind.tolist() and not behind[starts[-1] :].any()
    for row, slot in enumerate(slots.tolist()):
        for token in range(int(starts[row]), int(starts[row + 1])):
            at = int(positions[token]) + 1
            known = slot >= 0 and at < HISTORY
            assert behind[token] == (max(history[slot, at], 0) if known else 0)


def main() -> None:
    # Small tiles, so that a history takes several programs and several tiles of each.
    kernels._TOKENS, kernels._SPLITS, kernels._ALL_ROWS, kernels._ROWS = 8, 2, 4, 4
    cpu = torch.device("cpu")
    for seed in range(6):
        generator = np.random.default_rng(seed)
        synthetic = None if seed % 3 else 0.6
        lookup = DraftOptions(int(generator.integers(1, 6)), int(generator.integers(1, 3)), 4, synthetic)
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
                twin, other.sampled, slots, others, got, BLOCK_SIZE, synthetic is not None, False
            )
            assert inputs.lists() == got.lists()
            for name in ("num_drafts", "query_start", "logits_index", "entries"):
                assert getattr(rows, name).tolist() == getattr(others, name).tolist(), name
            wanted = np.arange(lookup.num_tokens) < rows.num_drafts.numpy()[:, None]
            assert (rows.drafts.numpy().reshape(wanted.shape) == others.drafts.numpy().reshape(wanted.shape))[
                wanted
            ].all()
            drawn = rows.entries >= 0
            for name in (*SAMPLED, "position", "stop_ids"):
                values = getattr(buffers.sampled, name)[: drawn.numel()][drawn]
                assert values.equal(getattr(other.sampled, name)[: drawn.numel()][drawn]), name

            rows.tokens.copy_(drawn_tokens(generator, rows, query_len))
            others.tokens.copy_(rows.tokens)
            accept(state, slots, lookup, rows)
            kernels.launch_accept(twin, slots, others, -1 if synthetic is None else round(0.6 * 2**32), False, 0)
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
    for seed in range(4):
        check_model_drafts(seed, seed % 2)
