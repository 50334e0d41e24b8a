"""The arena's layout, and changes collected on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.step_cases import set_seed, set_stop_ids
from torchweave.engine.request import SamplingParams
from torchweave.ops.slot_fields import FIELDS, INDEX, PARAMS
from torchweave.ops.slot_state import SlotState


def test_views_share_the_arena_at_their_offsets() -> None:
    state = SlotState(5, 7, max_rows=9)
    assert state.stop_ids.shape == (5, 8) and state.block_table.shape == (5, 7) and state.slots.shape == (9,)
    for name, offset in state.layout.items():
        view = getattr(state, name)
        assert view.is_contiguous() and view.data_ptr() == state.arena.data_ptr() + 4 * offset
        assert offset % 64 == 0
    assert len(set(state.layout.values())) == len(state.layout)


def test_empty_slots_are_greedy_and_hold_nothing() -> None:
    state = SlotState(3, 4)
    assert state.temperature.tolist() == [0, 0, 0] and state.top_p.tolist() == [1, 1, 1]
    assert (state.stop_ids == -1).all() and (state.block_table == -1).all() and state.slots.tolist() == [-1, -1, -1]


def test_every_kind_of_slot_update() -> None:
    state = SlotState(4, 3, max_rows=4)
    updates = state.updates()
    updates.set("last_token", [1, 3], [11, 13])
    updates.set("temperature", 2, 0.7)
    set_seed(updates, [0, 1], [2**63 + 5, -1])
    set_stop_ids(updates, 1, [4, 5])
    updates.set_block_table([0, 0, 3], [0, 1, 2], [8, 9, 10])
    updates.set_decode_slots([3, 1])
    before = state.arena.clone()
    assert len(updates) > 0 and state.arena.equal(before), "nothing changes before apply"
    state.apply(updates)
    assert state.last_token.tolist() == [0, 11, 0, 13]
    assert state.temperature.tolist() == pytest.approx([0, 0, 0.7, 0])
    assert state.seed_lo.tolist()[:2] == [5, -1] and state.seed_hi.tolist()[:2] == [-(2**31), -1]
    assert state.stop_ids[1].tolist() == [4, 5, -1, -1, -1, -1, -1, -1]
    assert state.block_table.tolist() == [[8, 9, -1], [-1] * 3, [-1] * 3, [-1, -1, 10]]
    assert state.slots.tolist() == [3, 1, -1, -1]
    assert len(updates) == 0 and state.apply(updates) == 0
    updates.set_decode_slots([2])
    state.apply(updates)
    assert state.slots.tolist() == [2, -1, -1, -1]


def test_set_request_equals_setting_each_field() -> None:
    one, other = SlotState(4, 3), SlotState(4, 3)
    record, apart = one.updates(), other.updates()
    facts = {"position": 9, "min_position": 12, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05}
    facts["top_n_sigma"] = 1.5
    for slot, stops, seed in ((2, (4, 5), 2**63 + 5), (0, tuple(range(10)), -1)):
        record.set_request(slot, dict(facts), seed, stops)
        for name, value in facts.items():
            apart.set(name, slot, value)
        set_seed(apart, slot, seed)
        set_stop_ids(apart, slot, stops)
    one.apply(record)
    other.apply(apart)
    assert one.arena.equal(other.arena) and one.position.tolist() == [9, 0, 9, 0]


def test_fields_lie_at_their_index_of_the_table() -> None:
    """The kernels' addresses: `INDEX[name] * field_stride`, whatever the number of slots and the parts."""
    for state in (SlotState(5, 7), SlotState(65, 3, history_len=9, rope_axes=3)):
        for field in FIELDS:
            if field.name in state.layout and not field.part:
                assert state.layout[field.name] == INDEX[field.name] * state.field_stride
                assert getattr(state, field.name).tolist() == [field.default] * state.max_batch
                assert getattr(state, field.name).dtype == getattr(torch, field.dtype)
    assert {"rope_delta", "draft_limit"} <= state.layout.keys() and "rope_delta" not in SlotState(5, 7).layout


def test_sampling_parameters_of_the_table_are_those_of_requests() -> None:
    defaults = SamplingParams()
    for name in PARAMS:
        assert isinstance(getattr(defaults, name), (int, float)), name


def test_the_last_write_to_an_index_wins() -> None:
    state = SlotState(8, 2)
    updates = state.updates()
    generator = np.random.default_rng(0)
    expected = np.zeros(8, np.int32)
    for _ in range(20):
        slots, values = generator.integers(0, 8, 5), generator.integers(0, 100, 5)
        for slot, value in zip(slots, values, strict=True):
            expected[slot] = value
        updates.set("position", slots, values)
    indices, values = state._deduplicate(*updates.take())
    assert len(set(indices.tolist())) == len(indices)
    arena = np.zeros(state.arena.numel(), np.int32)
    arena[indices] = values
    assert arena[state.layout["position"] :][:8].tolist() == expected.tolist()


def test_values_are_taken_at_the_time_of_the_call() -> None:
    state = SlotState(2, 2)
    updates = state.updates()
    values = np.array([1, 2])
    updates.set("position", [0, 1], values)
    blocks = np.array([5, 6], dtype=np.int32)
    updates.set_block_table([0, 1], 0, blocks)
    values[:], blocks[:] = 9, 9
    state.apply(updates)
    assert state.position.tolist() == [1, 2] and state.block_table[:, 0].tolist() == [5, 6]


@pytest.mark.parametrize(
    "change",
    [
        lambda u: u.set("position", 4, 0),
        lambda u: u.set("position", -1, 0),
        lambda u: u.set_block_table(0, 2, 0),
        lambda u: u.set_block_table(4, 0, 0),
        lambda u: u.set_decode_slots([4]),
    ],
)
def test_indices_out_of_range_are_refused(change) -> None:
    with pytest.raises(IndexError):
        change(SlotState(4, 2).updates())


def test_applying_on_the_cpu_dispatches_nothing() -> None:
    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"dispatched {func}")

    state = SlotState(64, 8)
    updates = state.updates()
    with Refuse():
        updates.set("last_token", np.arange(64), 3)
        updates.set_decode_slots(np.arange(64))
        state.apply(updates)
    assert state.last_token.equal(torch.full((64,), 3, dtype=torch.int32))
