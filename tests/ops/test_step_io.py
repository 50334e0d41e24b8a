"""Inputs of a step and advance of its slots against plain loops; the kernels against the CPU versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.interpreted import run_interpreted
from tests.ops.step_cases import BLOCK_SIZE, Outputs, copy_state, random_state, random_step, set_stop_ids
from torchweave.ops.kernels.sampling.layout import INVALID_TOKEN
from torchweave.ops.slot_state import NOT_EMITTED, SlotState, advance, prepare, prepare_decode_inputs


def cache_slot(state: SlotState, slot: int, position: int) -> int:
    column, offset = divmod(position, BLOCK_SIZE)
    if slot < 0 or column >= state.max_blocks_per_seq or state.block_table[slot, column] < 0:
        return -1
    return int(state.block_table[slot, column]) * BLOCK_SIZE + offset


@pytest.mark.parametrize("seed", range(20))
def test_prepare(seed: int) -> None:
    generator = np.random.default_rng(seed)
    state = random_state(generator)
    step = random_step(generator, state)
    before = copy_state(state)
    rows, tokens = step.slots.numel(), step.host_ids.numel()
    got = Outputs.empty(rows, tokens)
    prepare(
        state, step.slots, step.query_start, step.host_ids, step.host_positions, got, block_size=BLOCK_SIZE
    )  # fmt: skip
    expected = {"ids": [0] * tokens, "positions": [0] * tokens, "seq_lens": [0] * rows, "slot_mapping": [-1] * tokens}
    position = before.position.tolist()
    for row, slot in enumerate(step.slots.tolist()):
        for token in range(int(step.query_start[row]), int(step.query_start[row + 1])):
            own = step.host_ids[token] < 0
            at = before.position[slot] if own else step.host_positions[token]
            expected["ids"][token] = int(before.last_token[slot] if own else step.host_ids[token])
            expected["positions"][token] = position[slot] = int(at)
            expected["seq_lens"][row] = int(at) + 1
            expected["slot_mapping"][token] = cache_slot(state, slot, int(at))
    assert got.lists() == expected
    assert state.position.tolist() == position


def test_prepare_may_work_in_place() -> None:
    generator = np.random.default_rng(1)
    state = random_state(generator)
    step = random_step(generator, state)
    expected = Outputs.empty(step.slots.numel(), step.host_ids.numel())
    twin = copy_state(state)
    prepare(
        state,
        step.slots,
        step.query_start,
        step.host_ids,
        step.host_positions,
        expected,
        block_size=BLOCK_SIZE,
    )
    got = Outputs.empty(step.slots.numel(), step.host_ids.numel())
    got = got._replace(ids=step.host_ids.long(), positions=step.host_positions.long())
    prepare(twin, step.slots, step.query_start, got.ids, got.positions, got, block_size=BLOCK_SIZE)
    assert got.lists() == expected.lists()


@pytest.mark.parametrize("seed", range(5))
def test_prepare_decode(seed: int) -> None:
    state = random_state(np.random.default_rng(seed))
    slots = torch.tensor([4, 0, -1, 7, -1], dtype=torch.int32)
    got = Outputs.empty(5, 5)
    prepare_decode_inputs(state, slots, got, block_size=BLOCK_SIZE)
    for row, slot in enumerate(slots.tolist()):
        at = int(state.position[slot]) if slot >= 0 else 0
        expected = (
            (int(state.last_token[slot]), at, at + 1, cache_slot(state, slot, at)) if slot >= 0 else (0, 0, 0, -1)
        )
        assert tuple(value[row].item() for value in got) == expected


def test_every_layer_group_has_its_own_slot_mapping() -> None:
    generator = np.random.default_rng(3)
    state = random_state(generator, tables=3)
    step = random_step(generator, state)
    rows, tokens = step.slots.numel(), step.host_ids.numel()
    inputs = (step.slots, step.query_start, step.host_ids, step.host_positions)
    got = Outputs.empty(rows, tokens, tables=3)
    prepare(copy_state(state), *inputs, got, block_size=BLOCK_SIZE)
    for group in range(3):
        alone = SlotState(state.max_batch, state.max_blocks_per_seq, state.max_rows)
        for name in alone.shapes:
            getattr(alone, name).copy_(state.tables[group] if name == "block_table" else getattr(state, name))
        expected = Outputs.empty(rows, tokens)
        prepare(alone, *inputs, expected, block_size=BLOCK_SIZE)
        assert torch.equal(got.slot_mapping[group], expected.slot_mapping) and torch.equal(got.ids, expected.ids)


def test_advance() -> None:
    state = SlotState(5, 2)
    updates = state.updates()
    updates.set("position", np.arange(5), [10, 11, 12, 13, 14])
    set_stop_ids(updates, 1, [7, 8])
    set_stop_ids(updates, 2, [7])
    set_stop_ids(updates, 3, [7])
    updates.set("min_position", [2, 3], [14, 14])
    state.apply(updates)
    out = torch.empty(6, dtype=torch.int32)
    slots = torch.tensor([0, 1, 2, 3, 4, -1], dtype=torch.int32)
    tokens = torch.tensor([7, 8, 7, 7, 7, 7], dtype=torch.int32)
    advance(tokens, slots, torch.tensor([1, 1, 1, 1, 0, 1], dtype=torch.int32), state, out)
    # no stop ids; its second; the token is at 13 < 14; at 14, allowed; not asked; padding
    assert out.tolist() == [7, -9, 7, -8, NOT_EMITTED, NOT_EMITTED]
    assert state.position.tolist() == [11, 12, 13, 14, 14]
    assert state.last_token.tolist() == [7, 8, 7, 7, 0]


def test_after_an_invalid_token_a_slot_continues_from_an_index_of_the_embedding() -> None:
    state, out = SlotState(2, 2), torch.empty(2, dtype=torch.int32)
    advance(torch.tensor([INVALID_TOKEN, 3]), torch.tensor([0, 1]), torch.ones(2, dtype=torch.int32), state, out)
    assert out.tolist() == [INVALID_TOKEN, 3] and state.last_token.tolist() == [0, 3]


def test_request_through_prefill_and_decode() -> None:
    """Two chunks of a prompt, then decode steps: positions and cache slots are contiguous."""
    state = SlotState(2, 4)
    updates = state.updates()
    updates.set_block_table(1, [0, 1, 2, 3], [9, 4, 6, 2])
    state.apply(updates)
    slots, seen = torch.tensor([1], dtype=torch.int32), []
    emit, out = torch.ones(1, dtype=torch.bool), torch.empty(1, dtype=torch.int32)
    for first, last in ((0, 5), (5, 7)):
        size = last - first
        got = Outputs.empty(1, size)
        prepare(
            state, slots, torch.tensor([0, size], dtype=torch.int32), torch.arange(first, last), torch.arange(first, last),
            got, block_size=BLOCK_SIZE,
        )  # fmt: skip
        seen += got.slot_mapping.tolist()
    advance(torch.tensor([100]), slots, emit, state, out)
    for step in range(4):
        got = Outputs.empty(1, 1)
        prepare_decode_inputs(state, slots, got, block_size=BLOCK_SIZE)
        assert (got.ids.item(), got.positions.item(), got.seq_lens.item()) == (100 + step, 7 + step, 8 + step)
        seen += got.slot_mapping.tolist()
        advance(torch.tensor([101 + step]), slots, emit, state, out)
    assert seen == [block * 4 + i for block in (9, 4, 6) for i in range(4)][:11]


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("tests.ops.interpreted_step")


def test_kernels_build_for_hopper() -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels import step_io as kernels

    generator = np.random.default_rng(0)
    state = random_state(generator)
    step = random_step(generator, state)
    rows, tokens = step.slots.numel(), step.host_ids.numel()
    views = (state.last_token, state.position, state.block_table)
    out = torch.empty(rows, dtype=torch.int32)
    with recorded(
        kernels, "prepare_kernel", "prepare_decode_kernel", "advance_kernel", "scatter_kernel", "pinned_copy_kernel"
    ) as launches:
        inputs = (step.slots, step.query_start, step.host_ids, step.host_positions)
        kernels.launch_prepare(*views, *inputs, *Outputs.empty(rows, tokens), BLOCK_SIZE)
        kernels.launch_prepare_decode(*views, step.slots, *Outputs.empty(rows, rows), BLOCK_SIZE)
        kernels.launch_advance(
            out, step.slots, out, state.last_token, state.position, state.min_position, state.stop_ids, out.clone()
        )
        kernels.launch_scatter(state.arena, out, rows // 2)
        kernels.launch_pinned_copy(out, out.clone())
    assert len(launches) == 5
    for launch in launches:
        assert compile_for_hopper(launch).asm["cubin"]
