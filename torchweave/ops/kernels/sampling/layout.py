"""Constants and device tensors that the sampling kernels share with their host code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

LANES = 64
"""Distance of the vocabulary indices that share a Philox call; see `torchweave.ops.sampling.sample`."""

MAX_STOP_IDS = 8
"""Stop ids per slot that the device checks; the host checks the rest of a request's stop ids."""

# Fields of a row's record, and bits of the field FLAGS.
ROW, SLOT, STATE_ROW, FLAGS, MASK, PRESENCE, FREQUENCY, REPETITION = range(8)
NUM_FIELDS = 8
HAS_COUNTS, HAS_BIAS, HAS_BAD_WORDS = 1, 2, 4

IN_PROMPT = 1 << 30
"""Flag added to a token's count if the prompt contains it; the low bits count its occurrences in the answer."""

BAD_WORD_LOGIT = -1e30
"""Logit of a token that bad words exclude. Not -inf: a grammar that allows only this token still selects it."""

INVALID_TOKEN = -(2**31) + 1
"""Written instead of a token for a row whose largest logit is not finite: NaN, infinity, or -infinity alone."""

MAX_BAD_WORD_TOKENS = 32
"""Largest number of tokens of a bad word, and of the answer's last tokens that are compared with it."""


class SlotTensors(Protocol):
    """Parts of `torchweave.ops.slot_state.SlotState` that the kernels read: a field of `torchweave.ops.slot_fields` lies at
    `INDEX[name] * field_stride` of the arena, and is a view too."""

    arena: Tensor
    field_stride: int
    position: Tensor
    min_position: Tensor
    stop_ids: Tensor


class LogitsProcessorTensors(Protocol):
    """Parts of `torchweave.ops.sampling.logits_processors.LogitsProcessorState` that the kernels read and update."""

    vocab_size: int
    counts: Tensor
    bias: Tensor
    words: Tensor
    recent_tokens: Tensor


@dataclass(frozen=True)
class DraftRows:
    """Views of `torchweave.ops.speculation.DraftBuffers` for the rows of one step, and its number of tokens a row, Q."""

    query_len: int
    drafts: Tensor
    num_drafts: Tensor
    matches: Tensor
    query_start: Tensor
    logits_index: Tensor
    entries: Tensor
    tokens: Tensor
    out: Tensor
    model_tokens: Tensor
    model_entries: Tensor
    model_slots: Tensor
