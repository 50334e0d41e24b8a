"""A step on one pipeline stage: hidden states come from the previous stage, tokens from the last.

    first stage                last stage
    embedding, layers  ----->  layers, output layer
    tokens             <-----  sampling

All stages have the same slots and run the same steps. The last stage broadcasts the sampled tokens within the step, so that the
slots of all stages advance alike and each stage can record a whole step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.runtime.forward import BoundaryHandler
from torchweave.distributed.process_groups import PipelineTransport, ProcessGroups
from torchweave.engine.runner.resample import Resampler
from torchweave.engine.scheduler.step import LogitsProcessorRows
from torchweave.models.parallel import PipelineStage
from torchweave.ops.kernels.sampling.layout import ROW, SLOT
from torchweave.ops.sampling.sample import sample
from torchweave.ops.slot_state import SlotState


class StageForward:
    """The forward of one stage with its transfers: `(boundary, ids[T], positions[T], logits_index[N]) -> logits`.

    The logits are `[N, 0]` except on the last stage.

    Args:
        compiled_graph: this stage of the model.
        process_groups: of all stages.

    Attributes:
        sizes: least and greatest value of dynamic sizes.
        pipeline: transfers to and from other stages.
    """

    def __init__(self, compiled_graph: CompiledGraph, stage: PipelineStage, process_groups: ProcessGroups) -> None:
        self.sizes = compiled_graph.sizes
        self.pipeline = PipelineTransport(process_groups)
        self._compiled_graph = compiled_graph
        self._width, self._dtype = stage.width, stage.dtype

    def __call__(self, boundary: BoundaryHandler, *inputs: Tensor) -> Tensor:
        ids, _, index = inputs
        if not self.pipeline.is_first:
            inputs = (*inputs, self.pipeline.receive((1, ids.shape[0], self._width), self._dtype))
        out = self._compiled_graph(boundary, *inputs)
        if self.pipeline.is_last:
            return out
        self.pipeline.send(out)
        return torch.empty((index.shape[0], 0), dtype=self._dtype, device=ids.device)

    def sample_tokens(self, logits: Tensor, slots: Tensor, state: SlotState, tokens: Tensor) -> None:
        """Sample on the last stage and broadcast the tokens, int32 [N], to all stages."""
        if self.pipeline.is_last:
            sample(logits, slots, state, tokens)
        self.pipeline.broadcast_from_last(tokens)


class StageResampler(Resampler):
    """Resamples on the last stage and broadcasts the tokens to the other stages."""

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
            self._state.last_token[records[SLOT].long()] = tokens[records[ROW].long()].clamp(min=0)
