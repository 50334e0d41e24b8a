"""What a step computes: the model between the ops that fill its inputs and those that sample and advance the slots.

A program is a function of a boundary handler that works on fixed buffers, so it can run at once or be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchweave.compiler.runtime.forward import BoundaryHandler, Forward
from torchweave.config import Plan
from torchweave.engine.runner.parts.base import InStepPart
from torchweave.engine.runner.step_boundary import BEGIN, StepBoundary
from torchweave.engine.runner.step_buffers import StepBuffers
from torchweave.ops.attention.op import AttentionBackend, AttentionMetadata, LayerKVCache
from torchweave.ops.sampling.sample import sample
from torchweave.ops.slot_state import SlotState, StepInputs, advance, prepare, prepare_decode_inputs

Program = Callable[[BoundaryHandler], Tensor]
"""Runs a step and returns its logits."""


class StepPrograms:
    """Makes the programs of decode steps and of steps with prefill rows.

    Args:
        forward: the model, `(boundary, ids[T], positions[T], logits_index[N], ...) -> logits[N, V]`.
        backend: runs attention.
        caches: paged KV cache, by layer.
        recurrent_states: see `ModelRunner`.
        has_logits: whether the model returns logits, as the last pipeline stage does.
    """

    def __init__(
        self,
        plan: Plan,
        forward: Forward,
        backend: AttentionBackend,
        caches: list[LayerKVCache],
        state: SlotState,
        buffers: StepBuffers,
        recurrent_states: Sequence[Tensor],
        has_logits: bool,
    ) -> None:
        self._plan, self._state, self._buffers = plan, state, buffers
        self._forward, self._backend = forward, backend
        self._caches, self._recurrent_states = caches, recurrent_states
        self._has_logits = has_logits
        self._decode: dict[int, tuple[Program, StepBoundary]] = {}
        self._sample, self._reduce, self._keep = sample, None, None
        self.parts: tuple[InStepPart, ...] = ()

    def add_parts(self, parts: Sequence[InStepPart]) -> None:
        """Make these part of all programs; at most one of them samples, reduces or keeps."""
        self.parts = tuple(parts)
        self._sample = next((part.sample for part in parts if part.sample is not None), self._sample)
        self._reduce = next((part.reduce for part in parts if part.reduce is not None), None)
        self._keep = next((part.keep for part in parts if part.keep is not None), None)

    def run_model(self, boundary: BoundaryHandler, inputs: StepInputs, logits_index: Tensor, *others: Tensor) -> Tensor:
        """Logits of a step."""
        result = self._forward(boundary, inputs.ids, inputs.positions, logits_index, *others)
        return result if self._keep is None else self._keep(result, inputs)

    def draft_inputs(self, slots: Tensor, query_start: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """Further inputs of the model in a step with drafts."""
        return tuple(each for part in self.parts for each in part.draft_inputs(slots, query_start, tokens))

    def decode(self, rows: int) -> tuple[Program, StepBoundary]:
        """The decode step of `rows` rows; row i runs the slot at index i of the device's list."""
        if rows in self._decode:
            return self._decode[rows]
        buffers, state, parts = self._buffers, self._state, self.parts
        slots, inputs = state.slots[:rows], buffers.inputs(rows, rows)
        tokens, out, index = buffers.tokens[:rows], buffers.out[:rows], buffers.row_index[:rows]
        emit_all = buffers.emit_all[:rows]
        block_size, sample_tokens, has_logits = self._plan.block_size, self._sample, self._has_logits

        def run(boundary: BoundaryHandler) -> Tensor:
            prepare_decode_inputs(state, slots, inputs, block_size)
            others: Sequence[Tensor] = ()
            if parts:
                others = [each for part in parts for each in part.decode_inputs(slots)]
            boundary(BEGIN, (), {})
            logits = self.run_model(boundary, inputs, index, *others)
            if has_logits:
                sample_tokens(logits, slots, state, tokens)
                advance(tokens, slots, emit_all, state, out)
            return logits

        boundary = self.boundary(slots, buffers.rows[: rows + 1], inputs, self._plan.max_model_len, True)
        self._decode[rows] = run, boundary
        return self._decode[rows]

    def mixed(
        self, rows: int, tokens: int, max_seq_len: int, further_logits: Tensor | None = None
    ) -> tuple[Program, StepBoundary]:
        """The step of `tokens` tokens in `rows` rows, from the packed inputs.

        Args:
            further_logits: indices of further tokens whose logits are returned after those of the rows.
        """
        buffers, state, parts, reduce = self._buffers, self._state, self.parts, self._reduce
        packed = buffers.views(rows, tokens)
        inputs = buffers.inputs(rows, tokens)
        sampled, out, index = buffers.tokens[:rows], buffers.out[:rows], buffers.logits_index[:rows]
        block_size, sample_tokens, has_logits = self._plan.block_size, self._sample, self._has_logits
        own_inputs = list(zip(parts, packed.others.split([part.num_inputs for part in parts]), strict=True))
        lookahead = next((each for part in parts if (each := part.lookahead(tokens)) is not None), None)

        def run(boundary: BoundaryHandler) -> Tensor:
            index.copy_(packed.logits_index)
            others = [each for part, own in own_inputs for each in part.mixed_inputs(own)]
            prepare(state, packed.slots, packed.query_start, packed.ids, packed.positions, inputs, block_size)
            boundary(BEGIN, (), {})
            logits_index = index if further_logits is None else torch.cat([index, further_logits])
            if reduce is not None:
                logits_index = torch.arange(tokens, device=index.device)
            logits = self.run_model(boundary, inputs, logits_index, *others)
            if reduce is not None:
                logits = reduce(logits, packed.query_start)
            if not has_logits:
                return logits
            sample_tokens(logits[:rows], packed.slots, state, sampled)
            for part in parts:
                part.before_advance(packed.slots, packed.query_start, inputs)
            advance(sampled, packed.slots, packed.emit, state, out)
            for part in parts:
                part.after_advance(boundary, packed.slots, packed.query_start, inputs, index)
            return logits

        return run, self.boundary(packed.slots, packed.query_start, inputs, max_seq_len, False, lookahead)

    def boundary(
        self,
        slots: Tensor,
        query_start: Tensor,
        inputs: StepInputs,
        max_seq_len: int,
        decode_only: bool,
        lookahead: Tensor | None = None,
        has_drafts: bool = False,
    ) -> StepBoundary:
        """The boundary of a step, with the metadata of each layer group."""
        num_rows, num_tokens = slots.numel(), inputs.ids.numel()
        group_mapping = inputs.slot_mapping if self._state.num_tables > 1 else [inputs.slot_mapping]
        sizes = (num_rows, num_tokens, decode_only, max_seq_len)
        metas = [
            AttentionMetadata(slots, query_start, inputs.seq_lens, table, mapping, *sizes, lookahead)
            for table, mapping in zip(self._state.tables, group_mapping, strict=True)
        ]
        return StepBoundary(self._backend, self._caches, self._recurrent_states, metas, has_drafts)
