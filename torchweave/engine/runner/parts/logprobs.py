"""Log-probabilities of sampled tokens on the device."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from torchweave.engine.runner.parts.base import RunnerPart, StepOutput
from torchweave.engine.scheduler.parts.logprobs import LogprobRows
from torchweave.engine.scheduler.step import StepLogprobs
from torchweave.ops.sampling.sample import logprobs

Pending = tuple[np.ndarray, tuple[Tensor, ...]]
"""Rows, and tensors on the host that are filled when the step ends."""


class LogprobsPart(RunnerPart):
    """Computes them from the logits before they are processed."""

    name = "logprobs"

    def after(self, payload: LogprobRows, output: StepOutput) -> Pending:
        index = self.device.upload(payload.rows * output.step.query_len)
        computed = logprobs(output.logits[index], output.tokens[index], payload.most)
        return payload.rows, self.device.on_host(computed)

    def collect(self, pending: Pending) -> StepLogprobs:
        return to_step_logprobs(*pending)


def to_step_logprobs(rows: np.ndarray, tensors: tuple[Tensor, ...]) -> StepLogprobs:
    """Log-probabilities of a step from their rows and tensors on the host."""
    chosen, values, ids, ranks = tensors
    return StepLogprobs(rows, chosen.numpy(), ranks.numpy(), values.numpy(), ids.numpy())


PART = LogprobsPart
