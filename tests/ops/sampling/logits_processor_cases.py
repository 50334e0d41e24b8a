"""Rows with logits processors in every combination, for the kernels in the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.ops.step_cases import set_seed
from torchweave.ops.kernels.sampling import layout
from torchweave.ops.sampling.logits_processors import LogitsProcessorState, LogitsStateInit
from torchweave.ops.slot_state import SlotState

NUM_SLOTS = 11


@dataclass
class Case:
    logits: Tensor
    rows: Tensor
    masks: Tensor
    state: SlotState
    joins: list[LogitsStateInit]
    tokens: Tensor
    out: Tensor

    def processor_state(self, device: str = "cpu") -> LogitsProcessorState:
        processor_state = LogitsProcessorState(self.logits.shape[1], torch.device(device))
        for join in self.joins:
            processor_state.join(join)
        return processor_state


def build(vocab_size: int, seed: int, dtype: torch.dtype = torch.float32) -> Case:
    """A step of 12 rows whose slots have advanced; 8 of them, one with each set of flags, are to be drawn again."""
    generator = np.random.default_rng(seed)
    state = SlotState(NUM_SLOTS, 4)
    updates = state.updates()
    every = np.arange(NUM_SLOTS)
    updates.set("position", every, generator.integers(1, 200, NUM_SLOTS))
    updates.set("min_position", every, generator.integers(1, 200, NUM_SLOTS))
    updates.set("temperature", every, generator.choice([0.0, 0.9], NUM_SLOTS))
    updates.set("top_k", every, generator.choice([0, 5], NUM_SLOTS))
    updates.set("stop_ids", every, generator.integers(0, vocab_size, (NUM_SLOTS, 8)))
    set_seed(updates, every, generator.integers(0, 2**60, NUM_SLOTS))
    state.apply(updates)
    slots = generator.permutation(NUM_SLOTS)[:8].astype(np.int32)
    rows = np.zeros((layout.NUM_FIELDS, 8), np.int32)
    masks = generator.integers(-(2**31), 2**31, (8, -(-vocab_size // 32))).astype(np.int32)
    processor_state = generator.permutation(12)[:8]
    joins = []
    for i, slot in enumerate(slots):
        masked = i if generator.random() < 0.5 else -1
        rows[:5, i] = (generator.permutation(12)[0], slot, processor_state[i], i, masked)
        at = int(state.host_arrays["position"][slot])
        joins.append(_join(generator, int(processor_state[i]), i, at, vocab_size))
    rows[0] = generator.permutation(12)[:8]
    rows[5:] = (
        generator.uniform([[-2.0], [-2.0], [0.5]], [[2.0], [2.0], [2.0]], (3, 8)).astype(np.float32).view(np.int32)
    )
    logits = torch.from_numpy(generator.standard_normal((12, vocab_size)).astype(np.float32) * 3).to(dtype)
    tokens, out = (torch.from_numpy(generator.integers(0, vocab_size, 12).astype(np.int32)) for _ in range(2))
    return Case(logits, torch.from_numpy(rows), torch.from_numpy(masks), state, joins, tokens, out)


def _join(generator: np.random.Generator, place: int, flags: int, at: int, vocab_size: int) -> LogitsStateInit:
    counts = bias = words = recent_tokens = None
    if flags & layout.HAS_COUNTS:
        ids = generator.permutation(vocab_size)[: vocab_size // 2].astype(np.int32)
        counts = (
            ids,
            (generator.integers(0, 4, len(ids)) + layout.IN_PROMPT * generator.integers(0, 2, len(ids))).astype(
                np.int32
            ),
        )
    if flags & layout.HAS_BIAS:
        ids = generator.permutation(vocab_size)[: vocab_size // 3].astype(np.int32)
        bias = float(generator.choice([0.0, -np.inf])), ids, generator.uniform(-3, 3, len(ids)).astype(np.float32)
    if flags & layout.HAS_BAD_WORDS:
        recent_tokens = generator.integers(0, 3, layout.MAX_BAD_WORD_TOKENS).astype(np.int32)
        words = np.full((20, layout.MAX_BAD_WORD_TOKENS), -1, np.int32)
        for word in words:
            length = int(generator.integers(1, 5))
            word[0] = generator.integers(0, vocab_size)
            word[1:length] = recent_tokens[(at - np.arange(1, length)) % layout.MAX_BAD_WORD_TOKENS]
            if generator.random() < 0.5:
                word[length - 1] = 4  # stands nowhere in the tail
    return LogitsStateInit(place, counts, bias, words, recent_tokens)
