"""Record a step once, replay it many times: as one CUDA graph, or as graphs with the boundary ops run between them.

A replay works on addresses. A recording therefore owns what it was given: the tensors outside the pool that its boundary
ops read are referenced; those inside the pool are known by address only, so that later layers and later recordings reuse
their memory. Recordings of one pool are replayed one after another on one stream: what one returns is valid until another
one is replayed.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchweave.compiler.errors import InvariantError
from torchweave.compiler.runtime.forward import BoundaryHandler, Forward
from torchweave.utils.cuda_streams import side_stream
from torchweave.utils.gc import gc_paused

__all__ = ["BoundaryHandler", "Forward", "GraphPool", "Recorder", "Recording", "record"]

T = TypeVar("T")


class Recorder(Protocol):
    """What records and replays segments; CUDA graphs in `GraphPool`, anything that can do the same in a test."""

    def recording(self, may_load_kernels: bool) -> contextlib.AbstractContextManager[None]:
        """Wraps the warm-up and all segments of one recording; `may_load_kernels`: kernels may have to be loaded meanwhile."""
        ...

    def begin(self) -> None:
        """Start a segment."""
        ...

    def end(self) -> Callable[[], None]:
        """End the segment; the function replays it."""
        ...

    def weak_ref_tensor(self, tensor: Tensor) -> Tensor:
        """A tensor at the same address: one that owns nothing when the pool owns the memory, else `tensor` itself."""
        ...

    def num_bytes(self) -> int:
        """Memory that all recordings hold together."""
        ...


class GraphPool:
    """The memory that all recordings of one device share, and the stream that they are recorded on.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.handle = torch.cuda.graph_pool_handle()
        self._stream = side_stream(self, self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._capture_error_mode = "thread_local"
        self._segments: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def recording(self, may_load_kernels: bool = False) -> Iterator[None]:
        """Record on the current stream, or on the pool's own when that is the default one, which cannot be recorded.

        No garbage is collected meanwhile: a tensor or graph that dies during a capture would end it.
        """
        self._capture_error_mode = (
            "relaxed" if may_load_kernels else "thread_local"
        )  # to load a kernel is against the strict ones
        current = torch.cuda.current_stream(self.device)
        stream = self._stream if current == torch.cuda.default_stream(self.device) else current
        stream.wait_stream(current)
        try:
            with (
                gc_paused(),
                torch.cuda.device(self.device),
                torch.cuda.stream(stream),
                warnings.catch_warnings(),
            ):
                warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
                try:
                    yield
                finally:
                    if self._graph is not None:
                        self._abort_capture()  # on the stream on which it began
        finally:
            current.wait_stream(stream)

    def begin(self) -> None:
        assert self._graph is None, "a segment is being recorded"
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self.handle, capture_error_mode=self._capture_error_mode)

    def end(self) -> Callable[[], None]:
        graph, self._graph = self._graph, None
        assert graph is not None, "no segment is being recorded"
        graph.capture_end()
        return graph.replay

    def _abort_capture(self) -> None:
        """End a capture in which something was raised, so that the stream can be used again.

        Later recordings get memory of their own: torch cannot go back to a pool whose only graph is gone.
        """
        graph, self._graph = self._graph, None
        with contextlib.suppress(RuntimeError):
            assert graph is not None
            graph.capture_end()
        self.handle = torch.cuda.graph_pool_handle()

    def weak_ref_tensor(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        storage = tensor.untyped_storage()
        if not self._owns(storage.data_ptr()):
            return tensor
        facts = {
            "nbytes": storage.nbytes(),
            "data_ptr": storage.data_ptr(),
            "size": tensor.shape,
            "stride": tensor.stride(),
            "dtype": tensor.dtype,
            "device": tensor.device,
            "storage_offset": tensor.storage_offset(),
        }
        bare = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(facts, bare)

    def _owns(self, address: int) -> bool:
        if not _is_in_segments(address, self._segments):
            self._refresh_segments()
        return _is_in_segments(address, self._segments)

    def _refresh_segments(self) -> None:
        segments = torch.cuda.memory_snapshot(self.handle, include_traces=False)
        self._segments = [(segment["address"], segment["total_size"]) for segment in segments]

    def num_bytes(self) -> int:
        self._refresh_segments()
        return sum(size for _, size in self._segments)


def _is_in_segments(address: int, segments: list[tuple[int, int]]) -> bool:
    return any(start <= address < start + size for start, size in segments)


class Recording(Generic[T]):
    """A recorded step.

    Attributes:
        output: what the step returned; its tensors hold the result of the last replay, until the pool replays another.
        num_segments: 1, or one more than there are boundary ops when the recording is broken at them.
        bytes: by how much the pool grew.
        seconds: how long recording took.
    """

    def __init__(
        self,
        steps: list[Callable[[BoundaryHandler], None]],
        boundary: BoundaryHandler,
        output: T,
        inputs: Sequence[Tensor],
        debug: bool,
    ) -> None:
        self._steps = steps
        self._boundary = boundary
        self.output = output
        self._inputs = tuple(inputs)
        self._data_ptrs = [(tensor.data_ptr(), tensor.shape) for tensor in inputs]
        self._debug = debug
        self.num_segments = sum(isinstance(step, _Segment) for step in steps)
        self.bytes = 0
        self.seconds = 0.0

    def replay(self, boundary: BoundaryHandler | None = None, inputs: Sequence[Tensor] | None = None) -> T:
        """Run the step again on what its inputs hold now.

        Args:
            boundary: carries out the boundary ops of a broken recording instead of the one that it was recorded with.
            inputs: what the caller believes the inputs to be; compared with the recorded ones under `debug`.

        Raises:
            InvariantError: under `debug`, an input lies elsewhere than when it was recorded.
        """
        if self._debug:
            self._check(self._inputs if inputs is None else inputs)
        boundary = boundary or self._boundary
        for step in self._steps:
            step(boundary)
        return self.output

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self._data_ptrs):
            raise InvariantError(f"recorded with {len(self._data_ptrs)} inputs, replayed with {len(inputs)}")
        for index, (tensor, (address, shape)) in enumerate(zip(inputs, self._data_ptrs, strict=True)):
            if tensor.data_ptr() != address or tensor.shape != shape:
                raise InvariantError(
                    f"input {index} is {tuple(tensor.shape)} at {tensor.data_ptr():#x}, but {tuple(shape)} at {address:#x} "
                    "was recorded; write new values into the recorded tensor"
                )


