"""Rows with every kind of sampling parameters, for the kernel in the interpreter and on a GPU against the reference."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.ops.step_cases import set_seed, set_stop_ids
from torchweave.ops.slot_state import SlotState

# temperature, top_k, top_p, min_p, steps still without stop ids, spread of the logits, top_n_sigma
PARAMETERS = (
    (0.0, 0, 1.0, 0.0, 0, 3.0, 0.0),
    (0.0, 0, 1.0, 0.0, 5, 3.0, 0.0),
    (0.0, 5, 0.5, 0.1, 0, 3.0, 0.0),
    (1.0, 0, 1.0, 0.0, 0, 3.0, 0.0),
    (0.7, 0, 1.0, 0.0, 5, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0, 0, 3.0, 0.0),
    (0.8, 40, 1.0, 0.0, 0, 3.0, 0.0),
    (0.8, 40, 0.9, 0.0, 3, 3.0, 0.0),
    (1.0, 0, 0.95, 0.0, 0, 3.0, 0.0),
    (1.0, 0, 0.9, 0.0, 0, 0.01, 0.0),
    (1.3, 0, 0.6, 0.05, 0, 2.0, 0.0),
    (1.0, 0, 1.0, 0.1, 0, 3.0, 0.0),
    (1.0, 0, 1.0, 0.001, 0, 0.1, 0.0),
    (1.0, 1000, 0.8, 0.0, 0, 0.1, 0.0),
    (1.0, 10**6, 1.0, 0.0, 0, 2.0, 0.0),
    (1.0, 7, 0.0, 0.0, 0, 2.0, 0.0),
    (1.0, 50, 0.9, 0.2, 2, 0.0, 0.0),
    (1.0, 0, 1.0, 0.0, 0, 3.0, 1.0),
    (1.5, 0, 1.0, 0.0, 3, 1.0, 0.5),
    (0.8, 40, 1.0, 0.0, 0, 3.0, 3.0),
    (0.8, 4000, 0.9, 0.0, 0, 1.0, 2.0),
    (1.0, 0, 0.95, 0.05, 2, 2.0, 1.5),
    (1.0, 0, 0.9, 0.0, 0, 1.0, 6.0),
    (1.0, 0, 1.0, 0.0, 0, 1.0, 1e30),
    (1.0, 30, 0.9, 0.0, 0, 0.0, 1.0),
    (1.0, 0, 0.5, 0.0, 0, 3.0, -1.0),
    (0.0, 0, 1.0, 0.0, 0, 3.0, 1.0),
)


def build(
    vocab_size: int, dtype: torch.dtype = torch.float32, repeats: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor, SlotState]:
    """(logits [N, V], slots int32 [N], CPU state): N = repeats * (rows of PARAMETERS + 1 of padding), in shuffled slots."""
    generator = np.random.default_rng(seed)
    parameters = PARAMETERS * repeats
    state = SlotState(len(parameters) + 3, 4)
    updates = state.updates()
    slots = generator.permutation(len(parameters) + 3)[: len(parameters)].astype(np.int32)
    columns = list(zip(*parameters, strict=True))
    for name, values in zip(("temperature", "top_k", "top_p", "min_p"), columns, strict=False):
        updates.set(name, slots, values)
    updates.set("top_n_sigma", slots, columns[6])
    position = generator.integers(0, 5000, len(parameters))
    updates.set("position", slots, position)
    updates.set("min_position", slots, np.where(columns[4], position + 1 + np.array(columns[4]), 0))
    set_seed(updates, slots, generator.integers(0, 2**63, len(parameters)))
    logits = torch.from_numpy(generator.standard_normal((len(parameters), vocab_size)).astype(np.float32))
    logits = logits * torch.tensor(columns[5])[:, None]
    for slot, best in zip(slots, logits.argmax(dim=1).tolist(), strict=True):
        set_stop_ids(updates, int(slot), [best, 3])
    state.apply(updates)
    logits = torch.cat([logits, torch.randn(repeats, vocab_size)]).to(dtype)
    return logits, torch.from_numpy(np.append(slots, [-1] * repeats).astype(np.int32)), state
