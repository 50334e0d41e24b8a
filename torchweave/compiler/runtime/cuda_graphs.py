"""Record a step as one CUDA graph, or as piecewise CUDA graphs with the boundary ops run between them, and replay it.

A replay uses recorded addresses. A recording references the tensors outside the pool that its boundary ops read; tensors inside
the pool it keeps as addresses only, so that later layers and recordings reuse their memory. Recordings of one pool are replayed
one at a time on one stream, and an output is valid until the next replay of the pool.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchweave.compiler.errors import InvariantError
from torchweave.compiler.runtime.forward import BoundaryHandler
from torchweave.utils.cuda_streams import side_stream
from torchweave.utils.gc import gc_paused

T = TypeVar("T")
Step = Callable[[BoundaryHandler], None]
"""A segment, or a boundary op between two segments."""


class GraphPool:
    """Memory pool and capture stream that all recordings of one device share.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.handle = torch.cuda.graph_pool_handle()
        self._stream = side_stream(self, self.device)
        self._last_stream: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._capture_error_mode = "thread_local"
        self._segments: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def recording(self, may_load_kernels: bool = False) -> Iterator[None]:
        """Context of one recording: its warm-up and all segments. `may_load_kernels`: allow kernel loads during capture.

        Captures on the current stream, or on the pool's own if that is the default stream, which cannot be captured. Garbage
        collection pauses: freeing a tensor or graph would invalidate the capture.
        """
        # The strict modes forbid loading a kernel.
        self._capture_error_mode = "relaxed" if may_load_kernels else "thread_local"
        current = torch.cuda.current_stream(self.device)
        stream = self._stream if current == torch.cuda.default_stream(self.device) else current
        stream.wait_stream(current)
        try:
            with gc_paused(), torch.cuda.device(self.device), torch.cuda.stream(stream), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
                try:
                    yield
                finally:
                    if self._graph is not None:
                        self._abort_capture()  # must happen on the capture stream
        finally:
            current.wait_stream(stream)

    def wait_for_last_stream(self) -> None:
        """Let the current stream wait for the stream of this method's last call, if that is another one."""
        current = torch.cuda.current_stream(self.device)
        if self._last_stream is not None and self._last_stream != current:
            current.wait_stream(self._last_stream)
        self._last_stream = current

    def use_on_current_stream(self, tensor: Tensor) -> None:
        """Keep a tensor's memory, when it is freed, until the current stream's work so far is done."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def is_recording(self) -> bool:
        """Whether the current stream records a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def begin(self) -> None:
        """Start a segment."""
        assert self._graph is None, "a segment is being recorded"
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self.handle, capture_error_mode=self._capture_error_mode)

    def end(self) -> Callable[[], None]:
        """End the segment; returns the function that replays it."""
        graph, self._graph = self._graph, None
        assert graph is not None, "no segment is being recorded"
        graph.capture_end()
        return graph.replay

    def _abort_capture(self) -> None:
        """End a failed capture, so that the stream is usable again.

        Later recordings get a new pool: torch cannot reuse a pool whose only graph was freed.
        """
        graph, self._graph = self._graph, None
        assert graph is not None
        try:
            graph.capture_end()
        except RuntimeError:
            # An operation that cannot be recorded, such as a read on the host, invalidated the capture.
            self._clean_up_invalid_capture()
        self.handle = torch.cuda.graph_pool_handle()

    def _clean_up_invalid_capture(self) -> None:
        """End what torch leaves open: memory still goes to the pool, and the random generator still expects a capture."""
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.handle)
        with contextlib.suppress(RuntimeError):
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode=self._capture_error_mode)
            empty.capture_end()

    def weak_ref_tensor(self, tensor: Tensor) -> Tensor:
        """A non-owning tensor at the same address if the pool owns the memory, else `tensor` itself."""
        if not tensor.is_cuda:
            return tensor
        storage = tensor.untyped_storage()
        if not self._owns(storage.data_ptr()):
            return tensor
        metadata = {
            "nbytes": storage.nbytes(),
            "data_ptr": storage.data_ptr(),
            "size": tensor.shape,
            "stride": tensor.stride(),
            "dtype": tensor.dtype,
            "device": tensor.device,
            "storage_offset": tensor.storage_offset(),
        }
        view = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, view)

    def _owns(self, address: int) -> bool:
        def is_known() -> bool:
            return any(start <= address < start + size for start, size in self._segments)

        if not is_known():
            self._refresh_segments()
        return is_known()

    def _refresh_segments(self) -> None:
        segments = torch.cuda.memory_snapshot(self.handle, include_traces=False)
        self._segments = [(segment["address"], segment["total_size"]) for segment in segments]

    def num_bytes(self) -> int:
        """Memory of all recordings of the pool, in bytes."""
        self._refresh_segments()
        return sum(size for _, size in self._segments)


