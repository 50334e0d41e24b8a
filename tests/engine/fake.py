"""A fake model whose next token is a hash of all tokens before it, read through the real paged cache.

The cache stores token ids. A step writes the ids of its tokens at the positions that `prepare` computes, and the next token of a
row is a hash of the ids in its block table. A wrong block, position, slot or chunk therefore changes the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweave.engine.kv_cache.block_manager import AttentionWindow, BlockManager
from torchweave.engine.kv_cache.cpu_offload import HostBlockPool
from torchweave.engine.kv_cache.state_snapshots import StateSnapshots
from torchweave.engine.request import SamplingParams
from torchweave.engine.runner.step_buffers import StepBuffers, pack, packed_size
from torchweave.engine.sampling.beam_search import BeamSearch, Continuations, num_candidates
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.parts.base import Resources
from torchweave.engine.scheduler.parts.beams import BeamRows
from torchweave.engine.scheduler.parts.drafts import CatchUp
from torchweave.engine.scheduler.parts.logprobs import LogprobRows
from torchweave.engine.scheduler.parts.states import StateCopies
from torchweave.engine.scheduler.policies import POLICIES
from torchweave.engine.scheduler.scheduler import Scheduler
from torchweave.engine.scheduler.speculation import AdaptiveDrafts
from torchweave.engine.scheduler.step import Step, StepLogprobs, StepResult
from torchweave.engine.scheduler.step_builder import LOOKAHEAD_TOKENS
from torchweave.ops.slot_state import SlotState, StepInputs, advance, prepare, prepare_decode_inputs
from torchweave.ops.speculation import (
    DraftBuffers,
    DraftOptions,
    DraftRows,
    accept,
    catch_up,
    feed_draft,
    finish_catch_up,
    note_computed,
    prepare_drafts,
)

VOCAB = 97


def next_token(ids: Sequence[int]) -> int:
    value = 7
    for token in ids:
        value = (value * 31 + int(token) + 1) % 1_000_003
    return value % VOCAB


_POWERS = np.array([pow(31, exponent, 1_000_003) for exponent in range(4096)])
_LOGPROBS = (
    torch.from_numpy(np.random.default_rng(0).standard_normal((1009, VOCAB)) * 2).float().log_softmax(-1).numpy()
)


def hashes(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Hash of the first `lengths[i]` of `ids[i]`."""
    at = lengths[:, None] - 1 - np.arange(ids.shape[1])
    known = np.where(at >= 0, (ids + 1) * _POWERS[np.maximum(at, 0)], 0)
    return (7 * _POWERS[lengths] + known.sum(axis=1)) % 1_000_003


def logprobs_of(numbers: np.ndarray) -> np.ndarray:
    return _LOGPROBS[numbers % len(_LOGPROBS)]


