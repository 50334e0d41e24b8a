"""Streams: what the code of a split piece runs on. CUDA streams on a GPU; elsewhere a stand-in that checks the order.

Memory on a GPU. The allocator hands a freed block out again to the stream that it was made on, without waiting for others. So
a tensor that a second stream reads must not be freed before the first stream is known to be behind that reader. The
generated code holds its inputs and everything that crosses streams until it returns, and before it returns the caller's stream
waits for every other one. From there on two facts make reuse safe without `record_stream`:

  made on the caller's stream   its next use comes after that wait, on the same stream;
  made on another stream        that stream begins its next call by waiting for the caller's stream, which the readers came
                                before: those inside the piece by the wait at the end, those after it by their own stream.

Inside a capture the same order is what the graph is built of, and blocks come from the graph's pool, which nothing but replays
of that pool uses. `record_stream` would keep blocks there until the capture ends. A caller that changes streams between two
calls is waited for (`CudaStreams.begin`), except inside a capture, whose pool no earlier call has memory in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from torchweave.utils.cuda_streams import side_stream

Boxed = Callable[[list[Any]], Sequence[Any]]


class Event(Protocol):
    """A point in the work of one stream."""

    def record(self) -> None:
        """After what the current stream has been given so far."""
        ...

    def wait(self) -> None:
        """What the current stream is given from now on comes after the point."""
        ...


class Streams(Protocol):
    """Stream 0 is the caller's; the others are entered by `with streams[1]:`."""

    def __getitem__(self, stream: int) -> AbstractContextManager[Any]: ...

    def event(self) -> Event: ...

    def begin(self) -> None:
        """A call of the piece begins on the caller's stream."""
        ...

    def end(self) -> None:
        """The call returns: all that the streams were given comes before what the caller does next."""
        ...

    def with_race_checks(self, call: Boxed, written: Sequence[int]) -> Boxed:
        """`call`, which writes to these of its arguments, with whatever checks the streams make."""
        ...


class CudaStreams:
    """Streams of one device, shared by all pieces of a model: what one layer frees, the next one uses again."""

    def __init__(self, num_streams: int, device: torch.device) -> None:
        self._device = device
        self._streams = [side_stream(self, device) for _ in range(1, num_streams)]
        self._caller: torch.cuda.Stream | None = None

    def __getitem__(self, stream: int) -> AbstractContextManager[Any]:
        assert stream, "the caller's stream is the current one"
        return torch.cuda.stream(self._streams[stream - 1])

    def event(self) -> Event:
        return torch.cuda.Event()

    def begin(self) -> None:
        caller = torch.cuda.current_stream(self._device)
        if caller == self._caller or torch.cuda.is_current_stream_capturing():
            return
        if self._caller is not None:
            for stream in self._streams:
                stream.wait_stream(self._caller)
        self._caller = caller

    def end(self) -> None:
        """The generated code has made the caller's stream wait for the others."""

    def with_race_checks(self, call: Boxed, written: Sequence[int]) -> Boxed:
        return call


class DataRace(AssertionError):
    """Two streams touch one storage, at least one of them writes, and nothing orders them."""


class CheckedStreams:
    """Streams without a device: all run at once, in the order of the code, and every access is checked against the events.

    Each stream counts its steps, and knows how far it has waited for every other (a vector clock). Of a storage, the last
    write and the reads since are kept with their counts: an access that is not behind them in this sense would be a race
    on a GPU, whatever order the code happens to be in here.
    """

    def __init__(self, num_streams: int) -> None:
        self._clocks = [[0] * num_streams for _ in range(num_streams)]
        self._stack = [0]
        self._writes: dict[int, tuple[int, int]] = {}
        self._reads: dict[int, dict[int, int]] = {}
        self._used: set[int] = set()
        self._live_storages: list[Any] = []  # a storage that dies would lend its identity to another

    @property
    def stream(self) -> int:
        return self._stack[-1]

    @property
    def clock(self) -> list[int]:
        return self._clocks[self.stream]

    def __getitem__(self, stream: int) -> AbstractContextManager[Any]:
        return _StreamContext(self._stack, stream)

    def event(self) -> Event:
        return _CheckedEvent(self)

    def begin(self) -> None:
        """Whatever was launched before is over for the caller's stream, and for no other."""
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
            given = list(args)
            self.clock[self.stream] += 1
            self._used.add(self.stream)
            for index, each in enumerate(given):
                if isinstance(each, Tensor):
                    self._record_access(each, index in written)
            made = call(args)
            known = {_storage(each) for each in given if isinstance(each, Tensor)}
            for each in made:
                if isinstance(each, Tensor) and _storage(each) not in known:
                    self._record_access(each, True)
            return made

        return checked

    def _record_access(self, tensor: Tensor, writes: bool) -> None:
        storage = _storage(tensor)
        if storage not in self._writes:
            self._live_storages.append(tensor.untyped_storage())
            self._writes[storage] = (0, 1)  # what the caller brings was made before the call
        self._check_ordered("write", *self._writes[storage])
        if not writes:
            self._reads.setdefault(storage, {})[self.stream] = self.clock[self.stream]
            return
        for stream, count in self._reads.pop(storage, {}).items():
            self._check_ordered("read", stream, count)
        self._writes[storage] = (self.stream, self.clock[self.stream])

    def _check_ordered(self, what: str, stream: int, count: int) -> None:
        if self.clock[stream] < count:
            raise DataRace(f"stream {self.stream} touches what stream {stream} may still {what}")


class _StreamContext:
    def __init__(self, stack: list[int], stream: int) -> None:
        self._stack, self._stream = stack, stream

    def __enter__(self) -> None:
        self._stack.append(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.pop()


class _CheckedEvent:
    def __init__(self, streams: CheckedStreams) -> None:
        self._streams = streams
        self._clock: list[int] | None = None

    def record(self) -> None:
        self._clock = list(self._streams.clock)

    def wait(self) -> None:
        assert self._clock is not None, "waited for an event that was never recorded"
        clock = self._streams.clock
        clock[:] = list(map(max, clock, self._clock))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def make_streams(num_streams: int, device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(num_streams, device) if device.type == "cuda" else CheckedStreams(num_streams)
