"""Run steps on the device: the model, its KV cache, and CUDA graphs.

A decode step is one graph without host input: gather tokens and positions by slot, model, LM head, sample, scatter the tokens. A
step with prefill rows first reads one packed array. Rows with logits processors are resampled after the step. A step runs in the
first way that fits:

    decode_graph      whole decode step, recorded by batch size
    draft_graph       whole decode step with drafts, recorded by batch size and tokens of a row
    mixed_graph       whole step with prefill rows, recorded by token count
    piecewise_graph   pieces between boundary ops, recorded by token count; boundary ops run between them
    plain             every kernel launched by the host
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.runtime.cuda_graphs import GraphPool, Recording, record
from torchweave.compiler.runtime.forward import BoundaryHandler, Forward
from torchweave.config import Plan
from torchweave.engine.kv_cache.block_copy import copy_blocks, copy_states
from torchweave.engine.runner.draft_step import DraftModel, DraftStep, HiddenStateCache
from torchweave.engine.runner.pipeline_stage import StageForward, StageTokens
from torchweave.engine.runner.pooling import check_rows, sum_rows
from torchweave.engine.runner.resample import Resampler
from torchweave.engine.runner.step_boundary import BEGIN, COMMIT, StepBoundary
from torchweave.engine.runner.step_buffers import (
    HostBufferRing,
    PackedInputs,
    StepBuffers,
    pack,
    packed_size,
    to_step_logprobs,
)
from torchweave.engine.scheduler.step import Step, StepResult
from torchweave.ops.attention.op import AttentionBackend, AttentionMetadata, LayerKVCache
from torchweave.ops.sampling.sample import logprobs, sample
from torchweave.ops.slot_state import SlotState, StepInputs, advance, carry, prepare, prepare_decode_inputs
from torchweave.report import Report
from torchweave.utils.cuda_streams import side_stream, wait_until_idle
from torchweave.utils.openmp import release_workers

_DRAIN_SECONDS = 5.0  # as long as ranks have to abort collectives with a rank that has ended


@dataclass(frozen=True)
class LaunchedStep:
    """A launched step: its index in the host buffers, and tensors of log-probabilities or pooled rows, filled when it ends.

    Of `num_out` values in the buffer, those of the first `rows` rows are the step's, and others of padding.
    """

    ring_index: int
    rows: int
    num_out: int
    query_len: int
    how: str
    logprobs: tuple[np.ndarray, tuple[Tensor, ...]] | None
    prompt_logprobs: tuple[np.ndarray, tuple[Tensor, ...]] | None
    pooled: Tensor | None = None


def min_size(forward: Forward, draft_model: DraftModel | None) -> int:
    """Least number of tokens and rows of a step, to which smaller steps are padded."""
    models = [forward] if draft_model is None else [forward, draft_model.forward]
    return max(each.sizes[0] if isinstance(each, (CompiledGraph, StageForward)) else 1 for each in models)


class ModelRunner:
    """Runs the steps of one rank; the only writer of the graphs' input buffers.

    Args:
        forward: the model, `(boundary, ids[T], positions[T], logits_index[N]) -> logits[N, V]`.
        backend: runs attention.
        caches: paged KV cache, by layer.
        state: of the slots, with room for `min_size` rows.
        report: receives one event a recording.
        recurrent_states: `[rows, ...]` each, by the recurrent ops' `state` argument: rows of slots, then snapshots.
        draft_model: proposes drafts; its caches are the last of `caches`.
        both_ways: tokens of some steps see keys behind them (`AttentionMetadata.lookahead`).
    """

    def __init__(
        self,
        plan: Plan,
        forward: Forward,
        backend: AttentionBackend,
        caches: list[LayerKVCache],
        state: SlotState,
        report: Report,
        recurrent_states: Sequence[Tensor] = (),
        draft_model: DraftModel | None = None,
        both_ways: bool = False,
    ) -> None:
        self.plan = plan
        self.state = state
        self.caches = caches
        self.recurrent_states = recurrent_states
        self._forward = forward
        self._min_size = min_size(forward, draft_model)
        max_rows = max(plan.max_batch_size, self._min_size)
        max_tokens = max(plan.max_num_tokens, self._min_size * plan.query_len)
        self._backend = backend
        self._report = report
        self._device = torch.device(plan.device)
        layout = state.rope_axes, both_ways
        self._buffers = StepBuffers(max_rows, max_tokens, self._device, state.num_tables, *layout)
        self._draft_step = self._hidden_states = None
        if draft_model is not None and draft_model.is_head:
            self._hidden_states = HiddenStateCache(caches[-1])
        if plan.query_len > 1:
            drafter = draft_model, self._hidden_states
            self._draft_step = DraftStep(
                plan, state, self._buffers, self._draft_forward_boundary, self._min_size, *drafter
            )
        self._decode_graphs: dict[int, Recording] = {}
        self._draft_graphs: dict[int, dict[int, Recording]] = {query_len: {} for query_len in plan.query_lens}
        self._mixed_graphs: dict[int, Recording] = {}
        most = packed_size(max_rows, max_tokens, *layout)
        sampled = max_rows * (plan.query_len + 1 if plan.query_len > 1 else 1)
        self._host_buffers = HostBufferRing(most, sampled, plan.run_ahead + 1, self._device, timed=plan.query_len > 1)
        self._stream = side_stream(self, self._device) if self._device.type == "cuda" else None
        self._decode_steps: dict[int, tuple[Callable[[BoundaryHandler], Tensor], StepBoundary]] = {}
        self._resample, self._sample_tokens = Resampler(state), sample if plan.pooling is None else check_rows
        self._has_logits, self._stage_tokens = True, None
        self._packed: PackedInputs | None = None  # with stages: of the last step with chunks
        if isinstance(forward, StageForward):
            self._has_logits = forward.pipeline.is_last
            self._stage_tokens = StageTokens(forward.pipeline, state, forward.num_stages)

    # -- computation of a step -----------------------------------------------------------------------------------------

    def _run_model(
        self, boundary: BoundaryHandler, inputs: StepInputs, logits_index: Tensor, *rope_offsets: Tensor
    ) -> Tensor:
        """Logits of a step; keeps the hidden states that a draft head takes."""
        result = self._forward(boundary, inputs.ids, inputs.positions, logits_index, *rope_offsets)
        if self._hidden_states is None:
            return result
        logits, hidden = result
        self._hidden_states.write(hidden, inputs)
        return logits

    def _decode_step(self, rows: int) -> tuple[Callable[[BoundaryHandler], Tensor], StepBoundary]:
        """The decode step of `rows` rows; row i runs the slot at index i of the device's list."""
        if rows in self._decode_steps:
            return self._decode_steps[rows]
        buffers, state = self._buffers, self.state
        slots, inputs = state.slots[:rows], buffers.inputs(rows, rows)
        tokens, out, index = buffers.tokens[:rows], buffers.out[:rows], buffers.row_index[:rows]
        emit_all = buffers.emit_all[:rows]
        block_size, sample_tokens, has_logits = self.plan.block_size, self._sample_tokens, self._has_logits
        rope_offsets = buffers.rope_offsets(rows)

        def run(boundary: BoundaryHandler) -> Tensor:
            prepare_decode_inputs(state, slots, inputs, block_size)
            for offsets in rope_offsets:
                offsets.copy_(state.rope_delta[slots.clamp(min=0).long()])
            boundary(BEGIN, (), {})
            logits = self._run_model(boundary, inputs, index, *rope_offsets)
            if has_logits:
                sample_tokens(logits, slots, state, tokens)
                advance(tokens, slots, emit_all, state, out)
            return logits

        boundary = self._boundary(slots, buffers.rows[: rows + 1], inputs, self.plan.max_model_len, True)
        self._decode_steps[rows] = run, boundary
        return self._decode_steps[rows]

    def _draft_run(self, rows: int, query_len: int) -> Callable[[BoundaryHandler | None], Tensor]:
        """The decode step of `rows` rows of up to `query_len` tokens; attention takes them as it takes a prompt's.

        Without a boundary, the step is not padded: the host of a CPU knows the number of drafts.
        """
        draft_step, plan = self._draft_step, self.plan
        assert draft_step is not None
        slots, views = self.state.slots[:rows], draft_step.buffers.rows(rows, query_len)
        inputs = self._buffers.inputs(rows, rows * query_len)

        def forward(boundary: BoundaryHandler, step_inputs: StepInputs, logits_index: Tensor) -> Tensor:
            boundary(BEGIN, (), {})
            rope_offsets = draft_step.rope_offsets(slots, views, step_inputs)
            return self._run_model(boundary, step_inputs, logits_index, *rope_offsets)

        def run(boundary: BoundaryHandler | None) -> Tensor:
            draft_step.begin(slots, views, inputs)
            if boundary is not None:
                logits = forward(boundary, inputs, views.logits_index)
            else:
                tokens = max(int(views.query_start[-1]), self._min_size)
                exact = self._buffers.inputs(rows, tokens)
                boundary = self._boundary(slots, views.query_start, exact, plan.max_model_len, False, has_drafts=True)
                logits = forward(boundary, exact, torch.arange(tokens))[views.logits_index.clamp(max=tokens - 1)]
            draft_step.end(logits, slots, views)
            boundary(COMMIT, (self.state.position,), {})
            return logits

        return run

    def _draft_forward_boundary(
        self, slots: Tensor, query_start: Tensor, inputs: StepInputs, decode_only: bool
    ) -> StepBoundary:
        """The started boundary of a forward of the draft model."""
        boundary = self._boundary(slots, query_start, inputs, self.plan.max_model_len, decode_only)
        boundary(BEGIN, (), {})
        return boundary

    def _draft_boundary(self, rows: int, query_len: int) -> StepBoundary:
        assert self._draft_step is not None
        views, inputs = self._draft_step.buffers.rows(rows, query_len), self._buffers.inputs(rows, rows * query_len)
        slots, limit = self.state.slots[:rows], self.plan.max_model_len
        return self._boundary(slots, views.query_start, inputs, limit, False, has_drafts=True)

    def _mixed_step(
        self, rows: int, tokens: int, max_seq_len: int, prompt_targets: Tensor | None = None
    ) -> tuple[Callable[[BoundaryHandler], Tensor], StepBoundary]:
        """The step of `tokens` tokens in `rows` rows, from the packed inputs.

        Args:
            prompt_targets: indices of further tokens whose logits are returned after those of the rows.
        """
        buffers, state = self._buffers, self.state
        packed = buffers.views(rows, tokens)
        inputs = buffers.inputs(rows, tokens)
        sampled, out, index = buffers.tokens[:rows], buffers.out[:rows], buffers.logits_index[:rows]
        block_size, sample_tokens, has_logits = self.plan.block_size, self._sample_tokens, self._has_logits
        rope_offsets, lookahead = buffers.rope_offsets(tokens), buffers.lookahead(tokens)
        draft_step, sums_rows = self._draft_step, self.plan.pooling == "mean"

        def run(boundary: BoundaryHandler) -> Tensor:
            index.copy_(packed.logits_index)
            if lookahead is not None:
                lookahead.copy_(packed.lookahead)
            for offsets in rope_offsets:
                offsets.copy_(packed.rope_offsets.view(offsets.shape))
            prepare(state, packed.slots, packed.query_start, packed.ids, packed.positions, inputs, block_size)
            boundary(BEGIN, (), {})
            logits_index = index if prompt_targets is None else torch.cat([index, prompt_targets])
            if sums_rows:
                logits_index = torch.arange(tokens, device=index.device)
            logits = self._run_model(boundary, inputs, logits_index, *rope_offsets)
            if sums_rows:
                logits = sum_rows(logits, packed.query_start)
            if not has_logits:
                return logits
            sample_tokens(logits[:rows], packed.slots, state, sampled)
            if draft_step is not None:
                draft_step.note_mixed(packed.slots, packed.query_start, inputs)
            advance(sampled, packed.slots, packed.emit, state, out)
            if draft_step is not None:
                draft_step.run_mixed(boundary, packed.slots, packed.query_start, inputs, index)
            return logits

        return run, self._boundary(packed.slots, packed.query_start, inputs, max_seq_len, False, lookahead)

    def _boundary(
        self,
        slots: Tensor,
        query_start: Tensor,
        inputs: StepInputs,
        max_seq_len: int,
        decode_only: bool,
        lookahead: Tensor | None = None,
        has_drafts: bool = False,
    ) -> StepBoundary:
        """The boundary of a step, with the metadata of each layer group."""
        num_rows, num_tokens = slots.numel(), inputs.ids.numel()
        group_mapping = inputs.slot_mapping if self.state.num_tables > 1 else [inputs.slot_mapping]
        sizes = (num_rows, num_tokens, decode_only, max_seq_len)
        metas = [
            AttentionMetadata(slots, query_start, inputs.seq_lens, table, mapping, *sizes, lookahead)
            for table, mapping in zip(self.state.tables, group_mapping, strict=True)
        ]
        return StepBoundary(self._backend, self.caches, self.recurrent_states, metas, has_drafts)

    def rows_of(self, tokens: int) -> int:
        """Row capacity of a recording of `tokens` tokens."""
        return max(min(tokens, self.plan.max_batch_size), self._min_size)

    # -- recording -----------------------------------------------------------------------------------------------------

    def record_all_graphs(self, pool: GraphPool) -> None:
        """Record every size, the largest first, so that smaller ones reuse its memory.

        A single rank runs only the largest before recording: library workspaces exist afterwards, and a run takes the host as long
        as a recording. Several ranks run every size, since a rank that runs while others record would wait for them.
        """
        plan, is_single_rank = self.plan, self.plan.config.num_ranks == 1
        mixed = plan.token_buckets if plan.full_mixed_graphs or plan.piecewise_graphs else ()
        decode = plan.batch_sizes if plan.decode_graphs else ()
        mixed, decode = ([size for size in sizes if size >= self._min_size] for sizes in (mixed, decode))
        drafts = [rows for rows in decode if rows <= plan.max_drafting_rows]
        if mixed:
            with self._report.progress("recording mixed steps", len(mixed)) as advance_bar, self._on_stream():
                for number, tokens in enumerate(sorted(mixed, reverse=True)):
                    self.record_mixed(tokens, pool, warm_up=number == 0 or not is_single_rank)
                    advance_bar(1, f"{tokens} tokens, {pool.num_bytes() >> 20} MiB in all")
        if decode:
            with self._report.progress("recording decode steps", len(decode)) as advance_bar, self._on_stream():
                for number, rows in enumerate(sorted(decode, reverse=True)):
                    self.record_decode(rows, pool, warm_up=number == 0 or not is_single_rank)
                    advance_bar(1, f"batch {rows}")
        if drafts:
            sizes = [(query_len, rows) for query_len in plan.query_lens for rows in drafts]
            with self._report.progress("recording steps with drafts", len(sizes)) as advance_bar, self._on_stream():
                for number, (query_len, rows) in enumerate(sorted(sizes, reverse=True)):
                    self.record_drafts(rows, query_len, pool, warm_up=number == 0 or not is_single_rank)
                    advance_bar(1, f"batch {rows}, {query_len} tokens each")
            assert self._draft_step is not None
            with torch.inference_mode(), self._on_stream():
                self._draft_step.run_dummy_catch_up(max(drafts), plan.query_len)

    def time_decode_graphs(self) -> list[tuple[int, int, float]]:
        """(rows, tokens of a row, seconds) of the recorded decode steps at powers of two, while no slot is in use."""
        timed, begin, end = [], *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.inference_mode(), self._on_stream():
            for query_len, recordings in {1: self._decode_graphs, **self._draft_graphs}.items():
                for rows in (rows for rows in recordings if rows & (rows - 1) == 0):
                    recordings[rows].replay()
                    begin.record()
                    recordings[rows].replay()
                    end.record()
                    end.synchronize()
                    timed.append((rows, query_len, begin.elapsed_time(end) / 1e3))
        return timed

    def release_graphs(self) -> None:
        """Destroy all graphs once they have ended; NCCL does not destroy a group while a graph holds one of its collectives.

        Destroying a running graph waits for it with the interpreter lock held, which would block the thread that aborts collectives
        with a rank that has ended. Graphs that do not end are therefore kept.
        """
        if self._stream is None or wait_until_idle(self._stream, _DRAIN_SECONDS):
            self._decode_graphs.clear()
            self._draft_graphs = {query_len: {} for query_len in self._draft_graphs}
            self._mixed_graphs.clear()

    def record_mixed(self, tokens: int, pool: GraphPool, warm_up: bool = True) -> Recording:
        rows, capture_boundary_ops = self.rows_of(tokens), self.plan.full_mixed_graphs
        self._upload_padding(rows, tokens)
        run, boundary = self._mixed_step(rows, tokens, self.plan.max_model_len)
        return self._store_graph(
            "mixed", self._mixed_graphs, tokens, self._record(run, boundary, capture_boundary_ops, pool, warm_up)
        )

    def record_decode(self, rows: int, pool: GraphPool, warm_up: bool = True) -> Recording:
        run, boundary = self._decode_step(rows)
        return self._store_graph("decode", self._decode_graphs, rows, self._record(run, boundary, True, pool, warm_up))

    def record_drafts(self, rows: int, query_len: int, pool: GraphPool, warm_up: bool = True) -> Recording:
        run, boundary = self._draft_run(rows, query_len), self._draft_boundary(rows, query_len)
        recording = self._record(run, boundary, True, pool, warm_up)
        return self._store_graph(f"draft{query_len - 1}", self._draft_graphs[query_len], rows, recording)

    def _record(
        self,
        run: Callable[[BoundaryHandler], Tensor],
        boundary: StepBoundary,
        capture_boundary_ops: bool,
        pool: GraphPool,
        warm_up: bool,
    ) -> Recording:
        inputs, debug = self._inputs(), self.plan.config.torch_compile_config.debug
        # As in `launch`: otherwise each custom op runs its autograd wrapper in Python.
        with torch.inference_mode():
            return record(
                run,
                boundary,
                capture_boundary_ops=capture_boundary_ops,
                pool=pool,
                debug=debug,
                inputs=inputs,
                warm_up=warm_up,
            )

    def _inputs(self) -> tuple[Tensor, ...]:
        """Inputs of a replay besides weights; `debug` checks their addresses."""
        buffers = self._buffers
        cache = [tensor for layer in self.caches for tensor in layer.tensors]
        cache += self.recurrent_states
        return (self.state.arena, buffers.packed, buffers.ids, buffers.positions, buffers.slot_mapping, *cache)

    def _store_graph(self, step: str, recordings: dict[int, Recording], size: int, recording: Recording) -> Recording:
        recordings[size] = recording
        for key in sorted(recordings):  # ascending, for `_bucket`
            recordings[key] = recordings.pop(key)
        segments = recording.num_segments
        kind = "whole" if segments == 1 else "piecewise"
        self._report.event(
            "graph", step=step, kind=kind, key=size, segments=segments, bytes=recording.bytes, seconds=recording.seconds
        )
        return recording

    def run_dummy_step(self, tokens: int, max_seq_len: int | None = None) -> None:
        """Run a mixed step of padding only, which changes neither cache nor slots.

        Args:
            max_seq_len: longest sequence of an unrecorded step; None: `max_model_len`.
        """
        rows = self.rows_of(tokens)
        with torch.inference_mode(), self._on_stream():
            self._upload_padding(rows, tokens)
            run, boundary = self._mixed_step(rows, tokens, max_seq_len or self.plan.max_model_len)
            run(boundary)

    def run_dummy_decode_step(self, rows: int) -> None:
        """Run a decode step while no slot is in use."""
        with torch.inference_mode(), self._on_stream():
            run, boundary = self._decode_step(rows)
            run(boundary)

    def run_dummy_draft_step(self, rows: int, query_len: int) -> None:
        """Run a decode step with drafts while no slot is in use; fewer rows than the draft model takes become as many."""
        assert self._draft_step is not None
        rows = max(rows, self._min_size)
        with torch.inference_mode(), self._on_stream():
            self._draft_run(rows, query_len)(self._draft_boundary(rows, query_len))

    def _upload_padding(self, rows: int, tokens: int) -> None:
        ring_index, no_rows = self._host_buffers.acquire(), np.empty(0, np.int32)
        self._upload_inputs(Step(0, no_rows, no_rows, (), no_rows, None, 0), rows, tokens, ring_index)
        self._host_buffers.record_end(ring_index)

    def _upload_inputs(self, step: Step, rows: int, tokens: int, ring_index: int) -> None:
        layout = self._buffers.rope_axes, self._buffers.both_ways
        packed_inputs = self._host_buffers.packed_inputs[ring_index][: packed_size(rows, tokens, *layout)]
        pack(step, rows, tokens, packed_inputs.numpy(), *layout)
        if self._stage_tokens is not None:
            self._packed = self._buffers.views(rows, tokens)
        carry(packed_inputs, self._buffers.packed[: len(packed_inputs)])

    # -- running -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind the calling thread to the device and the runner's stream."""
        torch.set_grad_enabled(False)
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)

    def launch(self, step: Step) -> LaunchedStep:
        """Launch a step without waiting: write state updates, replay a graph or run the step, copy the tokens to the host."""
        ring_index = self._host_buffers.acquire()
        with torch.inference_mode():
            self._host_buffers.record_begin(ring_index)
            if self._stage_tokens is not None:
                self._stage_tokens.receive(step.depends_on)
            if step.updates is not None:
                self.state.write(*step.updates)
            if step.copies is not None:
                copy_blocks(self.caches, *step.copies)
            if step.state_restores is not None:
                copy_states(self.recurrent_states, *step.state_restores)
            tokens, out, num_out = self._buffers.tokens, self._buffers.out, step.num_rows
            if step.chunks:
                how, logits = self._launch_mixed(step, ring_index)
            elif step.query_len == 1:
                how, logits = self._launch_decode(step.num_rows)
            else:
                assert self._draft_step is not None, "a step with drafts needs `query_len` above 1"
                how, logits, padded_rows = self._launch_drafts(step)
                views = self._draft_step.buffers.rows(padded_rows, step.query_len)
                tokens, out, num_out = views.tokens, views.out, views.out.numel()
            if step.state_saves is not None:
                copy_states(self.recurrent_states, *step.state_saves)
            if step.logits_processors is not None and self._has_logits:
                self._resample(step.logits_processors.at_entries(step.query_len), logits, tokens, out)
            if self._stage_tokens is not None:
                self._add_stage_tokens(self._stage_tokens, step, tokens)
            token_logprobs = prompt_logprobs = pooled = None
            if self.plan.pooling is not None:
                pooled = self._on_host((logits[: step.num_rows].float(),))[0]
            if step.prompt_targets is not None and self._has_logits:
                prompt_logprobs = self._prompt_logprobs(step, logits)
            if step.logprobs is not None and self._has_logits:
                rows, most = step.logprobs
                token_logprobs = rows, self._logprobs(logits, tokens, rows * step.query_len, most)
            carry(out[:num_out], self._host_buffers.sampled[ring_index][:num_out])
            self._host_buffers.record_end(ring_index)
        sizes = step.num_rows, num_out, step.query_len
        return LaunchedStep(ring_index, *sizes, how, token_logprobs, prompt_logprobs, pooled)

    def _add_stage_tokens(self, stage_tokens: StageTokens, step: Step, tokens: Tensor) -> None:
        slots, emits, rows = self.state.slots, self._buffers.emit_all, step.num_rows
        if step.chunks:
            assert self._packed is not None
            slots, emits = self._packed.slots, self._packed.emit
        stage_tokens.add(step.index, tokens[:rows], slots[:rows], emits[:rows])

    def _logprobs(self, logits: Tensor, tokens: Tensor, rows: np.ndarray, most: int) -> tuple[Tensor, ...]:
        """Log-probabilities of `rows` as host tensors that are filled when the step ends."""
        index = torch.from_numpy(rows).to(self._device, non_blocking=True)
        return self._on_host(logprobs(logits[index], tokens[index], most))

    def _prompt_logprobs(self, step: Step, logits: Tensor) -> tuple[np.ndarray, tuple[Tensor, ...]]:
        """The same for prompt tokens, whose logits are the last rows."""
        assert step.prompt_targets is not None
        targets = torch.from_numpy(step.prompt_targets.targets).to(self._device, non_blocking=True)
        return step.prompt_targets.index, self._on_host(
            logprobs(logits[-len(targets) :], targets, step.prompt_targets.most)
        )

    def _on_host(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._stream is None:
            return tensors
        return tuple(torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in tensors)

    def _launch_decode(self, rows: int) -> tuple[str, Tensor]:
        bucket = self._bucket(self._decode_graphs, rows, self.plan.config.cuda_graph_config.enable_padding)
        if bucket is not None:
            recording = self._decode_graphs[bucket]
            recording.replay()
            return "decode_graph", recording.output
        run, boundary = self._decode_step(max(rows, self._min_size))
        return "plain", run(boundary)

    def _launch_drafts(self, step: Step) -> tuple[str, Tensor, int]:
        """As `_launch_decode`; returns the number of rows as well, with padding."""
        assert self._draft_step is not None
        query_len, recordings = step.query_len, self._draft_graphs[step.query_len]
        if step.catch_up:
            rows = max(step.num_rows, self._min_size)
            views = self._draft_step.buffers.rows(rows, query_len)
            self._draft_step.catch_up(self.state.slots[:rows], views, step.catch_up)
        bucket = self._bucket(recordings, step.num_rows, self.plan.config.cuda_graph_config.enable_padding)
        if bucket is not None:
            recordings[bucket].replay()
            return "draft_graph", recordings[bucket].output, bucket
        rows = max(step.num_rows, self._min_size)
        boundary = None if self._stream is None else self._draft_boundary(rows, query_len)
        return "plain", self._draft_run(rows, query_len)(boundary), rows

    def _launch_mixed(self, step: Step, ring_index: int) -> tuple[str, Tensor]:
        bucket = self._bucket(self._mixed_graphs, step.num_tokens, padding=True)
        limit = self.plan.config.torch_compile_config.max_padding_ratio
        prompt_targets = None
        if step.prompt_targets is not None:  # more logits than a recording returns
            bucket = None
            prompt_targets = torch.from_numpy(step.prompt_targets.index).to(self._device, non_blocking=True)
        if bucket is not None and (bucket > limit * step.num_tokens or step.num_rows > self.rows_of(bucket)):
            bucket = None
        tokens = max(step.num_tokens, self._min_size) if bucket is None else bucket
        rows = max(step.num_rows, self._min_size) if bucket is None else self.rows_of(bucket)
        self._upload_inputs(step, rows, tokens, ring_index)
        if bucket is not None:
            recording = self._mixed_graphs[bucket]
            recording.replay()
            return "mixed_graph" if recording.num_segments == 1 else "piecewise_graph", recording.output
        run, boundary = self._mixed_step(rows, tokens, step.max_seq_len, prompt_targets)
        return "plain", run(boundary)

    @staticmethod
    def _bucket(recordings: dict[int, Recording], size: int, padding: bool) -> int | None:
        """The smallest recorded size of at least `size` (without `padding`: of exactly `size`); None if there is none."""
        sizes = list(recordings)
        at = bisect_left(sizes, size)
        if at == len(sizes) or (sizes[at] != size and not padding):
            return None
        return sizes[at]

    def ready(self, handle: LaunchedStep) -> bool:
        return self._host_buffers.ready(handle.ring_index)

    def collect(self, handle: LaunchedStep) -> StepResult:
        """Wait for a launched step and return its tokens and log-probabilities."""
        tokens, num_drafts = self._host_buffers.wait(handle.ring_index)[: handle.num_out].numpy().copy(), None
        seconds = self._host_buffers.seconds(handle.ring_index)
        if handle.query_len > 1:
            tokens = tokens.reshape(-1, handle.query_len + 1)  # R * Q tokens, then R numbers of drafts
            padded_rows = len(tokens)
            tokens, num_drafts = np.split(tokens.ravel(), [padded_rows * handle.query_len])
            tokens, num_drafts = tokens.reshape(padded_rows, -1)[: handle.rows], num_drafts[: handle.rows]
        logprobs_of_step = to_step_logprobs(handle.logprobs), to_step_logprobs(handle.prompt_logprobs)
        pooled = None if handle.pooled is None else handle.pooled.numpy()
        return StepResult(tokens, handle.how, *logprobs_of_step, num_drafts, seconds, pooled)

    def memory_in_use(self) -> int | None:
        if self._device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def on_idle(self) -> None:
        """Receive the tokens of all steps. On a CPU, end OpenMP workers: they compete with the process's other computations."""
        if self._stage_tokens is not None:
            self._stage_tokens.receive_all()
        if self._device.type == "cpu":
            release_workers()

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()
