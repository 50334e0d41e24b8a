"""CUDA graphs of a compiled module's calls: one for each tuple of input shapes, recorded at its first call.

Inputs are copied into the tensors of the recording, it is replayed, and what it returns is copied out. A call that cannot be
replayed is launched plainly.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchweave.compiler.runtime.compiled_graph import CompiledGraph, refuse_shared
from torchweave.compiler.runtime.cuda_graphs import GraphPool, Recording, record
from torchweave.compiler.runtime.forward import BoundaryHandler, call_op
from torchweave.report import Report

Key = tuple[tuple[torch.Size, torch.dtype, torch.device, bool], ...]
"""Shape, dtype, device and contiguity of each input."""


@dataclass(frozen=True)
class _ViewOfInput:
    """A returned tensor that shares the memory of an input: a call returns the same view of the caller's tensor."""

    index: int
    is_input: bool
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt  # after the input's first element

    def of(self, tensor: Tensor) -> Tensor:
        if self.is_input:
            return tensor
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _as_view(leaf: Tensor, buffers: Sequence[Tensor]) -> _ViewOfInput | None:
    """The view of an input that a returned tensor is; None if it is none.

    Raises:
        RuntimeError: it has another dtype.
    """
    for index, buffer in enumerate(buffers):
        if _address(leaf) == _address(buffer) != 0:
            if leaf.dtype is not buffer.dtype:
                raise RuntimeError("forward returns the memory of an input in another dtype")
            offset = leaf.storage_offset() - buffer.storage_offset()
            return _ViewOfInput(index, leaf is buffer, leaf.shape, leaf.stride(), offset)
    return None


class _Call:
    """A recorded call.

    Attributes:
        buffers: the inputs that the recording reads.
        leaves: what each leaf of the return value is: `_ViewOfInput`, an index of `computed`, or the value itself.
        computed: returned tensors in memory of the recording.
        shared: whether some of them share memory.
    """

    def __init__(self, recording: Recording[Any], buffers: list[Tensor], warm_up: Any) -> None:
        self.recording, self.buffers = recording, buffers
        self.computed: list[Tensor] = []
        flat, self.spec = pytree.tree_flatten(recording.output)
        self.leaves = [self._classify(*pair) for pair in zip(flat, pytree.tree_leaves(warm_up), strict=True)]
        self.shared = len(set(map(_address, self.computed))) < len(self.computed)

    def _classify(self, leaf: Any, warm_up: Any) -> Any:
        """`warm_up` is the same leaf of another run, still in memory: at the same address only if forward did not make it."""
        if not isinstance(leaf, Tensor):
            return leaf
        view = _as_view(leaf, self.buffers)
        if view is not None or _address(leaf) == _address(warm_up):
            return view or leaf
        self.computed.append(leaf)
        return len(self.computed) - 1

    def outputs(self, inputs: Sequence[Tensor], static: bool) -> Any:
        """The return value for a caller's inputs after a replay."""
        computed = self.computed if static else self._copies()
        # A plain int never is a leaf: forward returns tensors, None, bools, floats and strings.
        leaves = [
            computed[leaf]
            if type(leaf) is int
            else leaf.of(inputs[leaf.index])
            if isinstance(leaf, _ViewOfInput)
            else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)

    def _copies(self) -> list[Tensor]:
        """Copies of the computed tensors; those that share memory share that of their copies."""
        if not self.shared:
            return [tensor.clone() for tensor in self.computed]
        storages: dict[int, torch.UntypedStorage] = {}
        copies = []
        for tensor in self.computed:
            storage = storages.get(_address(tensor))
            if storage is None:
                storage = storages[_address(tensor)] = tensor.untyped_storage().clone()
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copies.append(empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride()))
        return copies


class _WarmUp:
    """The step to record: the first of its two runs is a call, whose result and writes it keeps."""

    def __init__(self, graph: CompiledGraph, buffers: list[Tensor], mutated: Sequence[int]) -> None:
        self.graph, self.buffers, self.mutated = graph, buffers, mutated
        self.results: list[Any] = []
        self.written: list[Tensor] = []
        self.constants: list[Tensor] = []  # copies of the parameters and buffers that the call writes to

    def __call__(self, boundary: BoundaryHandler) -> Any:
        output = self.graph(boundary, *self.buffers)
        if self.results:
            return output
        self.results.append(output)
        self.written = [self.buffers[index].clone() for index in self.mutated]
        self.constants = [each.detach().clone() for each in self.graph.effects.mutated_constants]
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if any(leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg() for leaf in leaves):
            raise RuntimeError("forward returns a tensor without plain strided memory")
        return output


