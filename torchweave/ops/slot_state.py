"""Request state on the device, one row ("slot") per running request, and the work on it around the model of a step.

All request state of a decode step is in one flat int32 tensor, the arena, whose named regions are contiguous views. A step
reads and advances it without the host. Changes by the host between steps (a request joins or leaves, blocks are granted,
sampling parameters) are collected as (flat index, 32-bit value) pairs in `SlotUpdates` and written by `SlotState.write`: one
kernel that reads them from pinned host memory, however many requests change.

    arena:  last_token[S] | position[S] | ... | stop_ids[S, 8] | block_table[S, B] | slots[R]

`prepare` and `prepare_decode_inputs` fill a step's inputs from the slots, `advance` moves the slots on. They read and write
tensors that the caller owns, so a CUDA graph may hold them. On a GPU each is one Triton kernel; on the CPU numpy works on the
tensors' memory, because dispatching torch ops costs more at batch <= 64.

R rows (sequences in the step), T tokens. Row i owns tokens query_start[i]..query_start[i+1]; rows with slot -1 are padding and
empty; tokens from query_start[R] on are padding.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchweave.ops.kernels.sampling.layout import MAX_STOP_IDS
from torchweave.ops.slot_fields import FIELDS, INDEX, RECORD

_ALIGNMENT = 64  # int32 elements: each region starts on 256 bytes, so kernels may assume aligned vector loads

_RECORD = struct.Struct(
    "=" + "".join({"int32": "i", "float32": "f"}[FIELDS[INDEX[name]].dtype] for name in RECORD) + f"{MAX_STOP_IDS}i"
)
_RECORDED = itemgetter(*RECORD)

IntArray = np.ndarray | Sequence[int] | int


class SlotState:
    """The arena and its views. S = max_batch slots, B = max_blocks_per_seq, R = max_rows, G = num_tables groups of layers.

    The fields of `torchweave.ops.slot_fields`, [S] each, come first, `field_stride` elements apart: kernels take the arena and
    that distance. After them:

    stop_ids      int32 [S, 8]  -1 = unused
    block_table   int32 [G * S, B]  cache block of each block_size tokens, group by group (`tables`); -1 = none
    slots         int32 [R]     the running decode batch, -1 = padding
    history       int32 [S, history_len]  with speculation (`history_len` > 0): token of each position, prompt and answer, up to
                                `last_token`
    """

    last_token: Tensor
    position: Tensor
    min_position: Tensor
    rope_delta: Tensor
    draft_limit: Tensor
    draft_computed: Tensor
    adapter: Tensor
    stop_ids: Tensor
    block_table: Tensor
    slots: Tensor
    history: Tensor

    def __init__(
        self,
        max_batch: int,
        max_blocks_per_seq: int,
        max_rows: int | None = None,
        device: str | torch.device = "cpu",
        num_tables: int = 1,
        history_len: int = 0,
        rope_axes: int = 0,
        has_adapters: bool = False,
    ) -> None:
        max_rows = max_batch if max_rows is None else max_rows
        assert max_batch > 0 and max_blocks_per_seq > 0 and max_rows > 0 and num_tables > 0
        self.num_tables, self.rope_axes = num_tables, rope_axes
        self.history_len = history_len
        given = {"": True, "rope": rope_axes > 0, "drafts": history_len > 0, "adapters": has_adapters}
        self.has_adapters = has_adapters
        parts = {part for part, is_given in given.items() if is_given}
        fields = [field for field in FIELDS if field.part in parts]
        self.max_batch, self.max_blocks_per_seq, self.max_rows = max_batch, max_blocks_per_seq, max_rows
        self.device = torch.device(device)
        self.shapes: dict[str, tuple[int, ...]] = {field.name: (max_batch,) for field in fields}
        self.shapes["stop_ids"] = (max_batch, MAX_STOP_IDS)
        self.shapes["block_table"] = (num_tables * max_batch, max_blocks_per_seq)
        self.shapes["slots"] = (max_rows,)
        if history_len:
            self.shapes["history"] = (max_batch, history_len)
        self.layout: dict[str, int] = {}
        """Flat offset of each region in the arena, in int32 elements."""
        end = 0
        for name, shape in self.shapes.items():
            self.layout[name] = end
            end += -(-int(np.prod(shape)) // _ALIGNMENT) * _ALIGNMENT
        self.field_stride = -(-max_batch // _ALIGNMENT) * _ALIGNMENT
        self.float_fields = frozenset(field.name for field in fields if field.dtype == "float32")

        initial = np.full(end, -1, dtype=np.int32)  # all regions but those of `fields` start as "none"
        for field in fields:
            value = np.array(field.default, dtype=field.dtype).view(np.int32)
            initial[self.layout[field.name] : self.layout[field.name] + max_batch] = value
        self.arena = torch.from_numpy(initial).to(self.device)
        self.host_arrays: dict[str, np.ndarray] = {}
        """On the CPU only: the same regions as numpy views that share the arena's memory."""
        for name in self.shapes:
            view = self._view(name)
            setattr(self, name, view)
            if self.device.type == "cpu":
                self.host_arrays[name] = view.numpy()
        self._flat = self.arena.numpy() if self.device.type == "cpu" else np.empty(0, np.int32)
        self._last_writer = np.empty(end, dtype=np.int32)
        self._uploader = _Uploader(self.arena) if self.device.type == "cuda" else None

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The block table `[S, B]` of each group of layers."""
        return self.block_table.split(self.max_batch)

    def _view(self, name: str) -> Tensor:
        shape = self.shapes[name]
        flat = self.arena[self.layout[name] : self.layout[name] + int(np.prod(shape))]
        flat = flat.view(torch.float32) if name in self.float_fields else flat
        return flat.view(shape)

    def updates(self) -> SlotUpdates:
        """A collector of changes of this state; create it once and reuse it."""
        return SlotUpdates(self)

    def apply(self, updates: SlotUpdates) -> int:
        """Write the collected changes, in the order of the current stream, and empty `updates`. Returns the number of values."""
        assert updates.state is self, "updates were collected for another state"
        return self.write(*updates.take())

    def write(self, indices: np.ndarray, values: np.ndarray) -> int:
        """Write the result of `SlotUpdates.take`: the changes of one step, as a value."""
        if indices.size == 0:
            return 0
        if self._uploader is None:
            self._flat[indices] = values  # a repeated index takes its last value
            return indices.size
        indices, values = self._deduplicate(indices, values)
        self._uploader.scatter(indices, values)
        return indices.size

    def _deduplicate(self, indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keep the last write to each index: threads of a scatter kernel have no order."""
        order = np.arange(indices.size, dtype=np.int32)
        self._last_writer[indices] = order
        last = self._last_writer[indices] == order
        return indices[last], values[last]


