"""Users' logits processors in Python: what they add to the logits of each request's next token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.engine.sampling.logits_processors import HostLogitsProcessor, Processor, of_form

_log = logging.getLogger(__name__)


class HostBiases:
    """The processors of an engine, the requests that they take, by slot, and the numbers for their next tokens.

    Attributes:
        requests: what each processor keeps of the request in a slot, None of one that it does not take.
        pending: float32 `[V]` by slot, for the next token; missing until the token before it is known.
    """

    def __init__(self, classes: Sequence[Processor], vocab_size: int) -> None:
        self._processors: list[HostLogitsProcessor] = [
            each(vocab_size) for each in of_form(classes, HostLogitsProcessor)
        ]
        self._vocab_size = vocab_size
        self.requests: dict[int, tuple[Any, ...]] = {}
        self.pending: dict[int, np.ndarray] = {}

    def rejection_reason(self, request: InferenceRequest) -> str:
        """Why a request is refused: what `HostLogitsProcessor.start` says, or that beams are not supported; empty if it is not."""
        try:
            states = self.keep(request.sampling, np.asarray(request.input_ids, np.int32))
        except ValueError as error:
            return str(error)
        if states is not None and request.sampling.beam_width > 1:
            return "A beam search does not support logits processors; leave beam_width or their arguments out."
        return ""

    def keep(self, params: SamplingParams, prompt: np.ndarray) -> tuple[Any, ...] | None:
        """What each processor keeps of a request; None if none takes it."""
        states = tuple(each.start(params, prompt) for each in self._processors)
        return states if any(each is not None for each in states) else None

    def compute(self, slots: Sequence[int], outputs: Sequence[np.ndarray]) -> dict[int, str]:
        """Compute `pending` of slots, whose requests have generated `outputs`; returns the errors of those that failed."""
        biases = np.zeros((len(slots), self._vocab_size), np.float32)
        for number, processor in enumerate(self._processors):
            rows = [row for row, slot in enumerate(slots) if self.requests[slot][number] is not None]
            if not rows:
                continue
            states, own = (
                [self.requests[slots[row]][number] for row in rows],
                np.zeros((len(rows), self._vocab_size), np.float32),
            )
            try:
                processor.bias(states, [outputs[row] for row in rows], own)
            except Exception as error:  # a user's own code
                _log.exception("%s failed", type(processor).__name__)
                why = f"The logits processor {type(processor).__name__} failed ({type(error).__name__}: {error})."
                return dict.fromkeys(slots, why)
            biases[rows] += own
        self.pending.update(zip(slots, biases, strict=True))
        return {}

    def release(self, slot: int) -> None:
        """Forget the request of a slot."""
        self.requests.pop(slot, None)
        self.pending.pop(slot, None)
