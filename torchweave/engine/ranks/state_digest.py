"""What a rank has come to, in a few bytes: the steps that it carried out in their order, and the state that they left."""

from __future__ import annotations

import zlib

from torchweave.ops.slot_state import SlotState


class StateDigest:
    """Counts steps and sums up their messages.

    Args:
        state: the slots of the rank.
        enabled: it is asked for (`torch_compile_config.debug`); else nothing is counted.
    """

    def __init__(self, state: SlotState, enabled: bool) -> None:
        self.enabled = enabled
        self._state = state
        self._steps = 0
        self._sum = 0

    def add(self, message: bytes) -> None:
        """The next step."""
        if self.enabled:
            self._steps += 1
            self._sum = zlib.crc32(message, self._sum)

    def take(self) -> bytes:
        """Steps so far, the sum of their messages, and that of the slots: tokens, positions, block tables, seeds."""
        state = zlib.crc32(self._state.arena.cpu().numpy().tobytes())
        return f"{self._steps} steps {self._sum:08x}, slots {state:08x}".encode()
