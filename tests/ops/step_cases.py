"""Random mixed steps, for the kernels in the interpreter and on a GPU against the CPU versions and a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchweave.ops.slot_state import MAX_STOP_IDS, SlotState, SlotUpdates, StepInputs

BLOCK_SIZE = 4


@dataclass
class MixedStep:
    """Inputs of `prepare`: decode rows, prefill rows, empty padding rows, then padded tokens."""

    slots: Tensor
    query_start: Tensor
    host_ids: Tensor
    host_positions: Tensor


class Outputs(StepInputs):
    """Buffers that the step ops fill; initially garbage."""

    @classmethod
    def empty(cls, rows: int, tokens: int, device: str = "cpu", tables: int = 1) -> Outputs:
        def garbage(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, 77, dtype=dtype, device=device)

        return cls(
            garbage(tokens, dtype=torch.int64),
            garbage(tokens, dtype=torch.int64),
            garbage(rows, dtype=torch.int32),
            garbage(tokens, dtype=torch.int64)
            if tables == 1
            else garbage(tables, tokens + 3, dtype=torch.int64)[:, :tokens],
        )

    def lists(self) -> dict[str, list[int]]:
        return {name: value.tolist() for name, value in self._asdict().items()}


def set_seed(
    updates: SlotUpdates, slots: Sequence[int] | np.ndarray | int, seeds: Sequence[int] | np.ndarray | int
) -> None:
    """Set the 64-bit seed of `slots`; negative seeds are taken modulo 2**64."""
    wide = np.array([int(seed) % 2**64 for seed in np.atleast_1d(np.asarray(seeds, object))])
    halves = wide.astype(np.uint64).view(np.uint32).reshape(-1, 2).view(np.int32)
    updates.set("seed_lo", slots, halves[:, 0])
    updates.set("seed_hi", slots, halves[:, 1])


def set_stop_ids(updates: SlotUpdates, slot: int, stop_ids: Sequence[int]) -> None:
    """Set the first `MAX_STOP_IDS` of `stop_ids`."""
    on_device = [*stop_ids[:MAX_STOP_IDS]]
    updates.set("stop_ids", slot, on_device + [-1] * (MAX_STOP_IDS - len(on_device)))


def random_state(generator: np.random.Generator, max_batch: int = 9, columns: int = 6, tables: int = 1) -> SlotState:
    state = SlotState(max_batch, columns, max_rows=12, num_tables=tables)
    updates = state.updates()
    every = np.arange(max_batch)
    updates.set("last_token", every, generator.integers(0, 1000, max_batch))
    updates.set("position", every, generator.integers(0, columns * BLOCK_SIZE + 2, max_batch))  # some beyond the table
    updates.set("min_position", every, generator.integers(0, columns * BLOCK_SIZE, max_batch))
    updates.set("stop_ids", every, generator.integers(-1, 6, (max_batch, 8)))
    rows = np.arange(tables * max_batch)
    updates.set("block_table", rows, generator.integers(-1, 50, (rows.size, columns)))
    state.apply(updates)
    return state


def random_step(generator: np.random.Generator, state: SlotState) -> MixedStep:
    slots = generator.permutation(state.max_batch)[: generator.integers(1, 7)].tolist()
    generation = generator.integers(0, len(slots) + 1)
    ids, positions, starts = [], [], [0]
    for row in range(len(slots)):
        if row < generation:
            ids, positions = [*ids, -1], [*positions, 5]
        else:
            length = int(generator.integers(1, 9))
            first = int(generator.integers(0, 12))
            ids += generator.integers(0, 1000, length).tolist()
            positions += range(first, first + length)
        starts.append(len(ids))
    padding_rows, padding_tokens = generator.integers(0, 3), generator.integers(0, 4)
    slots += [-1] * padding_rows
    starts += [starts[-1]] * padding_rows
    int32 = torch.int32
    return MixedStep(
        torch.tensor(slots, dtype=int32), torch.tensor(starts, dtype=int32),
        torch.tensor(ids + [9] * padding_tokens, dtype=int32), torch.tensor(positions + [9] * padding_tokens, dtype=int32),
    )  # fmt: skip


def copy_state(state: SlotState, device: str = "cpu") -> SlotState:
    copy = SlotState(state.max_batch, state.max_blocks_per_seq, state.max_rows, device, state.num_tables)
    copy.arena.copy_(state.arena)
    return copy