class Recording(Generic[T]):
    """A recorded step.

    Attributes:
        output: the step's return value; its tensors hold the last replay's result until the pool's next replay.
        num_segments: 1, or with piecewise graphs one more than the number of boundary ops.
        bytes: growth of the pool.
        seconds: duration of the recording.
    """

    def __init__(
        self, steps: list[Step], boundary: BoundaryHandler, output: T, inputs: Sequence[Tensor], debug: bool
    ) -> None:
        self._steps, self._boundary, self.output = steps, boundary, output
        self._inputs, self._debug = tuple(inputs), debug
        self._data_ptrs = [(tensor.data_ptr(), tensor.shape) for tensor in inputs]
        self.num_segments = (len(steps) + 1) // 2  # a boundary op is between two segments
        self.bytes, self.seconds = 0, 0.0

    def replay(self, boundary: BoundaryHandler | None = None, inputs: Sequence[Tensor] | None = None) -> T:
        """Run the step on the current contents of its inputs.

        Args:
            boundary: handler for the boundary ops of piecewise graphs; default: the handler of the recording.
            inputs: the caller's input tensors, compared with the recorded ones under `debug`.

        Raises:
            InvariantError: under `debug`, an input has another address or shape than at recording.
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


def _segment(replay: Callable[[], None]) -> Step:
    return lambda boundary: replay()


def _boundary_op(op: Any, args: tuple, kwargs: dict, debug: bool) -> Step:
    """A boundary op between two segments; its arguments are fixed addresses."""
    addresses = _data_ptrs((args, kwargs)) if debug else None

    def step(boundary: BoundaryHandler) -> None:
        if addresses is not None and _data_ptrs((args, kwargs)) != addresses:
            raise InvariantError(f"an argument of boundary op {op} moved since it was recorded")
        boundary(op, args, kwargs)

    return step


def _data_ptrs(tree: Any) -> list[int]:
    return [leaf.data_ptr() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def record(
    fn: Callable[[BoundaryHandler], T],
    boundary: BoundaryHandler,
    *,
    capture_boundary_ops: bool,
    pool: GraphPool,
    debug: bool = False,
    inputs: Sequence[Tensor] = (),
    warm_up: bool = True,
) -> Recording[T]:
    """Record the kernels that `fn` launches.

    `fn` runs once eagerly (`warm_up`), which builds kernels and library workspaces, and once under capture. Each run must launch
    the same kernels and read tensors at fixed addresses.

    Args:
        fn: a step, called with a boundary handler.
        capture_boundary_ops: record boundary ops as part of one graph. Off: record piecewise graphs; boundary ops run at each
            replay, not during recording.
        pool: owner of the recording's memory. Record the largest step first.
        inputs: tensors that the caller writes before a replay; under `debug` their addresses are checked.
        warm_up: False for a step that already ran at another size: capture only, and load this size's own kernels meanwhile.
            After a failure the step is warmed up and recorded again.
    """

    def record_segments(warm_up: bool) -> tuple[list[Step], T]:
        """Segments and boundary ops of the step in order, and its output."""
        steps: list[Step] = []

        def cut(op: Any, args: tuple, kwargs: dict) -> None:
            steps.append(_segment(pool.end()))
            args, kwargs = pytree.tree_map_only(Tensor, pool.weak_ref_tensor, (args, kwargs))
            steps.append(_boundary_op(op, args, kwargs, debug))
            pool.begin()

        with torch.no_grad(), pool.recording(may_load_kernels=not warm_up):
            if warm_up:
                fn(boundary)
            pool.begin()
            output = fn(boundary if capture_boundary_ops else cut)
            steps.append(_segment(pool.end()))
            return steps, pytree.tree_map_only(Tensor, pool.weak_ref_tensor, output)

    begin, before = time.monotonic(), pool.num_bytes()
    try:
        steps, output = record_segments(warm_up)
    except RuntimeError:
        if warm_up:
            raise
        steps, output = record_segments(warm_up=True)
    recording = Recording(steps, boundary, output, inputs, debug)
    recording.bytes = pool.num_bytes() - before
    recording.seconds = time.monotonic() - begin
    return recording
