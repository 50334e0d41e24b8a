"""Constants and device tensors that the sampling kernels share with the code on the host."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

LANES = 64
"""Distance of the vocabulary indices that share a Philox call; see `torchweave.ops.sampling.philox`."""

MAX_STOP_IDS = 8
"""Stop ids per slot that the device checks; a request with more has the rest checked by the host."""

# Fields of a row's record, and bits of its FLAGS.
ROW, SLOT, STATE_ROW, FLAGS, MASK, PRESENCE, FREQUENCY, REPETITION = range(8)
NUM_FIELDS = 8
HAS_COUNTS, HAS_BIAS, HAS_BAD_WORDS = 1, 2, 4

IN_PROMPT = 1 << 30
"""Added to a token's count where the prompt holds it; the rest is how often the answer does."""

BAD_WORD_LOGIT = -1e30
"""Logit of a token that bad words bar. Not -inf: a grammar that allows nothing else must still have its way."""

MAX_BAD_WORD_TOKENS = 32
"""Tokens of a barred word at the most; so many tokens of the answer are looked back at."""


class SlotTensors(Protocol):
    """Regions of `torchweave.ops.slot_state.SlotState` that the kernels read."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_lo: Tensor
    seed_hi: Tensor
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
