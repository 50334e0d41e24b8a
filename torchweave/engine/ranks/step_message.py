"""Messages of steps and images from the leader to the other ranks, and digests that compare the ranks' states.

A rank that follows gets a step whole, by one rule, with two exceptions: payloads that are `leader_only`, and of a step without
chunks the fields with an entry a row. Every rank's device has those rows, so their number is enough.
"""

from __future__ import annotations

import io
import pickle
import zlib
from dataclasses import fields
from typing import Any

import numpy as np

from torchweave.engine.scheduler.step import ROWS, Step
from torchweave.images import ImageInput
from torchweave.ops.slot_state import SlotState

_ROW_FIELDS = frozenset(field.name for field in fields(Step) if field.metadata == ROWS)


class _StepPickler(pickle.Pickler):
    """Writes arrays in 7 bytes beside their contents; numpy's own form takes 130."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, np.ndarray):
            return None
        shape = obj.shape if obj.ndim != 1 else ()
        return (obj.tobytes(), obj.dtype.char, *shape)


class _StepUnpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> np.ndarray:
        data, dtype, *shape = pid
        array = np.frombuffer(data, dtype).copy()  # writable, as on the leader
        return array.reshape(shape) if shape else array


def encode(step: Step) -> bytes:
    """Encode a step, with the same bytes for all ranks."""
    values = vars(step) | {"parts": {name: part for name, part in step.parts.items() if not part.leader_only}}
    if not step.chunks:
        values |= dict.fromkeys(_ROW_FIELDS, None) | {"slots": step.num_rows}
    file = io.BytesIO()
    _StepPickler(file, 5).dump(tuple(values.values()))
    return file.getvalue()


def decode(message: bytes) -> Step:
    """Decode a step; the rows of one without chunks are the device's, and all of them emit."""
    index, slots, starts, chunks, emits, *others = _StepUnpickler(io.BytesIO(message)).load()
    if not chunks:
        slots, starts, emits = np.zeros(slots, np.int32), np.zeros(slots, np.int64), np.ones(slots, bool)
    return Step(index, slots, starts, chunks, emits, *others)


def encode_image(image: ImageInput, rows: np.ndarray) -> bytes:
    """Encode an image that each rank writes to `rows` of its pool."""
    return pickle.dumps((dict(image.tensors), image.index, image.digest, rows), 5)


def decode_image(message: bytes) -> tuple[ImageInput, np.ndarray]:
    """Decode an image and its rows."""
    tensors, index, digest, rows = pickle.loads(message)
    return ImageInput(tensors, index, digest), rows


class StateDigest:
    """Digest of a rank's steps and of the resulting slot state.

    Args:
        enabled: `torch_compile_config.debug`; otherwise steps are not counted.
    """

    def __init__(self, state: SlotState, enabled: bool) -> None:
        self.enabled = enabled
        self._state = state
        self._num_steps = 0
        self._checksum = 0

    def add(self, message: bytes) -> None:
        """Add the message of the next step."""
        if self.enabled:
            self._num_steps += 1
            self._checksum = zlib.crc32(message, self._checksum)

    def take(self) -> bytes:
        """Number of steps, checksum of their messages, and checksum of the slots: tokens, positions, block tables, seeds."""
        state = zlib.crc32(self._state.arena.cpu().numpy().tobytes())
        return f"{self._num_steps} steps {self._checksum:08x}, slots {state:08x}".encode()
