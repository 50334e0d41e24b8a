"""Random slots with histories, for the kernels of speculation and their CPU versions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchweave.ops.slot_state import SlotState
from torchweave.ops.speculation import DraftRows

BLOCK_SIZE = 4
COLUMNS = 16
HISTORY = COLUMNS * BLOCK_SIZE
MAX_BATCH = 9


def draft_state(generator: np.random.Generator, tables: int = 1) -> tuple[SlotState, Tensor]:
    """Slots whose histories repeat themselves, and the rows of a step: some slots in any order, and padding."""
    state = SlotState(MAX_BATCH, COLUMNS, max_rows=12, num_tables=tables, history_len=HISTORY)
    updates, every = state.updates(), np.arange(MAX_BATCH)
    position = generator.integers(0, HISTORY - 20, MAX_BATCH)
    history = generator.integers(0, 3, (MAX_BATCH, HISTORY))
    updates.set("history", every, history)
    updates.set("last_token", every, history[every, position])
    updates.set("position", every, position)
    updates.set(
        "draft_limit", every, np.where(generator.random(MAX_BATCH) < 0.2, -1, position + generator.integers(-1, 20))
    )
    updates.set("draft_computed", every, np.maximum(position - generator.integers(-1, 12, MAX_BATCH), 0))
    updates.set("min_position", every, generator.integers(0, HISTORY, MAX_BATCH))
    updates.set("stop_ids", every, generator.integers(-1, 12, (MAX_BATCH, 8)))
    for name in ("temperature", "top_p", "min_p"):
        updates.set(name, every, generator.random(MAX_BATCH))
    for name in ("top_k", "seed_lo", "seed_hi"):
        updates.set(name, every, generator.integers(0, 1000, MAX_BATCH))
    numbers = np.arange(tables * MAX_BATCH)
    updates.set("block_table", numbers, generator.integers(-1, 50, (numbers.size, COLUMNS)))
    state.apply(updates)
    slots = generator.permutation(MAX_BATCH)[: generator.integers(1, 8)].tolist()
    return state, torch.tensor([*slots, *[-1] * int(generator.integers(0, 3))], dtype=torch.int32)


def drawn_tokens(generator: np.random.Generator, rows: DraftRows, query_len: int) -> Tensor:
    """Drawn tokens, most of which are the draft at the same place."""
    num_rows = rows.num_drafts.numel()
    tokens = generator.integers(0, 4, (num_rows, query_len))
    drafts = rows.drafts.numpy().reshape(num_rows, -1)
    right = generator.random(drafts.shape) < 0.7
    tokens[:, :-1][right] = drafts[right]
    return torch.from_numpy(tokens.astype(np.int32).ravel())
