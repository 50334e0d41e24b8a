"""The parts of a decode step with drafts around the model: propose and feed drafts, then sample and keep tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchweave.compiler.runtime.forward import BoundaryHandler, Forward
from torchweave.config import Plan
from torchweave.engine.runner.step_buffers import StepBuffers
from torchweave.ops.attention.op import LayerKVCache, with_layer_offset
from torchweave.ops.attention.sparse import read_vectors, write_vectors
from torchweave.ops.sampling.sample import sample
from torchweave.ops.slot_state import SlotState, StepInputs
from torchweave.ops.speculation import (
    DraftBuffers,
    DraftOptions,
    DraftRows,
    accept,
    catch_up,
    feed_draft,
    fill_rope_offsets,
    finish_catch_up,
    next_tokens,
    note_computed,
    prepare_drafts,
    propose,
)

_DUMMY_TOKENS = (1, 16, 256)
"""Tokens of a row: forwards of few tokens, of a prompt's, and of the longest step, each of which may have kernels of its own."""
MakeBoundary = Callable[[Tensor, Tensor, StepInputs, bool], BoundaryHandler]
"""The started boundary of a forward: `(slots, query_start, inputs, decode_only)`."""


@dataclass(frozen=True)
class DraftModel:
    """A compiled model that proposes drafts, or a draft head.

    Attributes:
        forward: as that of the model; a head's takes the hidden state of each token as well and returns (logits, hidden states).
        first_layer: index of its first layer among the caches, behind those of the model.
        vocab_size: of the model; the draft model's further logits are ignored.
        is_head: whether it is a head, whose last layer among the caches has the model's hidden states.
        image_token_id: what it reads in place of ids that name rows of images; None: the model takes no images.
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


class DraftStep:
    """Owns the device tensors of steps with drafts.

    Args:
        inputs: of the steps; the draft model's forwards use them before the step does.
        boundary: makes the boundaries of the draft model's forwards.
        min_size: least number of tokens and rows of a forward.
        model: the draft model; None: prompt lookup.
        hidden_states: of the model, if `model` is a head.

    Attributes:
        buffers: for up to `max_drafting_rows` rows.
    """

    def __init__(
        self,
        plan: Plan,
        state: SlotState,
        inputs: StepBuffers,
        boundary: MakeBoundary,
        min_size: int = 1,
        model: DraftModel | None = None,
        hidden_states: HiddenStateCache | None = None,
    ) -> None:
        options = plan.config.speculative_config
        self._min_size = min_size
        self.buffers = DraftBuffers(
            max(plan.max_drafting_rows, min_size),
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
        self._state, self._model, self._hidden_states = state, model, hidden_states
        self._inputs, self._boundary = inputs, boundary
        self._block_size, self._max_num_tokens = plan.block_size, plan.max_num_tokens

    def begin(self, slots: Tensor, views: DraftRows, inputs: StepInputs) -> None:
        """Propose drafts, and fill the inputs of the model. slots int32 [R]."""
        if self._model is None:
            propose(self._state, slots, self.buffers.options, views)
        else:
            self._propose_by_model(self._model, slots, views)
        prepare_drafts(self._state, slots, self.buffers, views, inputs, self._block_size)

    def rope_offsets(self, slots: Tensor, views: DraftRows, inputs: StepInputs) -> tuple[Tensor, ...]:
        """Further inputs of the model beside `inputs`, after `begin`; see `StepBuffers.rope_offsets`."""
        rope_offsets = self._inputs.rope_offsets(inputs.ids.numel())
        for offsets in rope_offsets:
            fill_rope_offsets(self._state, slots, views.query_start, offsets)
        return rope_offsets

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
                boundary = self._boundary(views.model_slots, self._inputs.rows[: rows + 1], inputs, True)
                logits, hidden = model(boundary, inputs, row_index, hidden)

    def _catch_up(self, model: DraftModel, slots: Tensor, views: DraftRows, most: int) -> tuple[Tensor, Tensor | None]:
        """The draft model's results for each row's last token, after up to `most` tokens that it lacks."""
        rows = slots.numel()
        inputs = self._inputs.inputs(rows, rows * most)
        catch_up(self._state, slots, self.buffers, views, inputs, self._block_size)
        if slots.is_cpu:  # the host knows the number of tokens
            inputs = self._inputs.inputs(rows, max(int(views.query_start[-1]), self._min_size))
        boundary = self._boundary(slots, views.query_start, inputs, False)
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

    def note_mixed(self, slots: Tensor, query_start: Tensor, inputs: StepInputs) -> None:
        """Enter what `run_mixed` will compute into the slots, after `prepare` and before `advance`."""
        if self._model is not None:
            note_computed(self._state, slots, query_start, inputs.positions)

    def run_mixed(
        self, boundary: BoundaryHandler, slots: Tensor, query_start: Tensor, inputs: StepInputs, logits_index: Tensor
    ) -> None:
        """Run the draft model over the tokens of a step with prompts, after `advance`. Overwrites `inputs.ids`."""
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
