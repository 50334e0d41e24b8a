"""A part that carries one number a row and returns it: the device's file. Over several ranks it returns the sum of all."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from tests.engine.step_parts.number_host import Numbers
from torchweave.engine.runner.parts.base import RunnerPart, StepOutput


class NumberPart(RunnerPart):
    """Uploads the numbers and copies them back."""

    name = "number"
    needs_logits = False

    def after(self, payload: Numbers, output: StepOutput) -> Tensor:
        numbers = self.device.upload(payload.numbers)
        if dist.is_initialized():
            dist.all_reduce(numbers)
        return self.device.on_host([numbers])[0]

    def collect(self, pending: Tensor) -> list[float]:
        return pending.tolist()


PART = NumberPart
