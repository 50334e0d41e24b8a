"""Log-probabilities of prompt tokens on the device."""

from __future__ import annotations

from torch import Tensor

from torchweave.engine.runner.parts.base import RunnerPart, StepOutput
from torchweave.engine.runner.parts.logprobs import Pending, to_step_logprobs
from torchweave.engine.scheduler.parts.prompt_logprobs import PromptTargets
from torchweave.engine.scheduler.step import StepLogprobs
from torchweave.ops.sampling.sample import logprobs


class PromptLogprobsPart(RunnerPart):
    """Reads the logits at the position before each target."""

    name = "prompt_logprobs"

    def further_logits(self, payload: PromptTargets) -> Tensor:
        return self.device.upload(payload.index)

    def after(self, payload: PromptTargets, output: StepOutput) -> Pending:
        targets = self.device.upload(payload.targets)
        computed = logprobs(output.further_logits[self.name], targets, payload.most)
        return payload.index, self.device.on_host(computed)

    def collect(self, pending: Pending) -> StepLogprobs:
        return to_step_logprobs(*pending)


PART = PromptLogprobsPart
