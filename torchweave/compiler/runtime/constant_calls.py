"""Calls of torch on constant tensors, computed in a first run of a function and skipped in later ones.

A CUDA graph cannot read a tensor on the host nor copy from pageable memory. A function that does so with values that never change
(sizes, indices, sequence lengths) is recorded in two runs: the first computes all calls whose tensors are constant and keeps their
results; the second gets the results without the calls, so that only what depends on other tensors is launched and captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

T = TypeVar("T")
_CREATE = frozenset({"tensor", "as_tensor", "arange", "linspace", "zeros", "ones", "full", "eye"})
"""Functions whose result is constant without a tensor among their arguments."""
_NOT_CONSTANT = ("empty", "new_empty", "rand", "bernoulli", "multinomial", "normal", "uniform", "dropout")
"""Beginnings of names of functions whose result is random or not initialized."""
_TAKE_SIZES = frozenset({"view", "reshape", "split", "expand", "repeat", "narrow", "unflatten"})
"""Functions whose integers are sizes."""
_PLAIN = (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
          np.ndarray, np.generic)  # fmt: skip


class ConstantCalls(TorchFunctionMode):
    """Runs of a function of constant and other tensors: `calls.run(fn)`.

    A call is constant if all its tensors are: those given, and results of constant calls. Calls in `opaque` modules are made in
    each run. Each run must make the same calls.

    Args:
        constants: tensors that the function reads and whose values never change; no inference tensors.
        opaque: modules whose insides are not looked at: they read nothing on the host, and may launch kernels unseen by torch.
    """

    def __init__(self, constants: Iterable[Tensor], opaque: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self._opaque = opaque
        self._constants = {id(tensor): tensor for tensor in constants}
        self._results: list[tuple[Any, Any]] = []
        self._read: dict[int, tuple[Tensor, int]] = {}  # constants that other calls read, and their versions
        self._arguments: list[weakref.ref[Tensor]] = []
        self._next: int | None = None  # of the results, in runs after the first
        self._depth = 0  # of calls of opaque modules

    def run(self, fn: Callable[[], T]) -> T:
        """The function's result.

        Raises:
            RuntimeError: it writes to a constant tensor that it reads, or its calls are others than those of the first run.
        """
        is_first = self._next is None
        self._depth = 0
        with ExitStack() as hooks:
            for module in self._opaque:
                hooks.callback(module.register_forward_pre_hook(self._enter_opaque, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._leave_opaque).remove)
            with self:
                result = fn()
        if any(tensor._version != version for tensor, version in self._read.values()):
            raise RuntimeError("it writes to a tensor that is read before and does not depend on the input")
        if not is_first and self._next != len(self._results):
            raise RuntimeError("its calls differ from run to run")
        self._next = 0
        return result

    def tensors(self) -> list[Tensor]:
        """What a recording of a later run reads beside its inputs: constants, and tensors of modules that are alive."""
        tensors = {key: tensor for key, (tensor, _) in self._read.items()}
        tensors |= {id(tensor): tensor for each in self._arguments if (tensor := each()) is not None}
        return list(tensors.values())

    def num_bytes(self) -> int:
        """Memory of the constants that a recording reads."""
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each, _ in self._read.values()
        }
        return sum(storages.values())

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        leaves = list(_leaves((args, kwargs)))
        if not self._is_constant(func, leaves):
            self._note_read(leaves)
            return func(*self._with_numbers(args, getattr(func, "__name__", "") in _TAKE_SIZES), **kwargs)
        if self._next is None:
            result = func(*args, **kwargs)
            self._results.append((func, result))
            self._constants |= {id(leaf): leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)}
        else:
            if self._next == len(self._results) or self._results[self._next][0] != func:
                raise RuntimeError("its calls differ from run to run")
            result = self._results[self._next][1]
            self._next += 1
        return pytree.tree_map(lambda leaf: leaf, result)  # containers are new in each run

    def _is_constant(self, func: Any, leaves: Sequence[Any]) -> bool:
        name = getattr(func, "__name__", "")
        if name.startswith(_NOT_CONSTANT) or not all(isinstance(leaf, (*_PLAIN, Tensor)) for leaf in leaves):
            return False
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return all(id(tensor) in self._constants for tensor in tensors) if tensors else name in _CREATE

    def _with_numbers(self, thing: Any, are_sizes: bool) -> Any:
        """Arguments with numbers for constant tensors that are sizes or bound a slice, which torch would read on the host."""
        if type(thing) in (tuple, list):
            return type(thing)(self._with_numbers(item, are_sizes) for item in thing)
        if isinstance(thing, slice):
            return slice(*(self._with_numbers(each, True) for each in (thing.start, thing.stop, thing.step)))
        if are_sizes and isinstance(thing, Tensor) and thing.dim() == 0 and id(thing) in self._constants:
            return self.__torch_function__(Tensor.item, (), (thing,))
        return thing

    def _note_read(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) in self._constants:
                self._read.setdefault(id(leaf), (leaf, leaf._version))
            elif self._next is not None:
                self._arguments.append(weakref.ref(leaf))

    def _enter_opaque(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self._depth:
            self._note_read(list(_leaves((args, kwargs))))
        self._depth += 1

    def _leave_opaque(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._depth -= 1


def _leaves(tree: Any) -> Iterator[Any]:
    """All values in containers and slices."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, slice):
            yield from (leaf.start, leaf.stop, leaf.step)
        else:
            yield leaf