class SlotUpdates:
    """Collects changes of a `SlotState` on the host. Of several writes to one place, the last wins."""

    def __init__(self, state: SlotState) -> None:
        self.state = state
        self._indices: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        stops = state.layout["stop_ids"] + np.arange(MAX_STOP_IDS)
        offsets = np.concatenate([[state.layout[name] for name in RECORD], stops])
        strides = np.concatenate([np.ones(len(RECORD)), np.full(MAX_STOP_IDS, MAX_STOP_IDS)])
        self._record_offsets, self._strides = offsets.astype(np.int32), strides.astype(np.int32)

    def __len__(self) -> int:
        return sum(a.size for a in self._indices)

    def set(self, name: str, slots: IntArray, values: npt.ArrayLike) -> None:
        """Set field `name` of `slots` ([n] or one). `values` [n], or [n, width] for `stop_ids` and `block_table`; broadcasts.

        Raises KeyError for an unknown field and IndexError for a slot out of range.
        """
        state = self.state
        shape = state.shapes[name]
        slots = np.asarray(slots, dtype=np.int32).reshape(-1)
        _check_range(name, slots, shape[0])
        dtype = np.float32 if name in state.float_fields else np.int32
        if len(shape) == 1:
            flat = slots + np.int32(state.layout[name])
        else:
            columns = np.arange(shape[1], dtype=np.int32)
            flat = (slots[:, None] * np.int32(shape[1]) + columns) + np.int32(state.layout[name])
        data = np.empty(flat.shape, dtype=dtype)
        data[...] = values
        self._add(flat.reshape(-1), data.reshape(-1).view(np.int32))

    def set_request(self, slot: int, values: dict[str, Any], seed: int, stop_ids: Sequence[int]) -> None:
        """Set all state of the request that starts in `slot`, as one record, because a burst of requests waits for this call.

        Args:
            values: by the names of `slot_fields.RECORD`, but for the halves of the seed.
            seed: of which 64 bits are kept.
            stop_ids: the first `MAX_STOP_IDS` are kept; the caller checks the rest on the host.
        """
        assert 0 <= slot < self.state.max_batch, f"slot {slot} is outside 0..{self.state.max_batch - 1}"
        stops = (*stop_ids[:MAX_STOP_IDS], *(-1,) * (MAX_STOP_IDS - len(stop_ids)))
        values["seed_lo"], values["seed_hi"] = _signed(seed), _signed(seed >> 32)
        record = _RECORD.pack(*_RECORDED(values), *stops)
        self._indices.append(self._record_offsets + self._strides * np.int32(slot))
        self._values.append(np.frombuffer(record, np.int32))

    def set_history(self, slot: int, tokens: np.ndarray) -> None:
        """Set the first tokens of a slot's history."""
        state = self.state
        start = state.layout["history"] + slot * state.history_len
        self._add(np.arange(start, start + len(tokens), dtype=np.int32), tokens.astype(np.int32, copy=False))

    def set_block_table(self, slots: IntArray, columns: IntArray, blocks: IntArray) -> None:
        """Set block_table[slots, columns] = blocks; the three broadcast to one length. Row g * S + s is slot s in group g."""
        state = self.state
        slots, columns = np.asarray(slots, dtype=np.int32), np.asarray(columns, dtype=np.int32)
        blocks = np.asarray(blocks, dtype=np.int32)
        _check_range("block_table", slots, state.num_tables * state.max_batch)
        _check_range("block_table column", columns, state.max_blocks_per_seq)
        flat = np.atleast_1d(
            slots * np.int32(state.max_blocks_per_seq) + columns + np.int32(state.layout["block_table"])
        )
        self._add(flat, blocks if blocks.shape == flat.shape else np.broadcast_to(blocks, flat.shape))

    def set_decode_slots(self, slots: IntArray) -> None:
        """Make `slots` the running decode batch, in this order; the rest of the region becomes padding (-1)."""
        state = self.state
        slots = np.asarray(slots, dtype=np.int32).reshape(-1)
        _check_range("slots", slots, state.max_batch)
        assert slots.size <= state.max_rows, f"{slots.size} rows do not fit in a batch of {state.max_rows}"
        values = np.full(state.max_rows, -1, dtype=np.int32)
        values[: slots.size] = slots
        offset = state.layout["slots"]
        self._add(np.arange(offset, offset + state.max_rows, dtype=np.int32), values)

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """The collected (flat indices, int32 values) in the order of the writes; empties the collector."""
        if not self._indices:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        indices, values = np.concatenate(self._indices), np.concatenate(self._values)
        self._indices.clear()
        self._values.clear()
        return indices, values

    def _add(self, indices: np.ndarray, values: np.ndarray) -> None:
        assert indices.shape == values.shape
        if indices.size:
            self._indices.append(indices)
            self._values.append(values.copy())  # the caller may reuse its array before `apply`