def best_of(numbers: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and ids of the most likely next tokens, best first."""
    values = logprobs_of(numbers)
    ids = np.argsort(-values, axis=-1, kind="stable")[:, :most]
    return np.take_along_axis(values, ids, -1), ids


def expected_beams(prompt: Sequence[int], params: SamplingParams, stops: Sequence[int] = ()) -> list[list[int]]:
    """Answers of a beam search that runs alone and recomputes every sequence in each step."""
    assert params.max_tokens is not None
    search = BeamSearch(params, frozenset(stops), params.max_tokens)
    most = num_candidates(params, len(set(stops)))
    while not search.finished:
        ids = np.array([[*prompt, *beam.tokens.tolist()] for beam in search.beams])
        values, tokens = best_of(hashes(ids, np.full(len(ids), ids.shape[1])), most)
        search.advance([Continuations(*each) for each in zip(values, tokens, strict=True)])
    return [beam.token_ids.tolist() for beam in search.best()]


def visible_tokens(ids: Sequence[int], windows: Sequence[AttentionWindow]) -> list[int]:
    """Tokens that the last of `ids` attends to, group by group."""
    tokens: list[int] = []
    for window in windows:
        tokens += ids[int(window.first_visible(np.array(len(ids) - 1))) :]
    return tokens


def expected(
    prompt: Sequence[int],
    max_tokens: int,
    stops: Sequence[int] = (),
    windows: Sequence[AttentionWindow] = (AttentionWindow(),),
) -> list[int]:
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(next_token(visible_tokens(ids, windows)))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


class FakeRunner:
    """Runs steps synchronously on the CPU, with the real step ops.

    With several micro-batches it is the first of as many pipeline stages: its slots get the tokens of a step no sooner than a later
    step depends on them.
    """

    def __init__(
        self,
        limits: Limits,
        num_blocks: int,
        block_size: int,
        windows: Sequence[AttentionWindow] = (AttentionWindow(),),
        num_snapshots: int = 0,
    ) -> None:
        self.block_size = block_size
        self.states = np.full(
            limits.max_batch_size + num_snapshots, -1
        )  # hash of all tokens of a slot, or of a snapshot
        self.has_states = num_snapshots > 0
        self.windows = tuple(windows)
        width = -(-limits.max_model_len // block_size)
        history_len = limits.max_model_len if limits.query_len > 1 else 0
        others = {"history_len": history_len, "has_adapters": limits.max_adapters > 0}
        self.state = SlotState(limits.max_batch_size, width, num_tables=len(windows), **others)
        options = DraftOptions(limits.query_len - 1, from_model=limits.drafts_by_model)
        self.drafts = DraftBuffers(limits.max_batch_size, options, torch.device("cpu")) if history_len else None
        self.acceptance = 0.7
        self.rng = np.random.default_rng(0)
        self.cache = np.full(num_blocks * block_size, -1)
        self.draft_cache = self.cache.copy() if limits.drafts_by_model else None  # tokens that a draft model has read
        self.checks_draft_cache = False
        self.num_caught_up = 0
        cpu = torch.device("cpu")
        self.buffers = StepBuffers(limits.max_batch_size, limits.max_num_tokens, cpu, len(windows))
        self.num_stages = limits.num_micro_batches
        self.unread: deque[tuple[int, Tensor, Tensor, Tensor]] = deque()  # index of a step, tokens, slots, emits
        self.launched = 0
        self.fail_at: int | None = None
        self.start_fault: BaseException | None = None

    def start(self) -> None:
        if self.start_fault is not None:
            raise self.start_fault

    def ready(self, handle: object) -> bool:
        return False

    def collect(self, handle: object) -> StepResult:
        return handle  # type: ignore[return-value]

    def memory_in_use(self) -> int | None:
        return None

    def on_idle(self) -> None:
        pass

    def launch(self, step: Step) -> StepResult:
        if self.launched == self.fail_at:
            raise RuntimeError("the device is gone")
        self.launched += 1
        self._receive(max(step.depends_on, step.index - self.num_stages))
        if step.updates is not None:
            self.state.write(*step.updates)
        beams, states = step.parts.get("beams"), step.parts.get("states", StateCopies())
        assert beams is None or isinstance(beams, BeamRows)
        assert isinstance(states, StateCopies)
        if beams is not None and beams.copies is not None:
            sources, targets = beams.copies
            assert not set(sources.tolist()) & set(targets.tolist()) and len(set(targets.tolist())) == len(targets)
            blocks = self.cache.reshape(-1, self.block_size)
            blocks[targets] = blocks[sources]
            if self.draft_cache is not None:
                blocks = self.draft_cache.reshape(-1, self.block_size)
                blocks[targets] = blocks[sources]
        self._copy_states(states.restores)
        result = self._run(step)
        self._copy_states(states.saves)
        return result

    def _receive(self, step_index: int) -> None:
        while self.unread and self.unread[0][0] <= step_index:
            _, tokens, slots, emit = self.unread.popleft()
            advance(tokens, slots, emit, self.state, torch.empty_like(tokens))

    def _copy_states(self, copies: tuple[np.ndarray, np.ndarray] | None) -> None:
        if copies is not None:
            sources, targets = copies
            assert not set(sources.tolist()) & set(targets.tolist()) and len(set(targets.tolist())) == len(targets)
            self.states[targets] = self.states[sources]

    def _run(self, step: Step) -> StepResult:
        rows, tokens, buffers = step.num_rows, step.num_tokens, self.buffers
        inputs = buffers.inputs(rows, tokens)
        if step.query_len > 1:
            return self._launch_drafts(step, inputs)
        if step.chunks:
            pack(step, rows, tokens, buffers.packed.numpy()[: packed_size(rows, tokens)])
            packed = buffers.views(rows, tokens)
            slots, emit = packed.slots, packed.emit
            prepare(self.state, slots, packed.query_start, packed.ids, packed.positions, inputs, self.block_size)
            if self.draft_cache is not None:
                note_computed(self.state, slots, packed.query_start, inputs.positions)
                self.draft_cache[inputs.slot_mapping.numpy()] = inputs.ids.numpy()
        else:
            slots, emit = self.state.slots[:rows], buffers.emit_all[:rows]
            prepare_decode_inputs(self.state, slots, inputs, self.block_size)
            assert np.array_equal(slots.numpy(), step.slots), "the device's batch is not the host's"
        mapping = inputs.slot_mapping.numpy()
        assert (mapping >= 0).all(), "a token has no place in the cache"
        self.cache[mapping] = inputs.ids.numpy()
        if self.has_states:
            sizes = [1] * step.num_decode_rows + [len(chunk.tokens) for chunk in step.chunks]
            self._advance_states(slots.numpy(), inputs, sizes, sizes)
        drawn = buffers.tokens[:rows]
        numbers = self._numbers(slots.numpy(), inputs.seq_lens.numpy().astype(np.int64))
        drawn.numpy()[:] = numbers % VOCAB
        before = self.state.last_token.clone(), self.state.position.clone()
        advance(drawn, slots, emit, self.state, buffers.out[:rows])
        if self.num_stages > 1:  # the slots have the tokens later
            self.state.last_token.copy_(before[0])
            self.state.position.copy_(before[1])
            self.unread.append((step.index, drawn.clone(), slots.clone(), emit.clone()))
        logprobs = self._logprobs(step, numbers, drawn.numpy())
        return StepResult(buffers.out[:rows].numpy().copy(), "plain", parts=logprobs)

    def _launch_drafts(self, step: Step, inputs: StepInputs) -> StepResult:
        """A step with drafts, some of which are wrong."""
        assert self.drafts is not None
        state, slots = self.state, self.state.slots[: step.num_rows]
        assert np.array_equal(slots.numpy(), step.slots), "the device's batch is not the host's"
        rows = self.drafts.rows(step.num_rows, step.query_len)
        if self.draft_cache is not None:
            self._propose_by_model(step, slots, rows)
        else:
            self._propose(slots.numpy(), rows.drafts.numpy().reshape(step.num_rows, -1), rows.num_drafts.numpy())
        prepare_drafts(state, slots, self.drafts, rows, inputs, self.block_size)
        total = int(rows.query_start[-1])
        mapping = inputs.slot_mapping.numpy()[..., :total]
        assert (mapping >= 0).all() and (inputs.slot_mapping.numpy()[..., total:] == -1).all()
        self.cache[mapping] = inputs.ids.numpy()[:total]
        drawn = rows.entries.numpy() >= 0
        entry_slots = np.repeat(slots.numpy(), step.query_len)[drawn]
        positions = inputs.positions.numpy()[rows.logits_index.numpy()[drawn]]
        assert np.array_equal(positions, self.drafts.sampled.host_arrays["position"][: drawn.size][drawn])
        numbers = np.zeros(drawn.size, np.int64)
        numbers[drawn] = self._numbers(entry_slots, positions + 1)
        rows.tokens.numpy()[:] = numbers % VOCAB
        before = state.position.clone()
        accept(state, slots, self.drafts.options, rows)
        if self.has_states:
            kept = (state.position - before)[slots.long()].tolist()
            self._advance_states(slots.numpy(), inputs, np.diff(rows.query_start.numpy()).tolist(), kept)
        out = rows.out.numpy().copy()
        first = slice(None, drawn.size, step.query_len)
        logprobs = self._logprobs(step, numbers[first], rows.tokens.numpy()[first])
        tokens, num_drafts = out[: drawn.size].reshape(step.num_rows, -1), out[drawn.size :]
        return StepResult(tokens, "plain", parts=logprobs | {"drafts": num_drafts})

    def _propose(self, slots: np.ndarray, drafts: np.ndarray, num_drafts: np.ndarray) -> None:
        """Drafts of random number, each right with probability `acceptance` if those before it are."""
        arrays = self.state.host_arrays
        for row, slot in enumerate(slots):
            position = int(arrays["position"][slot])
            if self.draft_cache is None:
                num_drafts[row] = self.rng.integers(0, drafts.shape[1] + 1)
                num_drafts[row] = max(min(num_drafts[row], arrays["draft_limit"][slot] - position), 0)
            text = arrays["history"][slot, : position + 1].tolist()
            for place in range(num_drafts[row]):
                token = next_token(visible_tokens(text, self.windows))
                drafts[row, place] = token if self.rng.random() < self.acceptance else self.rng.integers(VOCAB)
                text.append(int(drafts[row, place]))

    def _propose_by_model(self, step: Step, slots: Tensor, rows: DraftRows) -> None:
        """The same by a draft model, which reads tokens through its cache."""
        assert self.drafts is not None
        if isinstance(lacking := step.parts.get("drafts"), CatchUp):
            self._catch_up(slots, rows, lacking.num_tokens)
            finish_catch_up(self.state, slots, rows)
            self.num_caught_up += 1
        self._catch_up(slots, rows, step.query_len)
        arrays, num_drafts = self.state.host_arrays, rows.num_drafts.numpy()
        room = arrays["draft_limit"][step.slots] - arrays["position"][step.slots]
        assert np.array_equal(num_drafts, np.clip(room, 0, step.query_len - 1)), "a draft model lacks tokens"
        drafts = np.zeros((step.num_rows, step.query_len - 1), np.int32)
        self._propose(step.slots, drafts, num_drafts.copy())
        rows.model_tokens.numpy()[...] = drafts.T
        for place in range(1, step.query_len - 1):
            inputs = self.buffers.inputs(step.num_rows, step.num_rows)
            feed_draft(self.state, slots, rows, place, inputs, self.block_size)
            self._feed_draft_model(inputs, step.num_rows)
        if self.checks_draft_cache:
            self._check_draft_cache(step.slots[num_drafts > 0])

    def _catch_up(self, slots: Tensor, rows: DraftRows, most: int) -> None:
        assert self.drafts is not None
        buffers = StepBuffers(slots.numel(), slots.numel() * most, torch.device("cpu"), len(self.windows))
        inputs = buffers.inputs(slots.numel(), slots.numel() * most)
        catch_up(self.state, slots, self.drafts, rows, inputs, self.block_size)
        self._feed_draft_model(inputs, int(rows.query_start[-1]))

    def _feed_draft_model(self, inputs: StepInputs, num_tokens: int) -> None:
        assert self.draft_cache is not None
        mapping, ids = inputs.slot_mapping.numpy()[..., :num_tokens], inputs.ids.numpy()[:num_tokens]
        placed = mapping >= 0
        self.draft_cache[mapping[placed]] = np.broadcast_to(ids, mapping.shape)[placed]

    def _check_draft_cache(self, slots: np.ndarray) -> None:
        """The draft model has read each token of the slots at its position."""
        assert self.draft_cache is not None
        for slot in slots:
            text = self.state.host_arrays["history"][slot, : self.state.host_arrays["position"][slot] + 1]
            at = np.arange(len(text))
            blocks = self.state.host_arrays["block_table"][slot, at // self.block_size]
            found = self.draft_cache[blocks.astype(np.int64) * self.block_size + at % self.block_size]
            assert np.array_equal(found, text), "the cache of the draft model has other tokens"

    def _numbers(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Hash of the tokens that each row attends to, read through the tables of all groups."""
        size = self.block_size
        if self.windows == (AttentionWindow(),):
            at = np.arange(int(lengths.max()))
            table = self.state.host_arrays["block_table"][slots]
            return hashes(self.cache[table[:, at // size] * size + at % size], lengths)
        numbers = []
        for slot, length in zip(slots, lengths, strict=True):
            ids: list[int] = []
            for window, table in zip(self.windows, self.state.tables, strict=True):
                at = np.arange(int(window.first_visible(np.array(length - 1))), length)
                ids += self.cache[table[slot].numpy()[at // size] * size + at % size].tolist()
            numbers.append(int(hashes(np.array([ids]), np.array([len(ids)]))[0]))
        return np.array(numbers)

    def _advance_states(self, slots: np.ndarray, inputs: StepInputs, sizes: list[int], kept: list[int]) -> None:
        """Advance the state of each row by those of its tokens that are kept, as a recurrent layer does, and compare it with the
        row's blocks."""
        lengths, ids, begin = inputs.seq_lens.numpy().astype(np.int64), inputs.ids.tolist(), 0
        for slot, length, size, count in zip(slots.tolist(), lengths.tolist(), sizes, kept, strict=True):
            state = 7 if length == size else int(self.states[slot])
            for token in ids[begin : begin + count]:
                state = (state * 31 + token + 1) % 1_000_003
            self.states[slot] = state
            begin += size
        lengths += np.array(kept) - np.array(sizes)
        if self.windows == (AttentionWindow(),):
            assert np.array_equal(self._numbers(slots, lengths), self.states[slots]), (
                "a row has another request's state"
            )

    def _logprobs(self, step: Step, numbers: np.ndarray, drawn: np.ndarray) -> dict[str, StepLogprobs]:
        asked = step.parts.get("logprobs")
        if not isinstance(asked, LogprobRows):
            return {}
        rows, most = asked.rows, asked.most
        values, ids = best_of(numbers[rows], most)
        emit_all = logprobs_of(numbers[rows])
        chosen = emit_all[np.arange(len(rows)), drawn[rows]]
        return {"logprobs": StepLogprobs(rows, chosen, (emit_all > chosen[:, None]).sum(axis=1) + 1, values, ids)}


class FakeBlockCopier:
    """Delays each copy until a step waits for it, or until `polls_per_copy` polls."""

    def __init__(self, num_host_blocks: int, polls_per_copy: int = 3) -> None:
        self.num_host_blocks = num_host_blocks
        self.polls_per_copy = polls_per_copy
        self.device = np.empty((0, 0), np.int64)
        self.host: dict[int, np.ndarray] = {}
        self.queue: list[tuple[int, bool, np.ndarray, np.ndarray]] = []
        self.begun = self.num_polls = 0

    def store(self, blocks: np.ndarray, host_blocks: np.ndarray) -> int:
        return self._begin(True, blocks, host_blocks)

    def load(self, host_blocks: np.ndarray, blocks: np.ndarray) -> int:
        return self._begin(False, blocks, host_blocks)

    def _begin(self, to_host: bool, blocks: np.ndarray, host_blocks: np.ndarray) -> int:
        self.begun += 1
        self.queue.append((self.begun, to_host, blocks.copy(), host_blocks.copy()))
        return self.begun

    def is_done(self, ticket: int) -> bool:
        self.num_polls += 1
        if self.num_polls % (self.polls_per_copy + 1) == self.polls_per_copy and self.queue:
            self._copy()
        return not self.queue or ticket < self.queue[0][0]

    def wait_for(self, ticket: int) -> None:
        while self.queue and self.queue[0][0] <= ticket:
            self._copy()

    def _copy(self) -> None:
        _, to_host, blocks, host_blocks = self.queue.pop(0)
        for block, host_block in zip(blocks.tolist(), host_blocks.tolist(), strict=True):
            if to_host:
                self.host[host_block] = self.device[block].copy()
            else:
                self.device[block] = self.host[host_block]


def make(
    *,
    max_batch_size: int = 8,
    max_num_tokens: int = 32,
    max_model_len: int = 96,
    num_blocks: int = 64,
    block_size: int = 4,
    chunked: bool = True,
    eos: Sequence[int] = (),
    policy: str = "guaranteed_no_evict",
    reuse: bool = True,
    copier: FakeBlockCopier | None = None,
    windows: Sequence[AttentionWindow] = (AttentionWindow(),),
    adaptive_drafts: AdaptiveDrafts | None = None,
    num_snapshots: int = 0,
    **limits_too: Any,
) -> tuple[Scheduler, FakeRunner]:
    limits = Limits(max_batch_size, max_num_tokens, max_model_len, VOCAB, chunked, **limits_too)
    runner = FakeRunner(limits, num_blocks, block_size, windows, num_snapshots)
    host = None
    if copier is not None:
        copier.device = runner.cache.reshape(num_blocks, block_size)
        host = HostBlockPool(copier, max_batch_size)
    width, longest = -(-max_model_len // block_size), max(max_num_tokens, limits.decode_span) + LOOKAHEAD_TOKENS
    snapshots = StateSnapshots(max_batch_size, num_snapshots, block_size) if num_snapshots and reuse else None
    kv = BlockManager(num_blocks, block_size, max_batch_size, width, windows, longest, host, snapshots)
    resources = Resources(adaptive_drafts=adaptive_drafts)
    scheduler = Scheduler(limits, kv, POLICIES[policy], runner.state.updates(), eos, reuse, resources)
    runner.checks_draft_cache = limits.drafts_by_model and not reuse and windows == (AttentionWindow(),)
    return scheduler, runner
