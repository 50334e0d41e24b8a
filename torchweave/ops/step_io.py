"""Work around the model in a step: prepare its inputs from the slots, and advance the slots afterwards.

All functions read and write device state through tensors that the caller owns, so a CUDA graph may hold them. On a GPU each is
one Triton kernel; on the CPU numpy works on the tensors' memory, because dispatching torch ops costs more at batch <= 64.

R rows (sequences in the step), T tokens. Row i owns tokens query_start[i]..query_start[i+1]; rows with slot -1 are padding and
empty; tokens from query_start[R] on are padding. See `SlotState` for the meaning of position[slot].
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from torchweave.ops.slot_state import SlotState

NOT_EMITTED = -(2**31)
"""Value that `advance` writes for rows that sample nothing in this step."""


def prepare(
    state: SlotState,
    slots: Tensor,
    query_start: Tensor,
    host_ids: Tensor,
    host_positions: Tensor,
    *,
    ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_size: int,
) -> None:
    """Prepare the inputs of a mixed step: ids int64 [T], positions int64 [T], seq_lens int32 [R], slot_mapping int64 [T], or
    [G, T] for a state with G block tables.

    slots int32 [R], query_start int32 [R+1], host_ids and host_positions int32 or int64 [T]. A token whose host id is -1 takes
    `last_token` and `position` of the row's slot (a decode row, one token; its host position is ignored). Other tokens take the
    host's values. `host_ids` may be `ids` itself, and `host_positions` `positions`. Afterwards position[slot] is that of the
    row's last token. Padded tokens get id 0, position 0, slot -1; padding rows get length 0.
    """
    assert query_start.numel() == slots.numel() + 1 == seq_lens.numel() + 1
    assert host_ids.numel() == host_positions.numel() == ids.numel() == positions.numel() == slot_mapping.shape[-1]
    if state.device.type == "cuda":
        from torchweave.ops.kernels.step_io import launch_prepare

        launch_prepare(
            state.last_token, state.position, state.block_table, slots, query_start, host_ids, host_positions,
            ids, positions, seq_lens, slot_mapping, block_size,
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
    _fill_slot_mapping(state, token_slots, at, block_size, mapping[..., :num_real])
    out_ids[num_real:], out_positions[num_real:], mapping[..., num_real:] = 0, 0, -1

    has_tokens = (lengths > 0) & (row_slots >= 0)
    final = at[starts[1:][has_tokens] - 1]
    out_lens = seq_lens.numpy()
    out_lens[...] = 0
    out_lens[has_tokens] = final + 1
    state.host_arrays["position"][row_slots[has_tokens]] = final


def prepare_decode_inputs(
    state: SlotState,
    slots: Tensor,
    *,
    ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_size: int,
) -> None:
    """Prepare the inputs of a decode step: row i is one token of slots[i] (int32 [R], usually `state.slots[:R]`); T = R.

    Fills ids int64 [R], positions int64 [R], seq_lens int32 [R], slot_mapping int64 [R] or [G, R]; padding rows get 0, 0, 0,
    -1.
    """
    assert slots.numel() == ids.numel() == positions.numel() == seq_lens.numel() == slot_mapping.shape[-1]
    if state.device.type == "cuda":
        from torchweave.ops.kernels.step_io import launch_prepare_decode

        launch_prepare_decode(
            state.last_token,
            state.position,
            state.block_table,
            slots,
            ids,
            positions,
            seq_lens,
            slot_mapping,
            block_size,
        )
        return
    row_slots = slots.numpy()
    running = row_slots >= 0
    at = np.where(running, state.host_arrays["position"][row_slots], 0)
    ids.numpy()[...] = np.where(running, state.host_arrays["last_token"][row_slots], 0)
    positions.numpy()[...] = at
    seq_lens.numpy()[...] = np.where(running, at + 1, 0)
    _fill_slot_mapping(state, row_slots, at, block_size, slot_mapping.numpy())


def advance(tokens: Tensor, slots: Tensor, emit: Tensor, state: SlotState, out: Tensor) -> None:
    """Advance the slots by the sampled tokens. tokens int32 or int64 [N], slots int32 [N], emit bool or int32 [N], out int32
    [N].

    Where emit: last_token[slot] = token, position[slot] += 1 (the token's own position), and out[i] = token, or -1 - token if
    it is one of the slot's stop ids and its position is not below min_position. Otherwise, and for slot -1: out[i] =
    NOT_EMITTED only.
    """
    assert tokens.numel() == slots.numel() == emit.numel() == out.numel()
    if state.device.type == "cuda":
        from torchweave.ops.kernels.step_io import launch_advance

        launch_advance(tokens, slots, emit, state.last_token, state.position, state.min_position, state.stop_ids, out)
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
    state.host_arrays["last_token"][active_slots] = new
    state.host_arrays["position"][active_slots] = at
    encoded[active] = np.where(is_stop, -1 - new, new)


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


def _fill_slot_mapping(
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
