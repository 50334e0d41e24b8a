"""One iteration of the engine as a value: built by the scheduler and executed by the runner."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from torchweave.engine.request import TokenLogprobs
from torchweave.ops.kernels.sampling.layout import ROW
from torchweave.ops.sampling.logits_processors import LogitsStateInit
from torchweave.ops.slot_state import NOT_EMITTED


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens of one prefill row: `tokens` have positions `start`, `start + 1`, ..."""

    start: int
    tokens: np.ndarray


@dataclass(frozen=True)
class LogitsProcessorRows:
    """Rows of a step whose logits are processed before sampling.

    Attributes:
        rows: int32 [NUM_FIELDS, K], one record per column; see `torchweave.ops.sampling.logits_processors`.
        joins: device state of new requests, to be written before the step.
        masks: int32 [M, ceil(V / 32)], bit masks of the tokens that a grammar allows; None if no row has a grammar.
    """

    rows: np.ndarray
    joins: tuple[LogitsStateInit, ...] = ()
    masks: np.ndarray | None = None

    def at_entries(self, query_len: int) -> LogitsProcessorRows:
        """The same for a step whose logits have `query_len` entries a row, of which these rows use the first."""
        if query_len == 1:
            return self
        rows = self.rows.copy()
        rows[ROW] *= query_len
        return replace(self, rows=rows)


@dataclass(frozen=True)
class PromptTargets:
    """Prompt tokens whose log-probabilities are computed in a step.

    Attributes:
        slots: (slot, number of tokens), in the order of `index`.
        index: int64 [n], index of the step's token with the logits.
        targets: int32 [n], next token of the prompt.
        most: largest number of most likely tokens that a request reports.
    """

    slots: tuple[tuple[int, int], ...]
    index: np.ndarray
    targets: np.ndarray
    most: int


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
        logprobs: rows with log-probabilities, and the largest number of most likely tokens that one reports; None for none.
        logits_processors: rows whose logits are processed; None for none.
        prompt_targets: prompt tokens whose log-probabilities are computed; None for none.
        copies: KV cache blocks to copy first, as (sources, targets); None for none.
        extra_rows: decode rows beyond one per request: further beams.
        query_len: most tokens of a decode row: its last token and, above 1, as many drafts as the device proposes.
        catch_up: most tokens of a row that a draft model may lack, to be computed before it proposes drafts.
        rope_offsets: int32 [axes, tokens], what each axis adds to the positions of a step with chunks; None for a model with one
            position a token.
        state_restores, state_saves: rows of the recurrent states to copy before the model (from snapshots and forked beams) and
            after it (to snapshots), as (sources, targets); None for none.
        lookahead: int32 [tokens], how many tokens behind it each token of a step with chunks sees; None for a causal model.
        depends_on: index of the latest step whose tokens, or whose end, this step depends on; -1 for none. Pipeline stages compute
            the steps behind it at the same time as this one.
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
    query_len: int = 1
    catch_up: int = 0
    rope_offsets: np.ndarray | None = None
    state_restores: tuple[np.ndarray, np.ndarray] | None = None
    state_saves: tuple[np.ndarray, np.ndarray] | None = None
    lookahead: np.ndarray | None = None
    depends_on: int = -1

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
            int32 [rows, query_len], NOT_EMITTED behind the tokens that a row keeps.
        how: execution mode: decode_graph, mixed_graph, piecewise_graph or plain.
        logprobs: log-probabilities of sampled tokens, for the step's `logprobs` rows.
        prompt_logprobs: log-probabilities of prompt tokens, for its `prompt_targets`.
        num_drafts: int32 [rows], drafts of each row; None for a step without drafts.
        seconds: time of the step on the device; None where it is not measured.
        pooled: float32 [rows, size], for a model that pools: the row of each chunk's last token, or the sum of its tokens' rows.
    """

    tokens: np.ndarray
    how: str
    logprobs: StepLogprobs | None = None
    prompt_logprobs: StepLogprobs | None = None
    num_drafts: np.ndarray | None = None
    seconds: float | None = None
    pooled: np.ndarray | None = None

    @property
    def num_sampled_tokens(self) -> int:
        return self.num_tokens_of(len(self.tokens))

    def num_tokens_of(self, num_rows: int) -> int:
        """Tokens that the first rows keep."""
        return int(np.count_nonzero(self.tokens[:num_rows] != NOT_EMITTED))