class _Segment:
    def __init__(self, replay: Callable[[], None]) -> None:
        self._replay = replay

    def __call__(self, boundary: BoundaryHandler) -> None:
        self._replay()


class _BoundaryOpStep:
    """A boundary op between two segments, with its arguments by address."""

    def __init__(self, op: Any, args: tuple, kwargs: dict, debug: bool) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.addresses = _data_ptrs((args, kwargs)) if debug else None

    def __call__(self, boundary: BoundaryHandler) -> None:
        if self.addresses is not None and _data_ptrs((self.args, self.kwargs)) != self.addresses:
            raise InvariantError(f"an argument of boundary op {self.op} moved since it was recorded")
        boundary(self.op, self.args, self.kwargs)


def _data_ptrs(tree: Any) -> list[int]:
    return [leaf.data_ptr() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def record(
    fn: Callable[[BoundaryHandler], T],
    boundary: BoundaryHandler,
    *,
    capture_boundary_ops: bool,
    pool: Recorder,
    debug: bool = False,
    inputs: Sequence[Tensor] = (),
    warm_up: bool = True,
) -> Recording[T]:
    """Record what `fn` launches on the device.

    `fn` runs once for real, so that kernels are built and libraries have what they keep, unless it did (`warm_up`); and once
    recorded. It must do the same at each run and read only from tensors that stay where they are.

    Args:
        fn: a step, given who carries out its boundary ops.
        capture_boundary_ops: record boundary ops too, as part of one graph. Off: the recording breaks at each boundary
        op, which is not
            carried out while recording, and is at each replay.
        pool: where the recording's memory comes from. Record the largest step first.
        inputs: the tensors that the caller writes before a replay; their addresses are checked under `debug`.
        warm_up: off where the step has run before at another size: it is only recorded, and kernels that this size alone needs are
            loaded meanwhile. Where that fails, it is run for real and recorded again.
    """
    begin, before = time.monotonic(), pool.num_bytes()
    try:
        steps, output = _record_segments(fn, boundary, capture_boundary_ops, pool, debug, warm_up)
    except RuntimeError:
        if warm_up:
            raise
        steps, output = _record_segments(fn, boundary, capture_boundary_ops, pool, debug, True)
    recording = Recording(steps, boundary, output, inputs, debug)
    recording.bytes = pool.num_bytes() - before
    recording.seconds = time.monotonic() - begin
    return recording


def _record_segments(
    fn: Callable[[BoundaryHandler], T],
    boundary: BoundaryHandler,
    capture_boundary_ops: bool,
    pool: Recorder,
    debug: bool,
    warm_up: bool,
) -> tuple[list[Callable[[BoundaryHandler], None]], T]:
    """The segments of a step and the boundary ops between them, and what the step returned."""
    steps: list[Callable[[BoundaryHandler], None]] = []

    def cut(op: Any, args: tuple, kwargs: dict) -> None:
        steps.append(_Segment(pool.end()))
        args, kwargs = pytree.tree_map_only(Tensor, pool.weak_ref_tensor, (args, kwargs))
        steps.append(_BoundaryOpStep(op, args, kwargs, debug))
        pool.begin()

    with torch.no_grad(), pool.recording(may_load_kernels=not warm_up):
        if warm_up:
            fn(boundary)
        pool.begin()
        output = fn(boundary if capture_boundary_ops else cut)
        steps.append(_Segment(pool.end()))
        return steps, pytree.tree_map_only(Tensor, pool.weak_ref_tensor, output)
