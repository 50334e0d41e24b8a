"""Run steps on the device: the model, its KV cache, and CUDA graphs.

A decode step is one graph without host input: gather tokens and positions by slot, model, LM head, sample, scatter the tokens. A
step with prefill rows first reads one packed array. Parts run what a step carries beyond that, before and after it. A step runs in
the first way that fits:

    decode_graph      whole decode step, recorded by batch size
    draft_graph       whole decode step with drafts, recorded by batch size and tokens of a row
    mixed_graph       whole step with prefill rows, recorded by token count
    piecewise_graph   pieces between boundary ops, recorded by token count; boundary ops run between them
    plain             every kernel launched by the host
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.runtime.forward import Forward
from torchweave.config import Plan
from torchweave.engine.runner.parts.base import Device, InStepPart, RunnerPart, StepOutput, make_parts
from torchweave.engine.runner.parts.drafts import DraftModel, DraftsPart
from torchweave.engine.runner.pipeline_stage import StageForward, StageTokens
from torchweave.engine.runner.recordings import Recordings
from torchweave.engine.runner.step_buffers import HostBufferRing, PackedInputs, StepBuffers, pack, packed_size
from torchweave.engine.runner.step_programs import StepPrograms
from torchweave.engine.scheduler.step import Step, StepResult
from torchweave.ops.attention.op import AttentionBackend, LayerKVCache
from torchweave.ops.low_rank import AdapterSlots
from torchweave.ops.slot_state import SlotState, carry
from torchweave.report import Report
from torchweave.utils.cuda_streams import on_stream, side_stream
from torchweave.utils.openmp import release_workers


class StepRun(NamedTuple):
    """How a step ran, and where its results are.

    Attributes:
        how: see `StepResult.how`.
        logits: [N, V], after those of the rows those of `StepOutput.further_logits`.
        tokens, out: int32 [N], of all rows, padding included.
        num_out: values of `out` that the host reads; 0: one a row of the step.
    """

    how: str
    logits: Tensor
    tokens: Tensor
    out: Tensor
    num_out: int = 0


@dataclass(frozen=True)
class LaunchedStep:
    """A launched step: its index in the host buffers, and what its parts have pending until it ends.

    Of `num_out` values in the buffer, those of the first `rows` rows are the step's, and others of padding.
    """

    ring_index: int
    rows: int
    num_out: int
    query_len: int
    how: str
    pending: dict[str, Any]


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
        both_ways: tokens of some steps see keys after them (`AttentionMetadata.lookahead`).
        adapter_slots: memory of low-rank adapters, which `forward` reads; None: without adapters.

    Attributes:
        parts: what steps can carry beyond decoding, by name.
        recordings: of steps.
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
        adapter_slots: AdapterSlots | None = None,
    ) -> None:
        self.plan = plan
        self.state = state
        self.caches = caches
        self.recurrent_states = recurrent_states
        self._min_size = least = min_size(forward, draft_model)
        max_rows, max_tokens = max(plan.max_batch_size, least), max(plan.max_num_tokens, least * plan.query_len)
        self._device = torch.device(plan.device)
        self._stream = side_stream(self, self._device) if self._device.type == "cuda" else None
        self._has_logits, self._stage_tokens = True, None
        if isinstance(forward, StageForward):
            self._has_logits = forward.pipeline.is_last
        self._buffers = buffers = StepBuffers(max_rows, max_tokens, self._device, state.num_tables)
        shared = caches, state, buffers, recurrent_states
        self._programs = programs = StepPrograms(plan, forward, backend, *shared, self._has_logits)
        device = Device(
            plan, state, buffers, caches, recurrent_states, self._stream, draft_model, both_ways, adapter_slots, least,
            programs.boundary, programs.run_model, programs.draft_inputs,
        )  # fmt: skip
        self.parts: dict[str, RunnerPart] = make_parts(device)
        programs.add_parts([part for part in self.parts.values() if isinstance(part, InStepPart)])
        buffers.allocate_packed(sum(part.num_inputs for part in programs.parts))
        drafts_part = self.parts.get(DraftsPart.name)
        self._drafts_part = drafts_part if isinstance(drafts_part, DraftsPart) else None
        sampled = max_rows * (plan.query_len + 1 if plan.query_len > 1 else 1)
        most = packed_size(max_rows, max_tokens, buffers.num_others)
        self._host_buffers = HostBufferRing(most, sampled, plan.run_ahead + 1, self._device, timed=plan.query_len > 1)
        inputs = [state.arena, buffers.packed, buffers.ids, buffers.positions, buffers.slot_mapping]
        inputs += [tensor for layer in caches for tensor in layer.tensors] + list(recurrent_states)
        self.recordings = Recordings(
            plan, programs, self._drafts_part, least, self._upload_padding, inputs, self._stream, report
        )
        self._packed: PackedInputs | None = None  # with stages: of the last step with chunks
        if isinstance(forward, StageForward):
            self._stage_tokens = StageTokens(forward.pipeline, state, forward.num_stages)

    # -- steps of padding ----------------------------------------------------------------------------------------------

    def run_dummy_step(self, tokens: int, max_seq_len: int | None = None) -> None:
        """Run a mixed step of padding only, which changes neither cache nor slots.

        Args:
            max_seq_len: longest sequence of an unrecorded step; None: `max_model_len`.
        """
        rows = self.recordings.rows_of(tokens)
        with torch.inference_mode(), on_stream(self._stream):
            self._upload_padding(rows, tokens)
            run, boundary = self._programs.mixed(rows, tokens, max_seq_len or self.plan.max_model_len)
            run(boundary)

    def run_dummy_decode_step(self, rows: int) -> None:
        """Run a decode step while no slot is in use."""
        with torch.inference_mode(), on_stream(self._stream):
            run, boundary = self._programs.decode(rows)
            run(boundary)

    def run_dummy_draft_step(self, rows: int, query_len: int) -> None:
        """Run a decode step with drafts while no slot is in use; fewer rows than the draft model takes become as many."""
        assert self._drafts_part is not None
        rows = max(rows, self._min_size)
        with torch.inference_mode(), on_stream(self._stream):
            self._drafts_part.program(rows, query_len)(self._drafts_part.boundary(rows, query_len))

    def _upload_padding(self, rows: int, tokens: int) -> None:
        ring_index, no_rows = self._host_buffers.acquire(), np.empty(0, np.int32)
        self._upload_inputs(Step(0, no_rows, no_rows, (), no_rows, None, 0), rows, tokens, ring_index)
        self._host_buffers.record_end(ring_index)

    def _upload_inputs(self, step: Step, rows: int, tokens: int, ring_index: int) -> None:
        num_others = self._buffers.num_others
        packed_inputs = self._host_buffers.packed_inputs[ring_index][: packed_size(rows, tokens, num_others)]
        others, at = pack(step, rows, tokens, packed_inputs.numpy(), num_others), 0
        for part in self._programs.parts:
            payload = step.parts.get(part.name)
            if payload is not None:
                part.pack(payload, others[at : at + part.num_inputs])
            at += part.num_inputs
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
        ring_index, num_rows, further = self._host_buffers.acquire(), len(step.slots), {}
        with torch.inference_mode():
            self._host_buffers.record_begin(ring_index)
            if self._stage_tokens is not None:
                self._stage_tokens.receive(step.depends_on)
            if step.updates is not None:
                self.state.write(*step.updates)
            if step.parts:
                further = self._begin_parts(step)
            if step.chunks:
                run = self._launch_mixed(step, ring_index, further)
            elif step.query_len == 1:
                run = self._launch_decode(num_rows)
            else:
                run = self._launch_drafts(step)
            pending = self._end_parts(step, run, further) if step.parts else {}
            if self._stage_tokens is not None:
                self._add_stage_tokens(self._stage_tokens, step, run.tokens)
            num_out = run.num_out or num_rows
            carry(run.out[:num_out], self._host_buffers.sampled[ring_index][:num_out])
            self._host_buffers.record_end(ring_index)
        return LaunchedStep(ring_index, num_rows, num_out, step.query_len, run.how, pending)

    def _carried(self, step: Step) -> list[tuple[RunnerPart, Any]]:
        """The parts of a step with their payloads; those that this rank does not hold have nothing to do on its stage."""
        return [(self.parts[name], payload) for name, payload in step.parts.items() if name in self.parts]

    def _begin_parts(self, step: Step) -> dict[str, Tensor]:
        """Run parts before the model; returns indices of further tokens whose logits they read, by part."""
        further: dict[str, Tensor] = {}
        for part, payload in self._carried(step):
            part.before(payload, step)
            if (index := part.further_logits(payload)) is not None:
                further[part.name] = index
        return further

    def _end_parts(self, step: Step, run: StepRun, further: dict[str, Tensor]) -> dict[str, Any]:
        """Run parts after the step; returns what `RunnerPart.collect` takes, by part."""
        pending, further_logits = {}, {}
        if further and self._has_logits:
            sizes = [len(index) for index in further.values()]
            further_logits = dict(zip(further, run.logits[-sum(sizes) :].split(sizes), strict=True))
        output = StepOutput(step, run.logits, run.tokens, run.out, further_logits)
        for part, payload in self._carried(step):
            if self._has_logits or not part.needs_logits:
                pending[part.name] = part.after(payload, output)
        return {name: value for name, value in pending.items() if value is not None}

    def _add_stage_tokens(self, stage_tokens: StageTokens, step: Step, tokens: Tensor) -> None:
        slots, emits, rows = self.state.slots, self._buffers.emit_all, step.num_rows
        if step.chunks:
            assert self._packed is not None
            slots, emits = self._packed.slots, self._packed.emit
        stage_tokens.add(step.index, tokens[:rows], slots[:rows], emits[:rows])

    def _launch_decode(self, rows: int) -> StepRun:
        buffers, recordings = self._buffers, self.recordings.decode
        padding = self.plan.config.cuda_graph_config.enable_padding
        bucket = self.recordings.bucket(recordings, rows, padding) if recordings else None
        if bucket is not None:
            recordings[bucket].replay()
            return StepRun("decode_graph", recordings[bucket].output, buffers.tokens, buffers.out)
        run, boundary = self._programs.decode(max(rows, self._min_size))
        return StepRun("plain", run(boundary), buffers.tokens, buffers.out)

    def _launch_drafts(self, step: Step) -> StepRun:
        drafts_part, query_len = self._drafts_part, step.query_len
        assert drafts_part is not None, "a step with drafts needs `query_len` above 1"
        recordings = self.recordings.drafts[query_len]
        rows = self.recordings.bucket(recordings, step.num_rows, self.plan.config.cuda_graph_config.enable_padding)
        if rows is not None:
            recordings[rows].replay()
            how, logits = "draft_graph", recordings[rows].output
        else:
            rows = max(step.num_rows, self._min_size)
            boundary = None if self._stream is None else drafts_part.boundary(rows, query_len)
            how, logits = "plain", drafts_part.program(rows, query_len)(boundary)
        views = drafts_part.buffers.rows(rows, query_len)
        return StepRun(how, logits, views.tokens, views.out, views.out.numel())

    def _launch_mixed(self, step: Step, ring_index: int, further: dict[str, Tensor]) -> StepRun:
        buffers, recordings = self._buffers, self.recordings.mixed
        num_tokens, limit = step.num_tokens, self.plan.config.torch_compile_config.max_padding_ratio
        # Parts may read more logits than a recording returns.
        bucket = None if further else self.recordings.bucket(recordings, num_tokens, padding=True)
        if bucket is not None and (bucket > limit * num_tokens or step.num_rows > self.recordings.rows_of(bucket)):
            bucket = None
        tokens = max(num_tokens, self._min_size) if bucket is None else bucket
        rows = max(step.num_rows, self._min_size) if bucket is None else self.recordings.rows_of(bucket)
        self._upload_inputs(step, rows, tokens, ring_index)
        if bucket is not None:
            recording = recordings[bucket]
            recording.replay()
            how = "mixed_graph" if recording.num_segments == 1 else "piecewise_graph"
            return StepRun(how, recording.output, buffers.tokens, buffers.out)
        index = torch.cat(list(further.values())) if further else None
        run, boundary = self._programs.mixed(rows, tokens, step.max_seq_len, index)
        return StepRun("plain", run(boundary), buffers.tokens, buffers.out)

    def ready(self, handle: LaunchedStep) -> bool:
        return self._host_buffers.ready(handle.ring_index)

    def collect(self, handle: LaunchedStep) -> StepResult:
        """Wait for a launched step and return its tokens and the results of its parts."""
        tokens = self._host_buffers.wait(handle.ring_index)[: handle.num_out].numpy().copy()
        seconds = self._host_buffers.seconds(handle.ring_index)
        results = {name: self.parts[name].collect(pending) for name, pending in handle.pending.items()}
        if handle.query_len > 1:
            assert self._drafts_part is not None
            tokens, results[DraftsPart.name] = self._drafts_part.split(tokens, handle.rows, handle.query_len)
        return StepResult(tokens, handle.how, seconds, results)

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
