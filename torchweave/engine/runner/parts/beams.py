"""Beam searches on the device: the blocks that forked beams continue are copied."""

from __future__ import annotations

from torchweave.engine.kv_cache.block_copy import copy_blocks
from torchweave.engine.runner.parts.base import RunnerPart
from torchweave.engine.scheduler.parts.beams import BeamRows
from torchweave.engine.scheduler.step import Step


class BeamsPart(RunnerPart):
    """Copies blocks before the step."""

    name = "beams"
    needs_logits = False

    def before(self, payload: BeamRows, step: Step) -> None:
        if payload.copies is not None:
            copy_blocks(self.device.caches, *payload.copies)


PART = BeamsPart
