"""One rank's end of a pipeline: hidden states come from the stage before and go to the one behind, tokens from the last to all.

A hand-over is a broadcast in a group of two: unlike `send` and `recv`, which make their connections when they are first used, it
runs over a connection that is there, and is recorded into CUDA graphs like any other collective. It runs on the current stream.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torchweave.distributed.process_groups import NEXT_STAGE, PIPELINE, PREVIOUS_STAGE, ProcessGroups


class PipelineTransport:
    """The hand-overs of one rank. Every rank makes its calls in the same order: receive, send, share.

    Args:
        process_groups: of several stages.
    """

    def __init__(self, process_groups: ProcessGroups) -> None:
        self.process_groups = process_groups
        self.is_first = process_groups.stage == 0
        self.is_last = process_groups.stage == process_groups.pipeline_parallel_size - 1

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What the stage before hands over, in a new tensor; waits for it."""
        found = torch.empty(shape, dtype=dtype, device=self.process_groups.device)
        earlier = self.process_groups.rank_of_stage(self.process_groups.stage - 1)
        dist.broadcast(found, src=earlier, group=self.process_groups.groups[PREVIOUS_STAGE])
        return found

    def send(self, x: Tensor) -> None:
        """Hand x over to the stage behind, which may wait for that."""
        dist.broadcast(x.contiguous(), src=self.process_groups.rank, group=self.process_groups.groups[NEXT_STAGE])

    def broadcast_from_last(self, x: Tensor) -> None:
        """Let all stages have the x (contiguous) of the last one: written in place elsewhere."""
        last = self.process_groups.rank_of_stage(self.process_groups.pipeline_parallel_size - 1)
        dist.broadcast(x, src=last, group=self.process_groups.groups[PIPELINE])
