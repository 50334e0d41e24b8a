"""A step on one stage of a pipeline: hidden states come from the stage before, tokens from the last one.

    first stage                last stage
    embedding, layers  ----->  layers, output layer
    tokens             <-----  draw

All stages keep the same slots and get the same steps. The last one draws the tokens and tells them to the others within the same
step, so that the slots of all advance alike and a recorded step is whole on each of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.runtime.cuda_graphs import BoundaryHandler
from torchweave.distributed.process_groups import PipelineTransport, ProcessGroups
from torchweave.engine.runner.resample import Resampler
from torchweave.engine.scheduler.step import LogitsProcessorRows
from torchweave.models.parallel import PipelineStage
from torchweave.ops.sampling.logits_processors import ROW, SLOT
from torchweave.ops.sampling.sample import sample
from torchweave.ops.slot_state import SlotState


class StageForward:
    """The forward of one stage, between its hand-overs: `(boundary, ids[T], positions[T], logits_index[N]) -> logits`.

    The logits of a stage that is not the last one have no columns, `[N, 0]`: another stage has them.

    Args:
        compiled_graph: the model, cut to the stage.
        stage: which.
        process_groups: of all stages.

    Attributes:
        sizes: smallest and largest value that a dynamic size may take.
        pipeline: this rank's end of the pipeline.
    """

    def __init__(self, compiled_graph: CompiledGraph, stage: PipelineStage, process_groups: ProcessGroups) -> None:
        self.sizes = compiled_graph.sizes
        self.pipeline = PipelineTransport(process_groups)
        self._woven = compiled_graph
        self._width, self._dtype = stage.width, stage.dtype

    def __call__(self, boundary: BoundaryHandler, *inputs: Tensor) -> Tensor:
        ids, _, index = inputs
        if not self.pipeline.is_first:
            inputs = (*inputs, self.pipeline.receive((1, ids.shape[0], self._width), self._dtype))
        out = self._woven(boundary, *inputs)
        if self.pipeline.is_last:
            return out
        self.pipeline.send(out)
        return torch.empty((index.shape[0], 0), dtype=self._dtype, device=ids.device)

    def sample_tokens(self, logits: Tensor, slots: Tensor, state: SlotState, tokens: Tensor) -> None:
        """Sample on the last stage, and let all stages have the tokens, int32 [N]."""
        if self.pipeline.is_last:
            sample(logits, slots, state, tokens)
        self.pipeline.broadcast_from_last(tokens)


class StageResampler(Resampler):
    """Rows with changed logits are drawn again on the last stage; the other stages hear what came of it."""

    def __init__(self, state: SlotState, pipeline: PipelineTransport) -> None:
        super().__init__(state)
        self._pipeline = pipeline

    def __call__(self, logits_processors: LogitsProcessorRows, logits: Tensor, tokens: Tensor, out: Tensor) -> None:
        if self._pipeline.is_last:
            super().__call__(logits_processors, logits, tokens, out)
        if not logits_processors.rows.shape[1]:
            return
        self._pipeline.broadcast_from_last(tokens)
        if not self._pipeline.is_last:
            records, _ = self._on_device(replace(logits_processors, masks=None))
            self._state.last_token[records[SLOT].long()] = tokens[records[ROW].long()]
