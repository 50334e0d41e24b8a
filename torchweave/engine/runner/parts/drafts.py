"""Drafts on the device: a decode step proposes and feeds them, then samples and keeps tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweave.compiler.runtime.forward import BoundaryHandler, Forward
from torchweave.engine.runner.parts.base import Device, InStepPart
from torchweave.engine.runner.step_boundary import BEGIN, COMMIT, StepBoundary
from torchweave.engine.scheduler.parts.drafts import CatchUp
from torchweave.engine.scheduler.step import Step
from torchweave.ops.attention.op import LayerKVCache, with_layer_offset
from torchweave.ops.attention.sparse import read_vectors, write_vectors
from torchweave.ops.sampling.sample import sample
from torchweave.ops.slot_state import StepInputs
from torchweave.ops.speculation import (
    DraftBuffers,
    DraftOptions,
    DraftRows,
    accept,
    catch_up,
    feed_draft,
    finish_catch_up,
    next_tokens,
    note_computed,
    prepare_drafts,
    propose,
)

_DUMMY_TOKENS = (1, 16, 256)
"""Tokens of a row: forwards of few tokens, of a prompt's, and of the longest step, each of which may have kernels of its own."""


@dataclass(frozen=True)
class DraftModel:
    """A compiled model that proposes drafts, or a draft head.

    Attributes:
        forward: as that of the model; a head's takes the hidden state of each token as well and returns (logits, hidden states).
        first_layer: index of its first layer among the caches, after those of the model.
        vocab_size: of the model; the draft model's further logits are ignored.
        is_head: whether it is a head, whose last layer among the caches has the model's hidden states.
        image_token_id: what it reads instead of ids that name rows of images; None: the model takes no images.
    """

    forward: Forward
    first_layer: int
    vocab_size: int
    is_head: bool = False
    image_token_id: int | None = None

    def __call__(
        self, boundary: BoundaryHandler, inputs: StepInputs, logits_index: Tensor, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits `[N, V]`; and a head's hidden states `[N, H]`, from `hidden` `[T, H]`."""

        def offset(op: Any, args: tuple, kwargs: dict) -> None:
            boundary(op, with_layer_offset(op, args, self.first_layer), kwargs)

        if hidden is not None:
            return self.forward(offset, inputs.ids, inputs.positions, logits_index, hidden)
        return self.forward(offset, inputs.ids, inputs.positions, logits_index)[:, : self.vocab_size], None


class HiddenStateCache:
    """The model's hidden states of all tokens in the KV cache, as a layer of it: a draft head reads those that it lacks.

    Args:
        cache: a layer with `LayerSpec.index_keys`.
    """

    def __init__(self, cache: LayerKVCache) -> None:
        self._cache = cache

    def _slots(self, inputs: StepInputs) -> Tensor:
        return inputs.slot_mapping[self._cache.group] if inputs.slot_mapping.ndim == 2 else inputs.slot_mapping

    def write(self, hidden: Tensor, inputs: StepInputs) -> None:
        """Keep `[T, H]` of the tokens of a step."""
        write_vectors(self._cache, hidden, self._slots(inputs))

    def read(self, inputs: StepInputs) -> Tensor:
        """`[T, H]` of the positions of a step."""
        return read_vectors(self._cache, self._slots(inputs))


class DraftsPart(InStepPart):
    """Owns the device tensors of steps with drafts.

    Attributes:
        buffers: for up to `max_drafting_rows` rows.
    """

    name = "drafts"

    @classmethod
    def needed(cls, device: Device) -> bool:
        return device.plan.query_len > 1

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        plan, model = device.plan, device.draft_model
        options = plan.config.speculative_config
        self._min_size = device.min_size
        self.buffers = DraftBuffers(
            max(plan.max_drafting_rows, device.min_size),
            DraftOptions(
                plan.query_len - 1,
                options.prompt_lookup_min,
                options.prompt_lookup_max,
                options.synthetic_acceptance,
                from_model=model is not None,
                token_shift=int(model is not None and model.is_head),
            ),
            torch.device(plan.device),
        )
        self._state, self._inputs = device.state, device.buffers
        self._model: DraftModel | None = model
        self._hidden_states = HiddenStateCache(device.caches[-1]) if model is not None and model.is_head else None
        self.keep = None if self._hidden_states is None else self._keep_hidden
        self._block_size, self._max_num_tokens = plan.block_size, plan.max_num_tokens

    # -- the step ------------------------------------------------------------------------------------------------------

    def _keep_hidden(self, result: tuple[Tensor, Tensor], inputs: StepInputs) -> Tensor:
        """The logits; keeps the hidden states that a draft head takes."""
        assert self._hidden_states is not None
        logits, hidden = result
        self._hidden_states.write(hidden, inputs)
        return logits

    def program(self, rows: int, query_len: int) -> Callable[[BoundaryHandler | None], Tensor]:
        """The decode step of `rows` rows of up to `query_len` tokens; attention takes them as it takes a prompt's.

        Without a boundary, the step is not padded: the host of a CPU knows the number of drafts.
        """
        device, max_model_len = self.device, self.device.plan.max_model_len
        slots, views = self._state.slots[:rows], self.buffers.rows(rows, query_len)
        inputs = self._inputs.inputs(rows, rows * query_len)

        def forward(boundary: BoundaryHandler, step_inputs: StepInputs, logits_index: Tensor) -> Tensor:
            boundary(BEGIN, (), {})
            others = device.draft_inputs(slots, views.query_start, step_inputs.ids.numel())
            return device.run_model(boundary, step_inputs, logits_index, *others)

        def run(boundary: BoundaryHandler | None) -> Tensor:
            self.begin(slots, views, inputs)
            if boundary is not None:
                logits = forward(boundary, inputs, views.logits_index)
            else:
                tokens = max(int(views.query_start[-1]), self._min_size)
                exact = self._inputs.inputs(rows, tokens)
                boundary = device.boundary(slots, views.query_start, exact, max_model_len, False, has_drafts=True)
                logits = forward(boundary, exact, torch.arange(tokens))[views.logits_index.clamp(max=tokens - 1)]
            self.end(logits, slots, views)
            boundary(COMMIT, (self._state.position,), {})
            return logits

        return run

    def boundary(self, rows: int, query_len: int) -> StepBoundary:
        """The boundary of a padded step."""
        views, inputs = self.buffers.rows(rows, query_len), self._inputs.inputs(rows, rows * query_len)
        slots, limit = self._state.slots[:rows], self.device.plan.max_model_len
        return self.device.boundary(slots, views.query_start, inputs, limit, False, has_drafts=True)

    def before(self, payload: CatchUp, step: Step) -> None:
        rows = max(step.num_rows, self._min_size)
        self.catch_up(self._state.slots[:rows], self.buffers.rows(rows, step.query_len), payload.num_tokens)

    def split(self, out: np.ndarray, rows: int, query_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [rows, query_len] and drafts [rows] of a step's output: R * Q tokens, then R numbers of drafts."""
        tokens, num_drafts = np.split(out, [len(out) // (query_len + 1) * query_len])
        return tokens.reshape(-1, query_len)[:rows], num_drafts[:rows]

    # -- around the model ----------------------------------------------------------------------------------------------

    def _forward_boundary(
        self, slots: Tensor, query_start: Tensor, inputs: StepInputs, decode_only: bool
    ) -> StepBoundary:
        """The started boundary of a forward of the draft model."""
        boundary = self.device.boundary(slots, query_start, inputs, self.device.plan.max_model_len, decode_only)
        boundary(BEGIN, (), {})
        return boundary

    def begin(self, slots: Tensor, views: DraftRows, inputs: StepInputs) -> None:
        """Propose drafts, and fill the inputs of the model. slots int32 [R]."""
        if self._model is None:
            propose(self._state, slots, self.buffers.options, views)
        else:
            self._propose_by_model(self._model, slots, views)
        prepare_drafts(self._state, slots, self.buffers, views, inputs, self._block_size)

    def _propose_by_model(self, model: DraftModel, slots: Tensor, views: DraftRows) -> None:
        """Draw K drafts of each row, by a forward over what the draft model lacks and K - 1 decode forwards."""
        rows, most = slots.numel(), views.query_len - 1
        logits, hidden = self._catch_up(model, slots, views, views.query_len)
        inputs, row_index = self._inputs.inputs(rows, rows), self._inputs.row_index[:rows]
        for place in range(1, most + 1):
            entries, tokens = views.model_entries[place - 1], views.model_tokens[place - 1]
            sample(logits, entries, self.buffers.sampled, tokens)
            if place < most:
                shift = self.buffers.options.token_shift
                feed_draft(self._state, slots, views, place, inputs, self._block_size, shift)
                boundary = self._forward_boundary(views.model_slots, self._inputs.rows[: rows + 1], inputs, True)
                logits, hidden = model(boundary, inputs, row_index, hidden)

    def _catch_up(self, model: DraftModel, slots: Tensor, views: DraftRows, most: int) -> tuple[Tensor, Tensor | None]:
        """The draft model's results for each row's last token, after up to `most` tokens that it lacks."""
        rows = slots.numel()
        inputs = self._inputs.inputs(rows, rows * most)
        catch_up(self._state, slots, self.buffers, views, inputs, self._block_size)
        if slots.is_cpu:  # the host knows the number of tokens
            inputs = self._inputs.inputs(rows, max(int(views.query_start[-1]), self._min_size))
        boundary = self._forward_boundary(slots, views.query_start, inputs, False)
        return model(boundary, inputs, views.logits_index[:rows], self._read_hidden(inputs))

    def _read_hidden(self, inputs: StepInputs) -> Tensor | None:
        return None if self._hidden_states is None else self._hidden_states.read(inputs)

    def catch_up(self, slots: Tensor, views: DraftRows, num_tokens: int) -> None:
        """Run the draft model over up to `num_tokens` tokens a row that it lacks, in as many forwards as they need."""
        assert self._model is not None, "prompt lookup lacks no tokens"
        most = max(self._max_num_tokens // slots.numel(), 1)
        for begin in range(0, num_tokens, most):
            self._catch_up(self._model, slots, views, min(most, num_tokens - begin))
            finish_catch_up(self._state, slots, views)

    def run_dummy_catch_up(self, most_rows: int, query_len: int) -> None:
        """Run `catch_up`, which is not recorded, while no slot is in use: its kernels are loaded before the first request."""
        if self._model is None:
            return
        for rows in sorted({self._min_size, max(self._min_size, most_rows)}):
            views = self.buffers.rows(rows, query_len)
            for tokens in _DUMMY_TOKENS:
                self.catch_up(self._state.slots[:rows], views, tokens)

    def before_advance(self, slots: Tensor, query_start: Tensor, inputs: StepInputs) -> None:
        """Enter what `after_advance` will compute into the slots."""
        if self._model is not None:
            note_computed(self._state, slots, query_start, inputs.positions)

    def after_advance(
        self, boundary: BoundaryHandler, slots: Tensor, query_start: Tensor, inputs: StepInputs, logits_index: Tensor
    ) -> None:
        """Run the draft model over the tokens of a step with prompts."""
        if self._model is None:
            return
        if self._model.is_head:
            next_tokens(self._state, slots, query_start, inputs.positions, inputs.ids)
        elif self._model.image_token_id is not None:
            inputs.ids.masked_fill_(inputs.ids >= self._model.vocab_size, self._model.image_token_id)
        self._model(boundary, inputs, logits_index[: self._min_size], self._read_hidden(inputs))

    def end(self, logits: Tensor, slots: Tensor, views: DraftRows) -> None:
        """Sample from logits [R * Q, V] and advance the slots by the tokens that are kept."""
        sample(logits, views.entries, self.buffers.sampled, views.tokens)
        accept(self._state, slots, self.buffers.options, views)


PART = DraftsPart
