"""Recurrent states on the device: copies from and to snapshots."""

from __future__ import annotations

from torchweave.engine.kv_cache.block_copy import copy_states
from torchweave.engine.runner.parts.base import Device, RunnerPart, StepOutput
from torchweave.engine.scheduler.parts.states import StateCopies
from torchweave.engine.scheduler.step import Step


class StatesPart(RunnerPart):
    """Copies rows of the recurrent states before and after the step."""

    name = "states"
    needs_logits = False

    @classmethod
    def needed(cls, device: Device) -> bool:
        return bool(device.recurrent_states)

    def before(self, payload: StateCopies, step: Step) -> None:
        if payload.restores is not None:
            copy_states(self.device.recurrent_states, *payload.restores)

    def after(self, payload: StateCopies, output: StepOutput) -> None:
        if payload.saves is not None:
            copy_states(self.device.recurrent_states, *payload.saves)


PART = StatesPart
