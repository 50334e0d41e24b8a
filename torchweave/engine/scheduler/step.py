"""One iteration of the engine, as a value: made by the batch, carried out by the runner, read back by the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchweave.engine.request import TokenLogprobs
from torchweave.ops.sampling.logits_processors import LogitsStateInit


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens that one context row reads in this step: `tokens` stand at positions `start`, `start + 1`, ..."""

    start: int
    tokens: np.ndarray


@dataclass(frozen=True)
class LogitsProcessorRows:
    """Rows of a step whose logits are changed before their tokens are drawn.

    Attributes:
        rows: int32 [NUM_FIELDS, K], a record a column; see `torchweave.ops.sampling.logits_processors`.
        joins: what the device has to be told first of requests that start.
        masks: int32 [M, ceil(V / 32)], tokens that a grammar allows, as bits; None where no row has a grammar.
    """

    rows: np.ndarray
    joins: tuple[LogitsStateInit, ...] = ()
    masks: np.ndarray | None = None


@dataclass(frozen=True)
class PromptTargets:
    """Tokens of prompts whose log-probabilities are wanted.

    Attributes:
        slots: each slot with the number of its tokens, in the order in which they follow.
        index: int64 [n], which of the step's tokens has the logits.
        targets: int32 [n], the prompt's next token.
        most: the most that one of the requests wants.
    """

    slots: tuple[tuple[int, int], ...]
    index: np.ndarray
    targets: np.ndarray
    most: int


@dataclass(frozen=True)
class Step:
    """A step names slots, never requests: everything else about a row is on the device.

    Attributes:
        index: counts steps from 0.
        slots: int32 [rows]; generation rows come first, one token each, then the context rows.
        starts: int64 [num_decode_rows]; position of each generation row's token.
        chunks: what each context row reads.
        emits: bool [rows]; whether the row's new token counts. Not so while a prompt is still being read.
        updates: changes of device state that must come before the step, as (flat indices, values), or None.
        max_seq_len: longest sequence of the step in tokens, this step's tokens included.
        copies: blocks of the KV cache to copy before anything else, (from, to), or None.
        extra_rows: generation rows beyond one a request: further beams.
        logprobs: rows that asked for log-probabilities, and the most that one of them wants.
        logits_processors: rows that are drawn from changed logits; None where nobody asked for that.
        prompt_targets: tokens of prompts whose log-probabilities are wanted; None where nobody asked for that.
    """

    index: int
    slots: np.ndarray
    starts: np.ndarray
    chunks: tuple[Chunk, ...]
    emits: np.ndarray
    updates: tuple[np.ndarray, np.ndarray] | None
    max_seq_len: int
    logprobs: tuple[np.ndarray, int] | None = None
    logits_processors: LogitsProcessorRows | None = None
    prompt_targets: PromptTargets | None = None
    copies: tuple[np.ndarray, np.ndarray] | None = None
    extra_rows: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_requests(self) -> int:
        return self.num_rows - self.extra_rows

    @property
    def num_decode_rows(self) -> int:
        return len(self.starts)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + self.num_prefill_tokens


@dataclass(frozen=True)
class StepLogprobs:
    """Log-probabilities of the rows that asked, one entry a row."""

    rows: np.ndarray  # int64 [n], row of the step
    chosen: np.ndarray  # float32 [n]
    ranks: np.ndarray  # int64 [n], 1 = most likely
    top_values: np.ndarray  # float32 [n, k]
    top_ids: np.ndarray  # int64 [n, k]

    def entry(self, at: int, token: int, count: int) -> TokenLogprobs:
        """Entry `at`, which is of `token`, with the `count` most likely tokens."""
        ids, values = self.top_ids[at][:count].tolist(), self.top_values[at][:count].tolist()
        top = dict(zip(ids, values, strict=True))
        return TokenLogprobs(token, float(self.chosen[at]), int(self.ranks[at]), top)


@dataclass(frozen=True)
class StepResult:
    """What a step produced.

    Attributes:
        tokens: int32 [rows]; a token id, or -1 - id when the device saw that it is a stop token of its request.
        logprobs, prompt_logprobs: log-probabilities of the tokens drawn, and of those of prompts, for those who asked.
        how: the way the step was run: decode_graph, mixed_graph, piecewise_graph or plain.
    """

    tokens: np.ndarray
    how: str
    logprobs: StepLogprobs | None = None
    prompt_logprobs: StepLogprobs | None = None
