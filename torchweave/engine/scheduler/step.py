"""One iteration of the engine as a value: built by the scheduler and executed by the runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from torchweave.engine.request import TokenLogprobs
from torchweave.ops.slot_state import NOT_EMITTED


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens of one prefill row: `tokens` have positions `start`, `start + 1`, ..."""

    start: int
    tokens: np.ndarray


class Payload:
    """What a part of a step carries from the host to the device: the base of frozen dataclasses.

    Attributes:
        leader_only: the other ranks do not need it, so it does not travel to them.
    """

    leader_only: ClassVar[bool] = False


ROWS = {"rows": True}
"""Metadata of fields with an entry a row. Every rank's device has the rows of a step without chunks, all of which emit."""


@dataclass(frozen=True)
class Step:
    """A step holds slots, not requests: all other facts about a row are on the device.

    Attributes:
        index: step counter, from 0.
        slots: int32 [rows]; decode rows first, one token each, then prefill rows.
        starts: int64 [num_decode_rows], position of each decode row's token.
        chunks: tokens of each prefill row.
        emits: bool [rows]; False while a prompt is incomplete: the row's sampled token is ignored.
        updates: updates of device state before the step, as (flat indices, values); None for none.
        max_seq_len: longest sequence in tokens, this step's tokens included.
        depends_on: index of the latest step whose tokens, or whose end, this step depends on; -1 for none. Pipeline stages compute
            the steps after it at the same time as this one.
        query_len: most tokens of a decode row: its last token and, above 1, as many drafts as the device proposes.
        parts: what the step carries beyond decoding, by the name of the part, in the order in which parts run.
    """

    index: int
    slots: np.ndarray = field(metadata=ROWS)
    starts: np.ndarray = field(metadata=ROWS)
    chunks: tuple[Chunk, ...]
    emits: np.ndarray = field(metadata=ROWS)
    updates: tuple[np.ndarray, np.ndarray] | None
    max_seq_len: int
    depends_on: int = -1
    query_len: int = 1
    parts: Mapping[str, Payload] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_decode_rows(self) -> int:
        return len(self.starts)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows * self.query_len + self.num_prefill_tokens


@dataclass(frozen=True)
class StepLogprobs:
    """Log-probabilities, one entry per row of `rows`."""

    rows: np.ndarray  # int64 [n], row of the step
    chosen: np.ndarray  # float32 [n]
    ranks: np.ndarray  # int64 [n], 1 = most likely
    top_values: np.ndarray  # float32 [n, k]
    top_ids: np.ndarray  # int64 [n, k]

    def entry(self, at: int, token: int, count: int) -> TokenLogprobs:
        """Entry `at`, for `token`, with the `count` most likely tokens."""
        ids, values = self.top_ids[at][:count].tolist(), self.top_values[at][:count].tolist()
        top = dict(zip(ids, values, strict=True))
        return TokenLogprobs(token, float(self.chosen[at]), int(self.ranks[at]), top)


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        tokens: int32 [rows]; a token id, or -1 - id for a stop token of the request that the device detected. With drafts
            int32 [rows, query_len], NOT_EMITTED after the tokens that a row keeps.
        how: execution mode: decode_graph, draft_graph, mixed_graph, piecewise_graph or plain.
        seconds: time of the step on the device; None where it is not measured.
        parts: results of the step's parts, by name.
    """

    tokens: np.ndarray
    how: str
    seconds: float | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_sampled_tokens(self) -> int:
        return self.num_tokens_of(len(self.tokens))

    def num_tokens_of(self, num_rows: int) -> int:
        """Tokens that the first rows keep."""
        return int(np.count_nonzero(self.tokens[:num_rows] != NOT_EMITTED))
