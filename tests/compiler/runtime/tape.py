"""A recorder without a GPU: it runs what it records, writes down every op, and replays into the same storages.

What a CUDA graph does to addresses, this does to storages, so that the logic of a recording can be tested anywhere. Only ops
that are dispatched are seen: pieces must be run as FX.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapePool:
    """`torchweave.compiler.runtime.cuda_graphs.GraphPool` on tapes; `alive` counts tensors handed to `weak_ref_tensor`."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.capturing = False
        self.tape: _Tape | None = None
        self.bytes = 0
        self.events: list[str] = []
        self.kept: list[weakref.ref[Tensor]] = []

    @contextlib.contextmanager
    def recording(self, may_load_kernels: bool = False) -> Iterator[None]:
        self.events.append("enter, loading" if may_load_kernels else "enter")
        try:
            yield
        finally:
            if self.tape is not None:
                self.tape.__exit__(None, None, None)
                self.tape = None
            self.events.append("exit")

    def begin(self) -> None:
        assert self.tape is None
        self.events.append("begin")
        self.tape = _Tape()
        self.tape.__enter__()

    def end(self) -> Callable[[], None]:
        assert self.tape is not None
        tape, self.tape = self.tape, None
        tape.__exit__(None, None, None)
        self.events.append("end")
        outputs = [leaf for *_, result in tape.calls for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in outputs)
        return tape.replay

    def weak_ref_tensor(self, tensor: Tensor) -> Tensor:
        self.kept.append(weakref.ref(tensor))
        return tensor

    def num_bytes(self) -> int:
        return self.bytes

    def wait_for_last_stream(self) -> None:
        self.events.append("call")

    def use_on_current_stream(self, tensor: Tensor) -> None:
        self.events.append("used")

    def is_recording(self) -> bool:
        return self.capturing
