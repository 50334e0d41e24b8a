"""Run a module once on tensors without values and write down what each layer does: the proof that two layers are one.

A layer's record holds every operation of ATen and every custom op in order, with all plain arguments, the geometry of all
results, and for each tensor where it comes from: an argument of the layer, its own parameter by name, an earlier result, or
something else by identity. Two layers with equal records compute the same; only a number that counts layers and goes
into a custom op (which attention's cache this is) may differ, and then by as much as their positions do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchweave.compiler.capture.trace_once.layers import Layer

_META = torch.device("meta")
_FACTS = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "requires_grad", "grad_fn"}
)
"""Attributes of a tensor that are no operations."""
_TORCH_NAMESPACES = ("aten", "prims", "prim")


class NotRepeatableError(Exception):
    """The run cannot show that layers do the same; the message says why."""


@dataclass
class Record:
    """What one call of a layer did.

    Attributes:
        calls: operations with their arguments (tensors by label) and the geometry of their results.
        numbers: whole numbers handed to custom ops, in order: `(op, which call of it, argument) -> number`.
        arguments, result: the layer's arguments and result with tensors by label, and their geometry.
        tensors: how to reach each tensor among the arguments, as Python over `args` and `kwargs`.
        outputs: how to reach each tensor of the result, as Python over `out`.
        rebuild: the result as Python over `t`, the tuple of those tensors.
        like: for each tensor of the result, which tensor of the arguments has the same geometry.
        given: for each tensor among the arguments, where in the whole forward it comes from; see `Outline`.
        refusal: why nothing may stand in for the layer, or "".
    """

    calls: list[Any] = field(default_factory=list)
    numbers: dict[tuple[str, int, int], int] = field(default_factory=dict)
    arguments: Any = None
    result: Any = None
    tensors: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    rebuild: str = ""
    like: tuple[int, ...] = ()
    refusal: str = ""
    given: list[Any] = field(default_factory=list)

    def difference(self, other: Record, position_offset: int) -> str:
        """What this layer, `position_offset` positions behind the other one, does that the other does not; "" for nothing."""
        if refusal := self.refusal or other.refusal:
            return refusal
        if (self.arguments, self.result) != (other.arguments, other.result):
            return "arguments or result differ"
        for mine, theirs in zip(self.calls, other.calls, strict=False):
            if mine != theirs:
                return f"{mine[0]} differs"
        if len(self.calls) != len(other.calls):
            return "one does more than the other"
        for where, number in self.numbers.items():  # the same keys, or the calls would differ
            if number - other.numbers[where] not in (0, position_offset):
                return f"{where[0]} takes another number"
        return ""


class Outline:
    """What a forward does outside its layers, and which layers it calls with what, in order.

    Attributes:
        entries: `("layer", path, arguments)`, `("op", name, arguments, geometry of the results)`, `("function", name)` and last
            `("returns", result)`. Tensors go by where they come from: an input, the result of an operation or of a layer,
            else by identity.
    """

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.labels: dict[int, Any] = {}
        self._operations = 0

    def operation(self, name: str, given: Any, out: Any) -> None:
        self.entries.append(("op", name, given, _geometry(out)))
        for index, result in enumerate(_flat(out)):
            if isinstance(result, Tensor):
                self.labels.setdefault(id(result), ("result", self._operations, index))
        self._operations += 1


@dataclass(frozen=True)
class Watched:
    """What a run of a module showed.

    Attributes:
        records: what each layer did, by path.
        kept: everything that the outline names by identity, so that it goes on to name nothing else.
    """

    records: dict[str, Record]
    outline: Outline
    kept: list[Tensor]


def watch(module: nn.Module, inputs: Sequence[Tensor], layers: Sequence[Layer]) -> Watched:
    """The record of every layer that is called, and what happens between them.

    Args:
        inputs: what forward is called with; geometry only.

    Raises:
        NotRepeatableError: the module cannot be run without values, or calls one layer in another.
    """
    watcher = _Watcher()
    with contextlib.ExitStack() as hooks, torch.no_grad():
        hooks.enter_context(_buffers_kept(module))
        for layer in layers:
            hooks.enter_context(_listening(layer, watcher))
        try:
            given = [tensor.to("meta") for tensor in inputs]
            watcher.begin(given)
            with watcher, _FunctionsBetween(watcher):
                watcher.end(module(*given))
        except NotRepeatableError:
            raise
        except Exception as error:  # whatever forward raises: capture will say it properly
            raise NotRepeatableError(f"it does not run without values ({type(error).__name__})") from error
    return Watched(watcher.records, watcher.outline, watcher.kept)


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Afterwards the module has its own buffers again: some forwards replace one by a copy on the device of their input."""
    kept = [(each, dict(each._buffers)) for each in module.modules() if each._buffers]
    try:
        yield
    finally:
        for each, buffers in kept:
            each._buffers.clear()
            each._buffers.update(buffers)


