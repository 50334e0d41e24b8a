"""Logits processors within steps: they change the logits of all rows before the step samples."""

from __future__ import annotations

from torch import Tensor

from torchweave.engine.runner.parts.base import Device, InStepPart
from torchweave.engine.sampling.in_step_processors import InStepProcessors
from torchweave.engine.sampling.logits_processors import DeviceLogitsProcessor, load_processors, of_form
from torchweave.engine.scheduler.parts.device_processors import ProcessorValues
from torchweave.engine.scheduler.step import Step
from torchweave.ops.sampling.sample import sample
from torchweave.ops.slot_state import SlotState


class DeviceProcessorsPart(InStepPart):
    """Samples from processed logits."""

    name = "device_processors"

    @classmethod
    def needed(cls, device: Device) -> bool:
        return super().needed(device) and bool(of_form(load_processors(device.plan.config), DeviceLogitsProcessor))

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.processors = InStepProcessors(device.plan.config, device.state.max_batch, device.state.device)
        self.sample = self._sample

    def before(self, payload: ProcessorValues, step: Step) -> None:
        slots = self.device.upload(payload.slots).long()
        for values, new in zip(self.processors.values, self.device.upload(payload.values), strict=True):
            values[slots, 0] = new

    def _sample(self, logits: Tensor, slots: Tensor, state: SlotState, out: Tensor) -> None:
        sample(self.processors(logits, slots), slots, state, out)


PART = DeviceProcessorsPart
