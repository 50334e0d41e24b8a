"""Streams of a split piece: CUDA streams on a GPU; elsewhere a race detector.

Memory on a GPU. The caching allocator reuses a freed block on the stream that allocated it, without waiting for other streams.
So a tensor that a second stream reads must not be freed before the first stream is ordered after that reader. The generated
code keeps its inputs and all tensors that cross streams until it returns, and before that the caller's stream waits for all
others. This makes reuse safe without `record_stream`:

  allocated on the caller's stream   the next use follows that wait on the same stream;
  allocated on another stream        that stream starts its next call with a wait for the caller's stream, which is ordered after
                                     all readers: those in the piece by the wait at the end, later ones by running on it.

A CUDA graph capture records the same order, and blocks come from the graph's pool, which only replays of that pool use.
`record_stream` would keep blocks until the end of the capture. If the caller changes streams between calls, `CudaStreams.begin`
waits for the previous one, except during a capture, whose pool holds no memory of earlier calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchweave.compiler.codegen.pieces import Boxed
from torchweave.utils.cuda_streams import side_stream


class CudaStreams:
    """Streams of one device, shared by all pieces of a model, so that layers reuse each other's memory.

    Stream 0 is the caller's; enter the others with `with streams[1]:`.
    """

    def __init__(self, num_streams: int, device: torch.device) -> None:
        self._device = device
        self._streams = [side_stream(self, device) for _ in range(1, num_streams)]
        self._caller: torch.cuda.Stream | None = None

    def __getitem__(self, stream: int) -> AbstractContextManager[Any]:
        assert stream, "the caller's stream is the current one"
        return torch.cuda.stream(self._streams[stream - 1])

    def event(self) -> torch.cuda.Event:
        """A point in the work of one stream, which `record` sets and `wait` makes another stream wait for."""
        return torch.cuda.Event()

    def begin(self) -> None:
        """Start a call of the piece on the caller's stream."""
        caller = torch.cuda.current_stream(self._device)
        if caller == self._caller or torch.cuda.is_current_stream_capturing():
            return
        if self._caller is not None:
            for stream in self._streams:
                stream.wait_stream(self._caller)
        self._caller = caller

    def end(self) -> None:
        """End the call: nothing, since the generated code made the caller's stream wait for the others."""

    def with_race_checks(self, call: Boxed, written: Sequence[int]) -> Boxed:
        """Wrap `call`, which mutates the arguments at positions `written`, in race checks: none on a GPU."""
        return call


class DataRace(AssertionError):
    """Two streams access one storage without order, and at least one writes."""


class CheckedStreams:
    """Race detector without a device: runs all streams in program order and checks each access against the events.

    Each stream has a vector clock: its own step count, and the last step of each other stream that it waited for. Each storage
    records its last write and the reads since. An access that is not ordered after them would be a race on a GPU.
    """

    def __init__(self, num_streams: int) -> None:
        self._clocks = [[0] * num_streams for _ in range(num_streams)]
        self._stack = [0]
        self._writes: dict[int, tuple[int, int]] = {}
        self._reads: dict[int, dict[int, int]] = {}
        self._used: set[int] = set()
        self._live_storages: list[Any] = []  # a freed storage's id could be reused

    @property
    def stream(self) -> int:
        return self._stack[-1]

    @property
    def clock(self) -> list[int]:
        return self._clocks[self.stream]

    def __getitem__(self, stream: int) -> AbstractContextManager[Any]:
        return _StreamContext(self._stack, stream)

    def event(self) -> _CheckedEvent:
        return _CheckedEvent(self)

    def begin(self) -> None:
        """Order earlier work before the caller's stream only."""
        self._writes.clear()
        self._reads.clear()
        self._live_storages.clear()
        self._used.clear()
        for stream, clock in enumerate(self._clocks):
            clock[:] = [0] * len(clock)
            clock[stream] = 1
        self._stack[:] = [0]

    def end(self) -> None:
        unjoined = [
            stream
            for stream, clock in enumerate(self._clocks)
            if self._clocks[0][stream] < clock[stream] and stream in self._used
        ]
        if unjoined or self.stream:
            raise DataRace(f"the call returns on stream {self.stream} while streams {unjoined} may still run")

    def with_race_checks(self, call: Boxed, written: Sequence[int]) -> Boxed:
        def checked(args: list[Any]) -> Sequence[Any]:
            arguments = list(args)
            self.clock[self.stream] += 1
            self._used.add(self.stream)
            for index, each in enumerate(arguments):
                if isinstance(each, Tensor):
                    self._record_access(each, index in written)
            results = call(args)
            known = {_storage(each) for each in arguments if isinstance(each, Tensor)}
            for each in results:
                if isinstance(each, Tensor) and _storage(each) not in known:
                    self._record_access(each, True)
            return results

        return checked

    def _record_access(self, tensor: Tensor, writes: bool) -> None:
        storage = _storage(tensor)
        if storage not in self._writes:
            self._live_storages.append(tensor.untyped_storage())
            self._writes[storage] = (0, 1)  # an argument of the caller, written before the call
        self._check_ordered("write", *self._writes[storage])
        if not writes:
            self._reads.setdefault(storage, {})[self.stream] = self.clock[self.stream]
            return
        for stream, count in self._reads.pop(storage, {}).items():
            self._check_ordered("read", stream, count)
        self._writes[storage] = (self.stream, self.clock[self.stream])

    def _check_ordered(self, what: str, stream: int, count: int) -> None:
        if self.clock[stream] < count:
            raise DataRace(f"stream {self.stream} accesses a storage that stream {stream} may still {what}")


class _StreamContext:
    def __init__(self, stack: list[int], stream: int) -> None:
        self._stack, self._stream = stack, stream

    def __enter__(self) -> None:
        self._stack.append(self._stream)

    def __exit__(self, *_: object) -> None:
        self._stack.pop()


class _CheckedEvent:
    def __init__(self, streams: CheckedStreams) -> None:
        self._streams = streams
        self._clock: list[int] | None = None

    def record(self) -> None:
        self._clock = list(self._streams.clock)

    def wait(self) -> None:
        assert self._clock is not None, "wait for an event that was never recorded"
        clock = self._streams.clock
        clock[:] = list(map(max, clock, self._clock))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


Streams = CudaStreams | CheckedStreams


def make_streams(num_streams: int, device: torch.device) -> Streams:
    """CUDA streams on a GPU, else the race detector."""
    return CudaStreams(num_streams, device) if device.type == "cuda" else CheckedStreams(num_streams)
