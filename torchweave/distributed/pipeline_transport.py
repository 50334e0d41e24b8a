"""One rank's end of a pipeline: hidden states come from the stage before and go to the one behind, tokens from the last to all.

A hand-over is a broadcast in a group of two: unlike `send` and `recv`, which make their connections when they are first used, it
runs over a connection that is there, and is recorded into CUDA graphs like any other collective. It runs on the current stream.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torchweave.distributed.process_groups import BEFORE, BEHIND, PIPELINE, World


class Pipeline:
    """The hand-overs of one rank. Every rank makes its calls in the same order: receive, send, share.

    Args:
        world: of several stages.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_first = world.stage == 0
        self.is_last = world.stage == world.pipeline_parallel_size - 1

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What the stage before hands over, in a new tensor; waits for it."""
        found = torch.empty(shape, dtype=dtype, device=self.world.device)
        earlier = self.world.rank_of_stage(self.world.stage - 1)
        dist.broadcast(found, src=earlier, group=self.world.groups[BEFORE])
        return found

    def send(self, x: Tensor) -> None:
        """Hand x over to the stage behind, which may wait for that."""
        dist.broadcast(x.contiguous(), src=self.world.rank, group=self.world.groups[BEHIND])

    def share(self, x: Tensor) -> None:
        """Let all stages have the x (contiguous) of the last one: written in place elsewhere."""
        last = self.world.rank_of_stage(self.world.pipeline_parallel_size - 1)
        dist.broadcast(x, src=last, group=self.world.groups[PIPELINE])
