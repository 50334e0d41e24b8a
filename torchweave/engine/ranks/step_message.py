"""A step as the leader sends it to the other ranks: once, small, the same bytes for all.

A decode step says how many rows it has and what changed; its slots are on the device of every rank already. Everything else of a
step is sent as it is.
"""

from __future__ import annotations

import pickle

import numpy as np

from torchweave.engine.scheduler.step import Step

_NO_STARTS = np.empty(0, np.int64)


def encode(step: Step) -> bytes:
    """The bytes of a step. A decode step leaves out log-probabilities, which one rank tells."""
    if step.chunks or step.logits_processors is not None or step.prompt_targets is not None:
        return pickle.dumps(step, 5)
    updates = None if step.updates is None else tuple((part.dtype.char, part.tobytes()) for part in step.updates)
    return pickle.dumps((step.index, step.num_rows, step.max_seq_len, updates, step.copies), 5)


def decode(message: bytes) -> Step:
    """The step of a message, as far as a runner needs it."""
    decoded = pickle.loads(message)
    if isinstance(decoded, Step):
        return decoded
    index, num_rows, max_seq_len, updates, copies = decoded
    slots, emits = np.zeros(num_rows, np.int32), np.ones(num_rows, bool)
    changed = None
    if updates is not None:
        (kind, places), (other, values) = updates
        changed = np.frombuffer(places, kind), np.frombuffer(values, other)
    return Step(index, slots, _NO_STARTS, (), emits, changed, max_seq_len, copies=copies)
