"""The parts of a decode step with drafts around the model: propose and feed drafts, then sample and keep tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweave.config import Plan
from torchweave.ops.sampling.sample import sample
from torchweave.ops.slot_state import SlotState, StepInputs
from torchweave.ops.speculation import DraftBuffers, DraftRows, PromptLookup, accept, prepare_drafts, propose


class DraftStep:
    """Owns the device tensors of steps with drafts.

    Attributes:
        buffers: for up to `max_drafting_rows` rows.
    """

    def __init__(self, plan: Plan, state: SlotState) -> None:
        options = plan.config.speculative_config
        lookup = PromptLookup(
            plan.query_len - 1, options.prompt_lookup_min, options.prompt_lookup_max, options.synthetic_acceptance
        )
        self.buffers = DraftBuffers(plan.max_drafting_rows, lookup, torch.device(plan.device))
        self._state = state
        self._block_size = plan.block_size

    def begin(self, slots: Tensor, views: DraftRows, inputs: StepInputs) -> None:
        """Fill the inputs of the model. slots int32 [R]."""
        propose(self._state, slots, self.buffers.lookup, views)
        prepare_drafts(self._state, slots, self.buffers, views, inputs, self._block_size)

    def end(self, logits: Tensor, slots: Tensor, views: DraftRows) -> None:
        """Sample from logits [R * Q, V] and advance the slots by the tokens that are kept."""
        sample(logits, views.entries, self.buffers.sampled, views.tokens)
        accept(self._state, slots, self.buffers.lookup, views)
