"""A step on one pipeline stage: hidden states come from the previous stage, tokens from the last.

    first stage                last stage
    embedding, layers  ----->  layers, output layer
    tokens             <-----  sampling

All stages have the same slots and run the same steps. A stage computes a step while the next one computes the step before it. This
works as long as neither reads a token of the other, so the scheduler divides the decode rows into micro-batches.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.runtime.forward import BoundaryHandler
from torchweave.distributed.process_groups import PipelineTransport, ProcessGroups
from torchweave.models.parallel import PipelineStage
from torchweave.ops.slot_state import SlotState, advance


class StageForward:
    """The forward of one stage with its transfers: `(boundary, ids[T], positions[T], logits_index[N], ...) -> logits`.

    The logits are `[N, 0]` except on the last stage.

    Args:
        compiled_graph: this stage of the model.
        process_groups: of all stages.

    Attributes:
        sizes: least and greatest value of dynamic sizes.
        pipeline: transfers to and from other stages.
        num_stages: of the pipeline.
    """

    def __init__(self, compiled_graph: CompiledGraph, stage: PipelineStage, process_groups: ProcessGroups) -> None:
        self.sizes = compiled_graph.sizes
        self.pipeline = PipelineTransport(process_groups)
        self.num_stages = process_groups.pipeline_parallel_size
        self._compiled_graph = compiled_graph
        self._width, self._dtype = stage.width, stage.dtype

    def __call__(self, boundary: BoundaryHandler, *inputs: Tensor) -> Tensor:
        ids, _, index, *_ = inputs
        if not self.pipeline.is_first:
            inputs = (*inputs, self.pipeline.receive((1, ids.shape[0], self._width), self._dtype))
        out = self._compiled_graph(boundary, *inputs)
        if self.pipeline.is_last:
            return out
        self.pipeline.send(out)
        return torch.empty((index.shape[0], 0), dtype=self._dtype, device=ids.device)


class StageTokens:
    """Sampled tokens of launched steps, on their way from the last stage to the slots of the others.

    The last stage sends the tokens of a step as soon as it has launched it. Another stage receives them before it launches a step
    that reads them, and advances its slots by them then; until then it computes steps of other micro-batches.

    A transfer has the tokens of `max_rows` rows, so that it connects the stages, and builds its kernel, when this is created.

    Args:
        state: of the slots.
        depth: most steps whose tokens are on their way.
    """

    def __init__(self, pipeline: PipelineTransport, state: SlotState, depth: int) -> None:
        self._pipeline = pipeline
        self._state = state
        self._depth = depth
        shape, placement = (depth, state.max_rows), {"dtype": torch.int32, "device": state.device}
        self._tokens = torch.zeros(shape, **placement)
        self._slots = torch.full(shape, -1, **placement)
        self._emits = torch.zeros(shape, **placement)
        self._out = torch.zeros(state.max_rows, **placement)
        self._unsent: deque[dist.Work] = deque()  # on the last stage
        self._unread: deque[int] = deque()  # indices of steps, on the others
        no_rows = torch.empty(0, **placement)
        self.add(0, no_rows, no_rows, no_rows)
        self.receive(0)

    def add(self, step_index: int, tokens: Tensor, slots: Tensor, emits: Tensor) -> None:
        """Add a launched step with its rows' tokens (of the last stage), slots and `Step.emits`, int32 [rows] on the device."""
        place, rows = step_index % self._depth, tokens.numel()
        if self._pipeline.is_last:
            if len(self._unsent) == self._depth:
                self._unsent.popleft().wait()
            self._tokens[place, :rows].copy_(tokens)
            self._unsent.append(self._pipeline.send_tokens(self._tokens[place]))
            return
        self.receive(step_index - self._depth)
        self._slots[place, :rows].copy_(slots)
        self._slots[place, rows:].fill_(-1)
        self._emits[place, :rows].copy_(emits)
        self._unread.append(step_index)

    def receive(self, step_index: int) -> None:
        """Receive the tokens of all steps up to `step_index`, and advance the slots by them."""
        while self._unread and self._unread[0] <= step_index:
            place = self._unread.popleft() % self._depth
            self._pipeline.receive_tokens(self._tokens[place])
            advance(self._tokens[place], self._slots[place], self._emits[place], self._state, self._out)

    def receive_all(self) -> None:
        """Receive the tokens of all launched steps."""
        if self._unread:
            self.receive(self._unread[-1])
