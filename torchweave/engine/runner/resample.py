"""The device's side of rows whose logits are changed: behind the step, they are drawn again."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchweave.engine.scheduler.step import LogitsProcessorRows
from torchweave.ops.sampling.logits_processors import NUM_FIELDS, LogitsProcessorState, resample
from torchweave.ops.slot_state import SlotState


class Resampler:
    """Owns the places; everything runs in the order of the current stream and waits for nothing."""

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self._adjust_state: LogitsProcessorState | None = None

    def __call__(self, logits_processors: LogitsProcessorRows, logits: Tensor, tokens: Tensor, out: Tensor) -> None:
        """Draw the rows of `logits_processors` again. logits [N, V]; tokens and out int32 [N], as the step left them."""
        if self._adjust_state is None:
            self._adjust_state = LogitsProcessorState(logits.shape[1], self._state.device)
        for join in logits_processors.joins:
            self._adjust_state.join(join)
        num_rows = logits_processors.rows.shape[1]
        if num_rows:
            rows, masks = self._on_device(logits_processors)
            resample(logits, rows, masks, self._state, self._adjust_state, tokens, out)

    def _on_device(self, logits_processors: LogitsProcessorRows) -> tuple[Tensor, Tensor | None]:
        """Records and masks in one copy."""
        size, device = logits_processors.rows.size, self._state.device
        total = size + (0 if logits_processors.masks is None else logits_processors.masks.size)
        # From pinned memory a copy does not wait; torch keeps it until the copy is done.
        flat = torch.empty(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        flat.numpy()[:size] = logits_processors.rows.reshape(-1)
        if logits_processors.masks is not None:
            flat.numpy()[size:] = logits_processors.masks.reshape(-1)
        flat = flat.to(device, non_blocking=True)
        rows = flat[:size].view(NUM_FIELDS, -1)
        return rows, None if logits_processors.masks is None else flat[size:].view(np.shape(logits_processors.masks))
