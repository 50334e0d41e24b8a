"""Logits processors on the device: their rows are resampled after the step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchweave.engine.runner.parts.base import Device, RunnerPart, StepOutput
from torchweave.engine.sampling.in_step_processors import InStepProcessors
from torchweave.engine.scheduler.parts.processors import LogitsProcessorRows
from torchweave.ops.kernels.sampling.layout import NUM_FIELDS, ROW, SLOT
from torchweave.ops.sampling.logits_processors import LogitsProcessorState, resample
from torchweave.ops.slot_state import SlotState


class Resampler:
    """Owns the device state of logits processors; runs on the current stream without waiting."""

    def __init__(self, state: SlotState, in_step: InStepProcessors | None = None) -> None:
        self._state = state
        self._in_step = in_step
        self._processor_state: LogitsProcessorState | None = None

    def __call__(self, logits_processors: LogitsProcessorRows, logits: Tensor, tokens: Tensor, out: Tensor) -> None:
        """Resample the rows of `logits_processors`. logits [N, V]; tokens and out, int32 [N], hold the step's results."""
        if self._processor_state is None:
            self._processor_state = LogitsProcessorState(logits.shape[1], self._state.device)
        for join in logits_processors.joins:
            self._processor_state.join(join)
        num_rows = logits_processors.rows.shape[1]
        if num_rows:
            rows, masks = self._on_device(logits_processors)
            replaced = self._replaced(logits_processors, logits, rows)
            resample(logits, rows, masks, self._state, self._processor_state, tokens, out, replaced)

    def _replaced(self, logits_processors: LogitsProcessorRows, logits: Tensor, rows: Tensor) -> Tensor | None:
        """Logits float32 [K, V] of the rows after users' own logits processors; None without them."""
        biases = logits_processors.biases
        if self._in_step is None and biases is None:
            return None
        replaced = logits[rows[ROW].long()].float()
        if self._in_step is not None:
            replaced = self._in_step(replaced, rows[SLOT])
        if biases is not None:
            index, numbers = (torch.from_numpy(each).to(logits.device) for each in biases)
            replaced[index] += numbers
        return replaced

    def _on_device(self, logits_processors: LogitsProcessorRows) -> tuple[Tensor, Tensor | None]:
        """Copy rows and masks to the device together."""
        size, device = logits_processors.rows.size, self._state.device
        total = size + (0 if logits_processors.masks is None else logits_processors.masks.size)
        # A copy from pinned memory is asynchronous; torch keeps the memory until the copy has ended.
        flat = torch.empty(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        flat.numpy()[:size] = logits_processors.rows.reshape(-1)
        if logits_processors.masks is not None:
            flat.numpy()[size:] = logits_processors.masks.reshape(-1)
        flat = flat.to(device, non_blocking=True)
        rows = flat[:size].view(NUM_FIELDS, -1)
        return rows, None if logits_processors.masks is None else flat[size:].view(np.shape(logits_processors.masks))


class ProcessorsPart(RunnerPart):
    """Resamples rows from their processed logits."""

    name = "processors"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        in_step = getattr(device.parts.get("device_processors"), "processors", None)
        self._resample = Resampler(device.state, in_step)

    def after(self, payload: LogitsProcessorRows, output: StepOutput) -> None:
        self._resample(payload.at_entries(output.step.query_len), output.logits, output.tokens, output.out)


PART = ProcessorsPart
