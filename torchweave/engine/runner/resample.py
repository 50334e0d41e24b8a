"""The device's side of rows whose logits are changed: behind the step, they are drawn again."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchweave.engine.scheduler.step import Adjust
from torchweave.ops.sampling.logits_processors import NUM_FIELDS, AdjustState, redraw
from torchweave.ops.slot_state import SlotState


class Redraw:
    """Owns the places; everything runs in the order of the current stream and waits for nothing."""

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self._places: AdjustState | None = None

    def __call__(self, adjust: Adjust, logits: Tensor, tokens: Tensor, out: Tensor) -> None:
        """Draw the rows of `adjust` again. logits [N, V]; tokens and out int32 [N], as the step left them."""
        if self._places is None:
            self._places = AdjustState(logits.shape[1], self._state.device)
        for join in adjust.joins:
            self._places.join(join)
        num_rows = adjust.rows.shape[1]
        if num_rows:
            rows, masks = self._on_device(adjust)
            redraw(logits, rows, masks, self._state, self._places, tokens, out)

    def _on_device(self, adjust: Adjust) -> tuple[Tensor, Tensor | None]:
        """Records and masks in one copy."""
        size, device = adjust.rows.size, self._state.device
        total = size + (0 if adjust.masks is None else adjust.masks.size)
        # From pinned memory a copy does not wait; torch keeps it until the copy is done.
        flat = torch.empty(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        flat.numpy()[:size] = adjust.rows.reshape(-1)
        if adjust.masks is not None:
            flat.numpy()[size:] = adjust.masks.reshape(-1)
        flat = flat.to(device, non_blocking=True)
        rows = flat[:size].view(NUM_FIELDS, -1)
        return rows, None if adjust.masks is None else flat[size:].view(np.shape(adjust.masks))
