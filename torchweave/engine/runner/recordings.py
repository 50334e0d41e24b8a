"""Recorded steps: CUDA graphs of decode steps, of steps with drafts, and of steps with prefill rows, by size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchweave.compiler.runtime.cuda_graphs import GraphPool, Recording, record
from torchweave.compiler.runtime.forward import BoundaryHandler
from torchweave.config import Plan
from torchweave.engine.runner.parts.drafts import DraftsPart
from torchweave.engine.runner.step_boundary import StepBoundary
from torchweave.engine.runner.step_programs import StepPrograms
from torchweave.report import Report
from torchweave.utils.cuda_streams import on_stream, wait_until_idle

_DRAIN_SECONDS = 5.0  # as long as ranks have to abort collectives with a rank that has ended


class Recordings:
    """Records programs, and owns the recordings.

    Args:
        programs: of decode steps and steps with prefill rows.
        drafts_part: has the program of steps with drafts; None without speculation.
        min_size: least number of tokens and rows of a step.
        upload_padding: makes the packed inputs those of a step of padding: `(rows, tokens)`.
        inputs: of a replay besides weights; `debug` checks their addresses.
        stream: of the steps; None on a CPU.
        report: receives one event a recording.

    Attributes:
        decode: by number of rows, ascending.
        drafts: by tokens of a row, then by number of rows.
        mixed: steps with prefill rows, by number of tokens.
    """

    def __init__(
        self,
        plan: Plan,
        programs: StepPrograms,
        drafts_part: DraftsPart | None,
        min_size: int,
        upload_padding: Callable[[int, int], None],
        inputs: Sequence[Tensor],
        stream: torch.cuda.Stream | None,
        report: Report,
    ) -> None:
        self._plan, self._programs, self._drafts_part = plan, programs, drafts_part
        self._min_size = min_size
        self._upload_padding, self._inputs = upload_padding, tuple(inputs)
        self._stream, self._report = stream, report
        self.decode: dict[int, Recording] = {}
        self.drafts: dict[int, dict[int, Recording]] = {query_len: {} for query_len in plan.query_lens}
        self.mixed: dict[int, Recording] = {}

    def rows_of(self, tokens: int) -> int:
        """Row capacity of a recording of `tokens` tokens."""
        return max(min(tokens, self._plan.max_batch_size), self._min_size)

    def bucket(self, recordings: dict[int, Recording], size: int, padding: bool) -> int | None:
        """The smallest recorded size of at least `size` (without `padding`: of exactly `size`); None if there is none."""
        sizes = list(recordings)
        at = bisect_left(sizes, size)
        if at == len(sizes) or (sizes[at] != size and not padding):
            return None
        return sizes[at]

    def record_all(self, pool: GraphPool) -> None:
        """Record every size, the largest first, so that smaller ones reuse its memory.

        A single rank runs only the largest before recording: library workspaces exist afterwards, and a run takes the host as long
        as a recording. Several ranks run every size, since a rank that runs while others record would wait for them.
        """
        plan, is_single_rank = self._plan, self._plan.config.num_ranks == 1
        mixed = plan.token_buckets if plan.full_mixed_graphs or plan.piecewise_graphs else ()
        decode = plan.batch_sizes if plan.decode_graphs else ()
        mixed, decode = ([size for size in sizes if size >= self._min_size] for sizes in (mixed, decode))
        drafts = [rows for rows in decode if rows <= plan.max_drafting_rows]
        if mixed:
            with self._report.progress("recording mixed steps", len(mixed)) as advance_bar, on_stream(self._stream):
                for number, tokens in enumerate(sorted(mixed, reverse=True)):
                    self.record_mixed(tokens, pool, warm_up=number == 0 or not is_single_rank)
                    advance_bar(1, f"{tokens} tokens, {pool.num_bytes() >> 20} MiB in all")
        if decode:
            with self._report.progress("recording decode steps", len(decode)) as advance_bar, on_stream(self._stream):
                for number, rows in enumerate(sorted(decode, reverse=True)):
                    self.record_decode(rows, pool, warm_up=number == 0 or not is_single_rank)
                    advance_bar(1, f"batch {rows}")
        if drafts:
            self._record_all_drafts(drafts, pool, is_single_rank)

    def _record_all_drafts(self, drafts: Sequence[int], pool: GraphPool, is_single_rank: bool) -> None:
        sizes = [(query_len, rows) for query_len in self._plan.query_lens for rows in drafts]
        progress = self._report.progress("recording steps with drafts", len(sizes))
        with progress as advance_bar, on_stream(self._stream):
            for number, (query_len, rows) in enumerate(sorted(sizes, reverse=True)):
                self.record_drafts(rows, query_len, pool, warm_up=number == 0 or not is_single_rank)
                advance_bar(1, f"batch {rows}, {query_len} tokens each")
        assert self._drafts_part is not None
        with torch.inference_mode(), on_stream(self._stream):
            self._drafts_part.run_dummy_catch_up(max(drafts), self._plan.query_len)

    def record_mixed(self, tokens: int, pool: GraphPool, warm_up: bool = True) -> Recording:
        rows, capture_boundary_ops = self.rows_of(tokens), self._plan.full_mixed_graphs
        self._upload_padding(rows, tokens)
        run, boundary = self._programs.mixed(rows, tokens, self._plan.max_model_len)
        recording = self._record(run, boundary, capture_boundary_ops, pool, warm_up)
        return self._store("mixed", self.mixed, tokens, recording)

    def record_decode(self, rows: int, pool: GraphPool, warm_up: bool = True) -> Recording:
        run, boundary = self._programs.decode(rows)
        return self._store("decode", self.decode, rows, self._record(run, boundary, True, pool, warm_up))

    def record_drafts(self, rows: int, query_len: int, pool: GraphPool, warm_up: bool = True) -> Recording:
        assert self._drafts_part is not None
        run, boundary = self._drafts_part.program(rows, query_len), self._drafts_part.boundary(rows, query_len)
        recording = self._record(run, boundary, True, pool, warm_up)
        return self._store(f"draft{query_len - 1}", self.drafts[query_len], rows, recording)

    def _record(
        self,
        run: Callable[[BoundaryHandler], Tensor],
        boundary: StepBoundary,
        capture_boundary_ops: bool,
        pool: GraphPool,
        warm_up: bool,
    ) -> Recording:
        debug = self._plan.config.torch_compile_config.debug
        # As in `ModelRunner.launch`: otherwise each custom op runs its autograd wrapper in Python.
        with torch.inference_mode():
            return record(
                run,
                boundary,
                capture_boundary_ops=capture_boundary_ops,
                pool=pool,
                debug=debug,
                inputs=self._inputs,
                warm_up=warm_up,
            )

    def _store(self, step: str, recordings: dict[int, Recording], size: int, recording: Recording) -> Recording:
        recordings[size] = recording
        for key in sorted(recordings):  # ascending, for `bucket`
            recordings[key] = recordings.pop(key)
        segments = recording.num_segments
        kind = "whole" if segments == 1 else "piecewise"
        self._report.event(
            "graph", step=step, kind=kind, key=size, segments=segments, bytes=recording.bytes, seconds=recording.seconds
        )
        return recording

    def time_decode(self) -> list[tuple[int, int, float]]:
        """(rows, tokens of a row, seconds) of the recorded decode steps at powers of two, while no slot is in use."""
        timed, begin, end = [], *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.inference_mode(), on_stream(self._stream):
            for query_len, recordings in {1: self.decode, **self.drafts}.items():
                for rows in (rows for rows in recordings if rows & (rows - 1) == 0):
                    recordings[rows].replay()
                    begin.record()
                    recordings[rows].replay()
                    end.record()
                    end.synchronize()
                    timed.append((rows, query_len, begin.elapsed_time(end) / 1e3))
        return timed

    def release(self) -> None:
        """Destroy all graphs once they have ended; NCCL does not destroy a group while a graph holds one of its collectives.

        Destroying a running graph waits for it with the interpreter lock held, which would block the thread that aborts collectives
        with a rank that has ended. Graphs that do not end are therefore kept.
        """
        if self._stream is None or wait_until_idle(self._stream, _DRAIN_SECONDS):
            self.decode.clear()
            self.drafts = {query_len: {} for query_len in self.drafts}
            self.mixed.clear()