def _signed(word: int) -> int:
    """The low 32 bits as an int32."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def _check_range(what: str, indices: np.ndarray, end: int) -> None:
    if indices.size and int(indices.view(np.uint32).max()) >= end:  # negative ones exceed every `end`
        raise IndexError(f"{what}: index out of 0..{end - 1} in {indices.tolist()}")


class _Uploader:
    """Scatters pairs from a ring of pinned buffers: the host never rewrites one that a kernel may still read."""

    def __init__(self, arena: Tensor, capacity: int = 8192, ring: int = 4) -> None:
        self.arena, self.capacity, self.ring = arena, capacity, ring
        self._pinned = [torch.empty(2 * capacity, dtype=torch.int32, pin_memory=True) for _ in range(ring)]
        self._arrays = [buffer.numpy() for buffer in self._pinned]
        self._read_events = [torch.cuda.Event() for _ in range(ring)]
        self._next = 0

    def scatter(self, indices: np.ndarray, values: np.ndarray) -> None:
        """arena[indices] = values for distinct indices; more than `capacity` pairs take several kernels."""
        from torchweave.ops.kernels.step_io import launch_scatter

        for start in range(0, indices.size, self.capacity):
            part = slice(start, min(start + self.capacity, indices.size))
            count = part.stop - part.start
            buffer_idx = self._next
            self._next = (buffer_idx + 1) % self.ring
            self._read_events[buffer_idx].synchronize()  # returns at once for an event that was never recorded
            array = self._arrays[buffer_idx]
            array[:count] = indices[part]
            array[count : 2 * count] = values[part]
            launch_scatter(self.arena, self._pinned[buffer_idx], count)
            self._read_events[buffer_idx].record()


NOT_EMITTED = -(2**31)
"""Value that `advance` writes for rows that sample nothing in this step."""


class StepInputs(NamedTuple):
    """Inputs of the model and of attention in a step, which `prepare` and `prepare_decode_inputs` fill.

    Attributes:
        ids, positions: int64 [T].
        seq_lens: int32 [R].
        slot_mapping: int64 [T], or [G, T] for a state with G block tables.
    """

    ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor


def prepare(
    state: SlotState,
    slots: Tensor,
    query_start: Tensor,
    host_ids: Tensor,
    host_positions: Tensor,
    inputs: StepInputs,
    block_size: int,
) -> None:
    """Prepare the inputs of a mixed step.

    slots int32 [R], query_start int32 [R+1], host_ids and host_positions int32 or int64 [T]. A token whose host id is -1 takes
    `last_token` and `position` of the row's slot (a decode row, one token; its host position is ignored). Other tokens take the
    host's values. `host_ids` may be `inputs.ids` itself, and `host_positions` `inputs.positions`. Afterwards position[slot] is
    that of the row's last token. Padded tokens get id 0, position 0, slot -1; padding rows get length 0.
    """
    ids, positions, seq_lens, slot_mapping = inputs
    assert query_start.numel() == slots.numel() + 1 == seq_lens.numel() + 1
    assert host_ids.numel() == host_positions.numel() == ids.numel() == positions.numel() == slot_mapping.shape[-1]
    if state.device.type == "cuda":
        from torchweave.ops.kernels.step_io import launch_prepare

        launch_prepare(
            state.last_token, state.position, state.block_table, slots, query_start, host_ids, host_positions, *inputs, block_size
        )  # fmt: skip
        return
    row_slots, starts = slots.numpy(), query_start.numpy()
    lengths = np.diff(starts)
    num_real = int(starts[-1])
    token_slots = np.repeat(row_slots, lengths)
    out_ids, out_positions, mapping = ids.numpy(), positions.numpy(), slot_mapping.numpy()
    from_slot = host_ids.numpy()[:num_real] < 0
    out_ids[:num_real] = np.where(from_slot, state.host_arrays["last_token"][token_slots], host_ids.numpy()[:num_real])
    at = np.where(from_slot, state.host_arrays["position"][token_slots], host_positions.numpy()[:num_real])
    out_positions[:num_real] = at
    fill_slot_mapping(state, token_slots, at, block_size, mapping[..., :num_real])
    out_ids[num_real:], out_positions[num_real:], mapping[..., num_real:] = 0, 0, -1

    has_tokens = (lengths > 0) & (row_slots >= 0)
    final = at[starts[1:][has_tokens] - 1]
    out_lens = seq_lens.numpy()
    out_lens[...] = 0
    out_lens[has_tokens] = final + 1
    state.host_arrays["position"][row_slots[has_tokens]] = final


def prepare_decode_inputs(state: SlotState, slots: Tensor, inputs: StepInputs, block_size: int) -> None:
    """Prepare the inputs of a decode step: row i is one token of slots[i] (int32 [R], usually `state.slots[:R]`); T = R.

    Padding rows get id 0, position 0, length 0, slot -1.
    """
    ids, positions, seq_lens, slot_mapping = inputs
    assert slots.numel() == ids.numel() == positions.numel() == seq_lens.numel() == slot_mapping.shape[-1]
    if state.device.type == "cuda":
        from torchweave.ops.kernels.step_io import launch_prepare_decode

        launch_prepare_decode(state.last_token, state.position, state.block_table, slots, *inputs, block_size)
        return
    row_slots = slots.numpy()
    running = row_slots >= 0
    at = np.where(running, state.host_arrays["position"][row_slots], 0)
    ids.numpy()[...] = np.where(running, state.host_arrays["last_token"][row_slots], 0)
    positions.numpy()[...] = at
    seq_lens.numpy()[...] = np.where(running, at + 1, 0)
    fill_slot_mapping(state, row_slots, at, block_size, slot_mapping.numpy())


def advance(tokens: Tensor, slots: Tensor, emit: Tensor, state: SlotState, out: Tensor) -> None:
    """Advance the slots by the sampled tokens. tokens int32 or int64 [N], slots int32 [N], emit bool or int32 [N], out int32
    [N].

    Where emit: last_token[slot] = token, position[slot] += 1 (the token's own position), and out[i] = token, or -1 - token if
    it is one of the slot's stop ids and its position is not below min_position. The slot continues from token 0 after an
    `INVALID_TOKEN`. Otherwise, and for slot -1: out[i] = NOT_EMITTED only. Histories take the token as well.
    """
    assert tokens.numel() == slots.numel() == emit.numel() == out.numel()
    if state.device.type == "cuda":
        from torchweave.ops.kernels.step_io import launch_advance

        launch_advance(tokens, slots, emit, state.last_token, state.position, state.min_position, state.stop_ids, out)
        if state.history_len:
            from torchweave.ops.kernels.speculation import launch_record

            launch_record(state, slots, emit)
        return
    row_slots, encoded = slots.numpy(), out.numpy()
    active = (emit.numpy() != 0) & (row_slots >= 0)
    encoded[...] = NOT_EMITTED
    active_slots, new = row_slots[active], tokens.numpy()[active].astype(np.int32)
    if active_slots.size == 0:
        return
    at = state.host_arrays["position"][active_slots] + 1
    is_stop = (state.host_arrays["stop_ids"][active_slots] == new[:, None]).any(axis=1) & (
        at >= state.host_arrays["min_position"][active_slots]
    )
    state.host_arrays["last_token"][active_slots] = np.maximum(new, 0)
    state.host_arrays["position"][active_slots] = at
    encoded[active] = np.where(is_stop, -1 - new, new)
    if state.history_len:
        inside = at < state.history_len
        state.host_arrays["history"][active_slots[inside], at[inside]] = np.maximum(new[inside], 0)


def carry(source: Tensor, target: Tensor) -> None:
    """Copy int32 [n] between the device and pinned memory, in the order of the current stream.

    On a GPU a kernel reads or writes the host's memory: switching to a copy engine and back costs 10 us a step for a few KB.
    """
    assert source.numel() == target.numel()
    if source.is_cuda or target.is_cuda:
        from torchweave.ops.kernels.step_io import launch_pinned_copy

        launch_pinned_copy(source, target)
        return
    target.copy_(source)


def fill_slot_mapping(
    state: SlotState, slots: np.ndarray, at: np.ndarray, block_size: int, mapping: np.ndarray
) -> None:
    """Fill mapping [N], or [G, N], with the cache slot of position `at` of each slot."""
    for group, row in enumerate(mapping if mapping.ndim == 2 else mapping[None]):
        row[...] = _cache_slots(state, slots, at, block_size, group)


def _cache_slots(state: SlotState, slots: np.ndarray, at: np.ndarray, block_size: int, group: int) -> np.ndarray:
    """Cache slot of position `at` of each slot; -1 for slot -1, a position without a block, or one beyond the table."""
    columns, offsets = np.divmod(at, block_size)
    valid = (slots >= 0) & (columns < state.max_blocks_per_seq)
    blocks = state.host_arrays["block_table"][slots + group * state.max_batch, np.where(valid, columns, 0)].astype(
        np.int64
    )
    return np.where(valid & (blocks >= 0), blocks * block_size + offsets, -1)
