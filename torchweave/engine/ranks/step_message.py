"""Messages of steps and images from the leader to the other ranks, and digests that compare the ranks' states."""

from __future__ import annotations

import pickle
import zlib

import numpy as np

from torchweave.engine.scheduler.step import Step
from torchweave.images import ImageInput
from torchweave.ops.slot_state import SlotState

_NO_STARTS = np.empty(0, np.int64)


def encode(step: Step) -> bytes:
    """Encode a step, with the same bytes for all ranks.

    A decode step is its number of rows and its updates, since every rank's device has the slots; log-probabilities are left out,
    as only the leader returns them. Other steps are pickled whole.
    """
    if step.chunks or step.logits_processors is not None or step.prompt_targets is not None:
        return pickle.dumps(step, 5)
    updates = None if step.updates is None else tuple((part.dtype.char, part.tobytes()) for part in step.updates)
    numbers = step.index, step.depends_on, step.num_rows, step.query_len, step.catch_up, step.max_seq_len
    return pickle.dumps((*numbers, updates, step.copies, step.state_restores), 5)


def decode(message: bytes) -> Step:
    """Decode a step, as far as a runner needs it."""
    decoded = pickle.loads(message)
    if isinstance(decoded, Step):
        return decoded
    index, depends_on, num_rows, query_len, catch_up, max_seq_len, updates, copies, state_restores = decoded
    slots, emits = np.zeros(num_rows, np.int32), np.ones(num_rows, bool)
    arrays = None
    if updates is not None:
        (index_type, indices), (value_type, values) = updates
        arrays = np.frombuffer(indices, index_type), np.frombuffer(values, value_type)
    drafts = {"query_len": query_len, "catch_up": catch_up}
    moved = {"copies": copies, "state_restores": state_restores}
    return Step(index, slots, _NO_STARTS, (), emits, arrays, max_seq_len, depends_on=depends_on, **moved, **drafts)


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