class RecordedCalls:
    """Calls of a compiled graph as CUDA graphs: `recorded(*inputs)`. Calls of several threads run one after another.

    Args:
        compiled_graph: with all inputs on the pool's device.
        report: gets an event `cuda_graph` for each recording, and a warning when no more are made.
        max_graphs, static_outputs: see `torchweave.compile`.

    Attributes:
        num_replays: calls that replayed a recording.
        num_plain: calls that were launched plainly, the first of each shape among them.
        why_plain: why shapes that are not recorded yet will not be; "" while they are.
    """

    def __init__(
        self,
        compiled_graph: CompiledGraph,
        pool: GraphPool,
        report: Report,
        max_graphs: int = 64,
        static_outputs: bool = False,
    ) -> None:
        self.num_replays = self.num_plain = 0
        self.why_plain = ""
        self._graph, self._pool, self._report = compiled_graph, pool, report
        self._max_graphs, self._static_outputs = max_graphs, static_outputs
        self._calls: dict[Key, _Call] = {}
        self._lock = threading.Lock()
        effects = compiled_graph.effects
        self._mutated = [index for index, name in enumerate(compiled_graph.inputs) if name in effects.mutated_inputs]
        if len(effects.devices) > 1:
            self._stop_recording(f"forward computes on {' and '.join(sorted(effects.devices))}")
        elif effects.nested:
            self._stop_recording("forward selects what it computes by the value of a tensor, which the host must read")

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        """Shapes of the inputs of each recording."""
        return [tuple(tuple(shape) for shape, *_ in key) for key in self._calls]

    def __call__(self, *inputs: Tensor) -> Any:
        """As `CompiledGraph.__call__` without a boundary handler."""
        if self._pool.is_recording():  # the caller records a graph of its own
            return self._graph(call_op, *inputs)
        with self._lock, torch.no_grad():
            key = tuple((each.shape, each.dtype, each.device, each.is_contiguous()) for each in inputs)
            call = self._calls.get(key)
            return self._first_call(key, inputs) if call is None else self._replay(call, inputs)

    def _replay(self, call: _Call, inputs: Sequence[Tensor]) -> Any:
        self._refuse_shared(inputs)
        self._pool.wait_for_last_stream()
        torch._foreach_copy_(call.buffers, list(inputs))  # pyright: ignore[reportPrivateImportUsage]
        call.recording.replay()
        for index in self._mutated:
            inputs[index].copy_(call.buffers[index])
        self.num_replays += 1
        return call.outputs(inputs, self._static_outputs)

    def _first_call(self, key: Key, inputs: Sequence[Tensor]) -> Any:
        """Record a call, whose warm-up is the call itself: its writes happen once."""
        if not self.why_plain and len(self._calls) >= self._max_graphs:
            self._stop_recording(f"max_cuda_graphs is {self._max_graphs}, and so many shapes are recorded")
        self._pool.wait_for_last_stream()
        self.num_plain += 1
        if self.why_plain or any(each.device != self._pool.device or not each.is_contiguous() for each in inputs):
            return self._graph(call_op, *inputs)
        self._refuse_shared(inputs)
        with torch.inference_mode(False), torch.no_grad():
            warm_up = _WarmUp(self._graph, [each.detach().clone() for each in inputs], self._mutated)
            try:
                self._calls[key] = self._record(warm_up)
            except RuntimeError as error:
                if not warm_up.results:
                    raise
                self._stop_recording(str(error).strip().splitlines()[0])
            for constant, values in zip(self._graph.effects.mutated_constants, warm_up.constants, strict=True):
                constant.copy_(values)
        for index, values in zip(self._mutated, warm_up.written, strict=True):
            inputs[index].copy_(values)
        return pytree.tree_map_only(Tensor, lambda leaf: self._first_output(leaf, warm_up, inputs), warm_up.results[0])

    def _record(self, warm_up: _WarmUp) -> _Call:
        buffers = warm_up.buffers
        recording = record(warm_up, call_op, capture_boundary_ops=False, pool=self._pool, inputs=buffers)
        call = _Call(recording, buffers, warm_up.results[0])
        self._report.event(
            "cuda_graph",
            shapes=[list(each.shape) for each in buffers],
            segments=recording.num_segments,
            bytes=recording.bytes,
            seconds=recording.seconds,
        )
        return call

    def _first_output(self, leaf: Tensor, warm_up: _WarmUp, inputs: Sequence[Tensor]) -> Tensor:
        """A tensor of the warm-up, which ran on the pool's stream, for the caller."""
        view = None
        with contextlib.suppress(RuntimeError):
            view = _as_view(leaf, warm_up.buffers)
        if view is not None:
            return view.of(inputs[view.index])
        self._pool.use_on_current_stream(leaf)
        return leaf

    def _refuse_shared(self, inputs: Sequence[Tensor]) -> None:
        for index in self._mutated:
            refuse_shared(self._graph.inputs[index], inputs[index], *inputs[:index], *inputs[index + 1 :])

    def _stop_recording(self, why: str) -> None:
        self.why_plain = why
        which = "calls of other shapes" if self._calls else "calls"
        self._report.event("warning", what="cuda_graphs", why=f"{which} are launched plainly: {why}")
