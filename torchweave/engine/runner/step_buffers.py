"""Inputs and outputs of steps at fixed addresses, and pinned host memory for their transfer.

Graphs replay on fixed addresses, so every bucket reads views of the same tensors. The host's inputs of a step with prefill rows are
packed into one int32 array and copied at once:

    slots[R] | query_start[R + 1] | emit[R] | last_token_row[R] | token ids[T] | positions[T] | others[K, T]

with K further numbers a token that parts upload (`InStepPart.num_inputs`). A decode step needs no host input.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from torchweave.engine.scheduler.step import Step
from torchweave.ops.slot_state import StepInputs


@dataclass(frozen=True)
class PackedInputs:
    """Views of the packed inputs of one (rows, tokens) bucket."""

    slots: Tensor
    query_start: Tensor
    emit: Tensor
    logits_index: Tensor
    ids: Tensor
    positions: Tensor
    others: Tensor


def packed_size(rows: int, tokens: int, num_others: int = 0) -> int:
    return sum(_sizes(rows, tokens, num_others))


def pack(step: Step, rows: int, tokens: int, out: np.ndarray, num_others: int = 0) -> np.ndarray:
    """Write a step into `out`, int32 [packed_size(rows, tokens, num_others)]; rows and tokens beyond the step's are padding.

    Returns:
        int32 [num_others, tokens of the step], the further numbers of its tokens, zeros.
    """
    out[: 4 * rows + 1] = 0
    slots, starts, emit, index, ids, positions, others = _split(out, _sizes(rows, tokens, num_others))
    num_rows, num_decode_rows = step.num_rows, step.num_decode_rows
    slots[:num_rows] = step.slots
    slots[num_rows:] = -1
    ends = list(accumulate((len(chunk.tokens) for chunk in step.chunks), initial=num_decode_rows))
    starts[:num_decode_rows] = np.arange(num_decode_rows)
    starts[num_decode_rows : num_rows + 1] = ends
    starts[num_rows + 1 :] = ends[-1]
    emit[:num_rows] = step.emits
    index[:num_rows] = starts[1 : num_rows + 1] - 1
    ids[:num_decode_rows] = -1  # the device has the last token, which the host may not have yet
    positions[:num_decode_rows] = step.starts
    for chunk, (begin, end) in zip(step.chunks, pairwise(ends), strict=True):
        ids[begin:end] = chunk.tokens
        positions[begin:end] = np.arange(chunk.start, chunk.start + end - begin)
    at = ends[-1]
    ids[at:] = 0
    positions[at:] = 0
    others[:] = 0
    return others.reshape(num_others, tokens)[:, :at]


def _sizes(rows: int, tokens: int, num_others: int) -> tuple[int, ...]:
    return rows, rows + 1, rows, rows, tokens, tokens, num_others * tokens


def _split(flat: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    return [flat[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]


class StepBuffers:
    """Device tensors that steps read and write, sized for the largest step.

    ids, positions int64 [T]; slot_mapping int64 [T], or [G, T] for G groups of layers; seq_lens int32 [R];
    tokens, out int32 [R]; arange int64 [R].
    """

    def __init__(
        self, max_rows: int, max_tokens: int, device: torch.device, num_tables: int = 1, num_others: int = 0
    ) -> None:
        self.device = device
        self.ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        shape = (max_tokens,) if num_tables == 1 else (num_tables, max_tokens)
        self.slot_mapping = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.out = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.logits_index = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.rows = torch.arange(max_rows + 1, dtype=torch.int32, device=device)  # query_start of a decode step
        self.row_index = torch.arange(max_rows, dtype=torch.int64, device=device)
        self.emit_all = torch.ones(max_rows, dtype=torch.int32, device=device)  # `emit` of a decode step
        self._sizes = max_rows, max_tokens
        self.allocate_packed(num_others)

    def allocate_packed(self, num_others: int) -> None:
        """Allocate the packed inputs, with so many further numbers a token."""
        self.num_others = num_others
        self.packed = torch.zeros(packed_size(*self._sizes, num_others), dtype=torch.int32, device=self.device)

    def inputs(self, rows: int, tokens: int) -> StepInputs:
        """The inputs of a step of `tokens` tokens in `rows` rows."""
        mapping = self.slot_mapping[..., :tokens]
        return StepInputs(self.ids[:tokens], self.positions[:tokens], self.seq_lens[:rows], mapping)

    def views(self, rows: int, tokens: int) -> PackedInputs:
        sizes = _sizes(rows, tokens, self.num_others)
        slots, query_start, emit, index, ids, positions, others = self.packed[: sum(sizes)].split(sizes)
        return PackedInputs(slots, query_start, emit, index, ids, positions, others.view(self.num_others, tokens))


class HostBufferRing:
    """Ring of host buffers, one for each step in flight, pinned if the device is a GPU; reused after its step has ended.

    Args:
        packed_inputs: largest packed input of a step, in int32 elements.
        sampled: most tokens that a step samples.
        depth: number of buffers.
        device: runs the steps.
        timed: measure the time of steps on the device.

    Attributes:
        packed_inputs: int32 tensors, one a buffer.
        sampled: int32 tensors, one a buffer.
    """

    def __init__(self, packed_inputs: int, sampled: int, depth: int, device: torch.device, timed: bool = False) -> None:
        cuda = device.type == "cuda"
        self.packed_inputs, self.sampled = (
            [torch.zeros(size, dtype=torch.int32, pin_memory=cuda) for _ in range(depth)]
            for size in (packed_inputs, sampled)
        )
        self._end_events = [torch.cuda.Event(enable_timing=timed) for _ in range(depth)] if cuda else []
        self._begin_events = [torch.cuda.Event(enable_timing=True) for _ in range(depth)] if cuda and timed else []
        self._seconds = [0.0] * depth if timed and not cuda else []  # steps of a CPU run while they are launched
        self._ring_index = 0

    def acquire(self) -> int:
        """Return the index of the next buffer, after its step has ended."""
        ring_index = self._ring_index
        self._ring_index = (ring_index + 1) % len(self.packed_inputs)
        self.wait(ring_index)
        return ring_index

    def record_begin(self, ring_index: int) -> None:
        """Mark the beginning of the buffer's step on the current stream, if steps are timed."""
        if self._begin_events:
            self._begin_events[ring_index].record()
        elif self._seconds:
            self._seconds[ring_index] = -time.perf_counter()

    def record_end(self, ring_index: int) -> None:
        """Mark the end of the buffer's step on the current stream."""
        if self._end_events:
            self._end_events[ring_index].record()
        elif self._seconds:
            self._seconds[ring_index] += time.perf_counter()

    def seconds(self, ring_index: int) -> float | None:
        """Time of the buffer's step, which has ended; None if steps are not timed."""
        if self._begin_events:
            return self._begin_events[ring_index].elapsed_time(self._end_events[ring_index]) / 1e3
        return self._seconds[ring_index] if self._seconds else None

    def ready(self, ring_index: int) -> bool:
        return not self._end_events or self._end_events[ring_index].query()

    def wait(self, ring_index: int) -> Tensor:
        """Wait until the step has ended and return its sampled tokens."""
        if self._end_events:
            self._end_events[ring_index].synchronize()
        return self.sampled[ring_index]
