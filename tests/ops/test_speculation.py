"""Prompt lookup against a plain loop, acceptance by hand, and the kernels: interpreted, and compiled for sm_90."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.cross_compile import compile_for_hopper, recorded
from tests.ops.interpreted import run_interpreted
from tests.ops.speculation_cases import BLOCK_SIZE, draft_state
from tests.ops.step_cases import Outputs
from torchweave.ops.slot_state import NOT_EMITTED, SlotState
from torchweave.ops.speculation import (
    DraftBuffers,
    DraftOptions,
    accept,
    fill_rope_offsets,
    latest_match,
    prepare_drafts,
    propose,
)


def plain_match(text: list[int], least: int, most: int) -> int | None:
    for length in range(most, least - 1, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[len(text) - length :]:
                return end
    return None


def test_the_longest_then_latest_match_decides() -> None:
    generator = np.random.default_rng(0)
    for _ in range(500):
        text = generator.integers(0, 3, generator.integers(1, 30))
        least = int(generator.integers(1, 4))
        most = least + int(generator.integers(0, 4))
        assert latest_match(text, least, most) == plain_match(text.tolist(), least, most)


def proposed(text: list[int], limit: int, lookup: DraftOptions) -> list[int]:
    state = SlotState(1, 8, history_len=32)
    updates = state.updates()
    updates.set("position", 0, len(text) - 1)
    updates.set("draft_limit", 0, limit)
    updates.set_history(0, np.array(text))
    state.apply(updates)
    rows = DraftBuffers(1, lookup, torch.device("cpu")).rows(1)
    propose(state, torch.zeros(1, dtype=torch.int32), lookup, rows)
    return rows.drafts[: int(rows.num_drafts)].tolist()


def test_drafts_continue_the_text_behind_the_match() -> None:
    lookup = DraftOptions(3, 2, 4)
    assert proposed([5, 6, 7, 8, 9, 5, 6], 30, lookup) == [7, 8, 9]
    assert proposed([5, 6, 7, 5, 6], 30, lookup) == [7, 5, 6]
    assert proposed([4, 4, 4], 30, lookup) == [4, 4, 4], "the text repeats itself"
    assert proposed([5, 6, 7, 8, 9, 5, 6], 8, lookup) == [7, 8], "no draft beyond the limit"
    assert proposed([5, 6, 7, 8, 9, 5, 6], -1, lookup) == [], "a slot without drafts"
    assert proposed([5, 6, 7, 8, 9], 30, lookup) == []
    assert proposed([5], 30, lookup) == []


def test_tokens_of_a_row_take_the_offset_of_its_slot() -> None:
    """A row without drafts, one with three, one of padding, and padded tokens behind all rows."""
    state = SlotState(3, 8, history_len=32, rope_axes=3)
    updates = state.updates()
    updates.set("rope_delta", [0, 1, 2], [-5, 0, -70])
    state.apply(updates)
    slots, query_start = (torch.tensor(each, dtype=torch.int32) for each in ([2, 0, -1], [0, 1, 5, 5]))
    out = torch.zeros(3, 7, dtype=torch.int64)
    fill_rope_offsets(state, slots, query_start, out)
    assert out[:, :5].tolist() == [[-70, -5, -5, -5, -5]] * 3


@pytest.mark.parametrize(
    ("drawn", "kept"),
    [
        ([7, 8, 9, 1], [7, 8, 9, 1]),
        ([7, 8, 3, 1], [7, 8, 3]),
        ([2, 8, 9, 1], [2]),
        ([7, 50, 9, 1], [7, -51]),
        ([50, 8, 9, 1], [50]),  # min_tokens: too early to stop
    ],
)
def test_accept_keeps_tokens_up_to_the_first_difference_or_stop(drawn: list[int], kept: list[int]) -> None:
    lookup = DraftOptions(3)
    state = SlotState(2, 8, history_len=32)
    updates = state.updates()
    updates.set("position", 1, 9)
    updates.set("min_position", 1, 11)
    updates.set("stop_ids", 1, [50, *[-1] * 7])
    state.apply(updates)
    rows = DraftBuffers(2, lookup, torch.device("cpu")).rows(2)
    rows.drafts.copy_(torch.tensor([7, 8 if drawn[1] != 50 else 50, 9, 0, 0, 0]))
    rows.num_drafts.copy_(torch.tensor([3, 0]))
    rows.tokens.copy_(torch.tensor([*drawn, 0, 0, 0, 0]))
    accept(state, torch.tensor([1, -1], dtype=torch.int32), lookup, rows)
    tokens = [-1 - token if token < 0 else token for token in kept]
    assert rows.out.tolist() == [*kept, *[NOT_EMITTED] * (8 - len(kept)), 3, 0]
    assert int(state.position[1]) == 9 + len(kept) and int(state.last_token[1]) == tokens[-1]
    assert state.history[1, 10 : 10 + len(kept) + 1].tolist() == [*tokens, -1]


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("tests.ops.interpreted_speculation")


def test_kernels_compile_for_hopper() -> None:
    pytest.importorskip("triton")
    from torchweave.ops.kernels import speculation as kernels

    names = [name for name in vars(kernels) if name.endswith("_kernel")]
    state, slots = draft_state(np.random.default_rng(0), tables=2)
    options = DraftOptions(3, from_model=True)
    buffers, rows = DraftBuffers(12, options, torch.device("cpu")), slots.numel()
    views, inputs = buffers.rows(rows), Outputs.empty(rows, 4 * rows, tables=2)
    with recorded(kernels, *names) as launches:
        kernels.launch_propose(state, slots, 2, 5, views.matches)
        kernels.launch_prepare_drafts(state, buffers.sampled, slots, views, inputs, BLOCK_SIZE, False, False)
        kernels.launch_accept(state, slots, views, -1, False, 0)
        kernels.launch_accept(state, slots, views, 1 << 31, False, 0)
        for shift in (0, 1):
            kernels.launch_catch_up(state, buffers.sampled, slots, views, inputs, BLOCK_SIZE, 4, shift)
            kernels.launch_feed_draft(state, slots, views, 1, inputs, BLOCK_SIZE, shift)
            kernels.launch_accept(state, slots, views, -1, True, shift)
        kernels.launch_finish_catch_up(state, slots, views)
        kernels.launch_prepare_drafts(state, buffers.sampled, slots, views, inputs, BLOCK_SIZE, False, True)
        kernels.launch_next_tokens(state, slots, views.query_start, inputs.positions, inputs.ids)
        kernels.launch_note_computed(state, slots, views.query_start, inputs.positions)
        kernels.launch_record(state, slots, torch.ones(rows, dtype=torch.int32))
    assert len(launches) == len(names) + 9
    for launch in launches:
        assert "ptx" in compile_for_hopper(launch).asm


def test_a_padded_step_is_empty() -> None:
    state, lookup = SlotState(2, 8, history_len=32), DraftOptions(2)
    buffers, slots = DraftBuffers(2, lookup, torch.device("cpu")), torch.full((2,), -1, dtype=torch.int32)
    rows, inputs = buffers.rows(2), Outputs.empty(2, 6)
    propose(state, slots, lookup, rows)
    prepare_drafts(state, slots, buffers, rows, inputs, BLOCK_SIZE)
    assert rows.query_start.tolist() == [0, 0, 0] and rows.entries.tolist() == [-1] * 6
    assert inputs.lists() == {"ids": [0] * 6, "positions": [0] * 6, "seq_lens": [0, 0], "slot_mapping": [-1] * 6}
