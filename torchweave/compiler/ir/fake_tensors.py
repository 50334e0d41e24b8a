"""Fake tensors built from the geometry of others, in storages of their own, without arithmetic on symbolic sizes.

A storage built here has an identity, by which aliases are recognized, but no size in bytes: computing it takes ten times as
long as the rest of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, disable_fake_tensor_cache, in_kernel_invocation_manager

from torchweave.compiler.ir.symbols import SYMBOLIC, expression, free_symbols

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class TensorGeometry(NamedTuple):
    """The geometry of a fake tensor, read once to make many."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, fake: Tensor) -> TensorGeometry:
        return cls(fake.size(), fake.stride(), fake.storage_offset(), fake.dtype, fake.device)


class FakeTensorFactory:
    """Makes fake tensors of one mode, in storages that the caller names."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._storages: dict[Hashable, Tensor] = {}

    def make(self, like: Tensor, storage: Hashable, device: torch.device | None = None) -> Tensor:
        """A tensor of the geometry of `like` in the named storage, which is created on first use.

        Args:
            device: None for the device of `like`.
        """
        return self.make_as(TensorGeometry.of(like), storage, device)

    def make_as(self, like: TensorGeometry, storage: Hashable, device: torch.device | None = None) -> Tensor:
        """As `make`, with a geometry that was read before."""
        if storage not in self._storages:
            self._storages[storage] = torch.empty(0, dtype=like.dtype, device="meta")
        base = self._storages[storage]
        with in_kernel_invocation_manager(self._mode):  # inside, a fake tensor behaves as the meta tensor that it wraps
            base = base if base.dtype == like.dtype else base.view(like.dtype)
            bare = base.as_strided(like.size, like.stride, like.offset)
        return FakeTensor(self._mode, bare, device or like.device)

    def bind_storage(self, tensor: Tensor, storage: Hashable) -> None:
        """Use the storage of a fake tensor as the named storage."""
        self._storages[storage] = tensor


def geometry(fake: Tensor, ones: bool = True) -> tuple[Hashable, ...]:
    """A hashable key that is equal for fake tensors of equal shape, strides, offset, dtype and device.

    Args:
        ones: also compare the strides of dimensions of size 1, which address nothing.
    """
    strides = [
        stride
        for size, stride in zip(fake.size(), fake.stride(), strict=True)
        if ones or not isinstance(size, int) or size != 1
    ]
    return (fake.dtype, fake.device, *map(expression, (*fake.size(), None, *strides, None, fake.storage_offset())))


class FakeOpCache:
    """Runs operations on the fake values of one graph, each once per geometry of its arguments.

    The layers of a model repeat few distinct operations, and one takes most of a millisecond, nearly all of it arithmetic on
    symbolic sizes.
    """

    def __init__(self, mode: Any, enable_fake_mode: Callable[[], AbstractContextManager[None]]) -> None:
        self._mode, self._enable_fake_mode = mode, enable_fake_mode
        self._results: dict[Hashable, Any] = {}

    def run(self, target: Callable[..., Any] | str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The result of a function, or of a method of the first argument. Raises whatever it raises."""
        tensors: list[Tensor] = []
        try:
            key = (target, _key(args, tensors), _key(kwargs, tensors))
        except _Uncacheable:
            key = None
        if key in self._results:
            return _rebuild_result(self._results[key], tensors, FakeTensorFactory(self._mode))
        # This cache replaces torch's own, whose bookkeeping takes longer than the operation.
        with self._enable_fake_mode(), disable_fake_tensor_cache(self._mode):
            out = run_target(target, args, kwargs)
        if key is None:
            return out
        if _is_cacheable(out) and free_symbols(out) <= free_symbols((args, tuple(kwargs.values()))):
            self._results[key] = _describe_result(out, tensors, {})
        return out


def _is_cacheable(out: Any) -> bool:
    """Whether a result consists of tensors and sizes in tuples and lists, which can be rebuilt."""
    if type(out) in (tuple, list):
        return all(map(_is_cacheable, out))
    return isinstance(out, (Tensor, *SYMBOLIC))


class _Uncacheable(Exception):
    """An argument that cannot be compared."""


def run_target(target: Callable[..., Any] | str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a function, or a method of the first argument by its name."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def _key(thing: Any, tensors: list[Tensor]) -> Hashable:
    """A key that is equal for arguments with results of equal geometry; collects the tensors among the arguments."""
    if isinstance(thing, Tensor):
        tensors.append(thing)
        return geometry(thing)
    if isinstance(thing, SYMBOLIC):
        return ("size", expression(thing))
    if isinstance(thing, Mapping):
        return tuple((name, _key(item, tensors)) for name, item in thing.items())
    if isinstance(thing, (tuple, list)):
        return (type(thing), *(_key(item, tensors) for item in thing))
    if isinstance(thing, slice):
        return (slice, *(_key(item, tensors) for item in (thing.start, thing.stop, thing.step)))
    if thing is None or thing is ... or isinstance(thing, _PLAIN):
        return (type(thing), thing)
    raise _Uncacheable


class _SameAsArgument(NamedTuple):
    """A result that is an argument itself."""

    argument: int


class _InStorage(NamedTuple):
    """A result of this geometry in an argument's storage, or, with a negative number, in a new storage."""

    argument: int
    like: Tensor


def _describe_result(thing: Any, tensors: list[Tensor], fresh: dict[int, int]) -> Any:
    if isinstance(thing, Tensor):
        for number, tensor in enumerate(tensors):
            if thing is tensor:
                return _SameAsArgument(number)
        for number, tensor in enumerate(tensors):
            if thing.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                return _InStorage(number, thing)
        return _InStorage(fresh.setdefault(thing.untyped_storage()._cdata, -1 - len(fresh)), thing)
    if type(thing) in (tuple, list):
        return type(thing)([_describe_result(item, tensors, fresh) for item in thing])
    return thing


def _rebuild_result(description: Any, tensors: list[Tensor], storages: FakeTensorFactory) -> Any:
    if isinstance(description, _SameAsArgument):
        return tensors[description.argument]
    if isinstance(description, _InStorage):
        if description.argument >= 0:
            storages.bind_storage(tensors[description.argument], description.argument)
        return storages.make(description.like, description.argument)
    if type(description) in (tuple, list):
        return type(description)([_rebuild_result(item, tensors, storages) for item in description])
    return description