@contextlib.contextmanager
def _listening(layer: Layer, watcher: _Watcher) -> Iterator[None]:
    before = layer.module.register_forward_pre_hook(
        lambda _, args, kwargs: watcher.enter(layer, args, kwargs), with_kwargs=True
    )
    after = layer.module.register_forward_hook(lambda _, args, out: watcher.leave(out), prepend=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


class _FunctionsBetween(TorchFunctionMode):
    """Puts functions of torch that are called between layers into the outline: not all of them come to an operation."""

    def __init__(self, watcher: _Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self._watcher.is_in_layer():
            name = getattr(func, "__name__", repr(func))
            if name == "__get__":
                name = getattr(getattr(func, "__self__", None), "__name__", name)
            if name not in _FACTS:
                self._watcher.outline.entries.append(("function", name))
        return func(*args, **(kwargs or {}))


class _Watcher(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, Record] = {}
        self.outline = Outline()
        self.kept: list[Tensor] = []  # an id names a tensor only while the tensor lives
        self._current: Record | None = None
        self._labels: dict[int, Any] = {}
        self._given_before: dict[Any, Any] = {}
        self._twins: dict[int, Tensor] = {}
        self._times: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        record, name = self._current, str(func)
        if record is None:
            given = self._describe((args, kwargs))
            out = self._on_meta(func, args, kwargs)
            self.outline.operation(name, given, out)
            self.kept += [result for result in _flat(out) if isinstance(result, Tensor)]
            return out
        counted = func.namespace not in _TORCH_NAMESPACES
        given = self._describe(self._without_numbers(name, record, args, kwargs) if counted else (args, kwargs))
        out = self._on_meta(func, args, kwargs) if counted else self._again(func, (name, given), args, kwargs)
        number = len(record.calls)
        for index, result in enumerate(_flat(out)):
            self._label(result, ("result", number, index))
        record.calls.append((name, given, _geometry(out)))
        return out

    def _again(self, func: Any, call: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation, or, where another layer ran it on arguments of the same geometry, make what it gave."""
        if not _is_functional(func):
            return self._on_meta(func, args, kwargs)
        key = (call, _geometry(args), _geometry(tuple(kwargs.values())))
        if key not in self._given_before:
            out = self._on_meta(func, args, kwargs)
            if isinstance(out, Tensor):
                self._given_before[key] = (out.size(), out.stride(), out.dtype)
            return out
        size, stride, dtype = self._given_before[key]
        return torch.empty_strided(size, stride, dtype=dtype, device=_META)

    def _on_meta(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation on tensors without memory, and make none that has any."""
        args = tuple(map(self._bare, args))
        kwargs = {name: self._bare(argument) for name, argument in kwargs.items()}
        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        return func(*args, **kwargs)

    def _bare(self, thing: Any) -> Any:
        if isinstance(thing, Tensor) and thing.device.type != "meta":
            if id(thing) not in self._twins:
                self.kept.append(thing)
                self._twins[id(thing)] = torch.empty_strided(
                    thing.size(), thing.stride(), dtype=thing.dtype, device=_META
                )
            return self._twins[id(thing)]
        return [self._bare(item) for item in thing] if isinstance(thing, (tuple, list)) else thing

    def is_in_layer(self) -> bool:
        return self._current is not None

    def begin(self, inputs: Sequence[Tensor]) -> None:
        self.kept += inputs
        self.outline.labels.update({id(tensor): ("input", index) for index, tensor in enumerate(inputs)})

    def end(self, out: Any) -> None:
        self.outline.entries.append(("returns", self._describe(out), _geometry(out)))

    def enter(self, layer: Layer, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if self._current is not None:
            raise NotRepeatableError(f"{layer.path} is called within another layer")
        self.outline.entries.append(("layer", layer.path, self._describe((args, dict(kwargs)))))
        record = self._current = Record()
        self._layer = layer
        if layer.path in self.records:
            record.refusal = f"{layer.path} is called more than once"
        self.records[layer.path] = record
        self._labels, self._times = {}, {}
        for name, tensor in own_tensors(layer.module).items():
            self._label(tensor, ("own", name, _geometry(tensor)))
        leaves = [*_walk(args, "args"), *_walk(dict(kwargs), "kwargs")]
        for index, (_, leaf) in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._label(leaf, ("argument", index))
        record.tensors = [where for where, leaf in leaves if isinstance(leaf, Tensor)]
        record.arguments = (self._describe((args, dict(kwargs))), _geometry([leaf for _, leaf in leaves]))
        self._inputs = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
        record.given = [self.outline.labels.get(id(tensor), ("other", id(tensor))) for tensor in self._inputs]

    def leave(self, out: Any) -> None:
        record = self._current
        assert record is not None
        leaves = list(_walk(out, "out"))
        found = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
        record.outputs = [where for where, leaf in leaves if isinstance(leaf, Tensor)]
        record.result = (self._describe(out), _geometry(out))
        kinds = [_geometry(tensor) for tensor in self._inputs]
        if any(_geometry(tensor) not in kinds for tensor in found):
            record.refusal = "a layer returns a tensor of another shape than those that it takes"
        elif len({tensor.untyped_storage()._cdata for tensor in found}) < len(found):
            record.refusal = "a layer returns tensors that share memory"
        elif any(not _can_be_rebuilt(leaf) for _, leaf in leaves):
            record.refusal = "a layer returns what is neither a tensor nor a constant"
        else:
            record.rebuild = _rebuild(out, iter(range(len(found))))
            record.like = tuple(kinds.index(_geometry(tensor)) for tensor in found)
        for index, tensor in enumerate(found):  # one that it was given keeps the name that it had
            self.outline.labels.setdefault(id(tensor), ("layer", self._layer.path, index))
        self.kept += found
        self._current, self._labels = None, {}

    def _label(self, thing: Any, label: Any) -> None:
        if isinstance(thing, Tensor):
            self._labels.setdefault(id(thing), label)
            self.kept.append(thing)

    def _describe(self, thing: Any) -> Any:
        """A value that is equal for two layers exactly when the things are the same to them."""
        if isinstance(thing, Tensor):
            known = self._labels.get(id(thing)) or self.outline.labels.get(id(thing))
            if known is None:
                self.kept.append(thing)
            return known or ("other", id(thing))
        if isinstance(thing, (tuple, list)):
            return (type(thing).__name__, *map(self._describe, thing))
        if isinstance(thing, Mapping):
            return tuple((key, self._describe(value)) for key, value in thing.items())
        if thing is None or isinstance(
            thing, (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)
        ):
            return (type(thing).__name__, repr(thing))
        return (type(thing).__name__, id(thing))

    def _without_numbers(self, name: str, record: Record, args: tuple, kwargs: dict) -> Any:
        """A custom op's arguments; whole numbers are set aside, to be compared by how far they moved."""
        time = self._times[name] = self._times.get(name, -1) + 1
        kept: list[Any] = []
        for index, argument in enumerate(args):
            if isinstance(argument, int) and not isinstance(argument, bool):
                record.numbers[name, time, index] = argument
                kept.append("number")
            else:
                kept.append(argument)
        return kept, kwargs


@functools.cache
def _is_functional(func: Any) -> bool:
    """Whether an operation writes to nothing and gives new tensors only."""
    schema = func._schema
    return all(item.alias_info is None for item in (*schema.arguments, *schema.returns))


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a layer by name."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _flat(thing: Any) -> list[Any]:
    return list(thing) if isinstance(thing, (tuple, list)) else [thing]


def _geometry(thing: Any) -> Any:
    if isinstance(thing, Tensor):
        return (tuple(thing.shape), thing.stride(), thing.storage_offset(), thing.dtype, thing.device)
    return tuple(map(_geometry, thing)) if isinstance(thing, (tuple, list)) else None


def _walk(thing: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of nested tuples, lists and dicts, and the Python expression that reaches it."""
    if type(thing) in (tuple, list):
        for index, item in enumerate(thing):
            yield from _walk(item, f"{where}[{index}]")
    elif type(thing) is dict:
        for key, item in thing.items():
            yield from _walk(item, f"{where}[{key!r}]")
    else:
        yield where, thing


def _rebuild(thing: Any, numbers: Iterator[int]) -> str:
    if isinstance(thing, Tensor):
        return f"t[{next(numbers)}]"
    if type(thing) in (tuple, list):
        inner = "".join(f"{_rebuild(item, numbers)}, " for item in thing)
        return f"({inner})" if isinstance(thing, tuple) else f"[{inner}]"
    if type(thing) is dict:
        return f"{{{''.join(f'{key!r}: {_rebuild(item, numbers)}, ' for key, item in thing.items())}}}"
    return repr(thing)


def _can_be_rebuilt(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (Tensor, bool, int, str))
