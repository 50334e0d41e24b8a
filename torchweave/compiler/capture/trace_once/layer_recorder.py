"""Run a module once on meta tensors and record the operations of each layer, to prove that two layers are the same.

A record holds every ATen operation and custom op in order, with all plain arguments, the geometry of all results, and the
origin of each tensor: an argument of the layer, its own parameter by name, an earlier result, or any other tensor by identity.
Layers with equal records compute the same. Only an integer argument of a custom op that counts layers (the index of attention's
cache) may differ, and then by the difference of the positions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_META = torch.device("meta")
_TORCH_NAMESPACES = ("aten", "prims", "prim")


class NotRepeatableError(Exception):
    """The run does not prove that layers are the same; the message gives the reason."""


@dataclass
class LayerRecord:
    """One call of a layer.

    Attributes:
        calls: operations with their arguments (tensors by label) and the geometry of their results.
        numbers: integer arguments of custom ops, in order: `(op, index of the call, argument) -> integer`.
        arguments, result: the layer's arguments and result with tensors by label, and their geometry.
        tensors: Python expressions over `args` and `kwargs` for the tensors among the arguments.
        outputs: Python expressions over `out` for the tensors of the result.
        rebuild: Python expression of the result over `t`, the tuple of those tensors.
        like: for each tensor of the result, the index of a tensor argument with the same geometry.
        refusal: the reason why no placeholder can replace the layer, or "".
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

    def difference(self, other: LayerRecord, position_offset: int) -> str:
        """The first difference from a layer `position_offset` positions earlier; "" when there is none."""
        if refusal := self.refusal or other.refusal:
            return refusal
        if (self.arguments, self.result) != (other.arguments, other.result):
            return "arguments or result differ"
        for own_call, other_call in zip(self.calls, other.calls, strict=False):
            if own_call != other_call:
                return f"{own_call[0]} differs"
        if len(self.calls) != len(other.calls):
            return "the number of operations differs"
        for where, number in self.numbers.items():  # both have the same keys, or the calls would differ
            if number - other.numbers[where] not in (0, position_offset):
                return f"{where[0]} takes a different integer"
        return ""


def record_layers(module: nn.Module, inputs: Sequence[Any], layers: Mapping[str, nn.Module]) -> dict[str, LayerRecord]:
    """Record every layer that forward calls; returns the records by path.

    Args:
        inputs: the arguments of forward; of tensors only the geometry is read.
        layers: the layers by path.

    Raises:
        NotRepeatableError: the module cannot run on meta tensors, or calls one layer inside another.
    """
    recorder = _Recorder()
    with contextlib.ExitStack() as hooks, torch.no_grad():
        hooks.enter_context(_restored_buffers(module))
        for path, layer in layers.items():
            before = functools.partial(recorder.enter, path)
            handle = layer.register_forward_pre_hook(before, with_kwargs=True)
            hooks.callback(handle.remove)
            hooks.callback(layer.register_forward_hook(recorder.leave, prepend=True).remove)
        try:
            meta_inputs = [each.to("meta") if isinstance(each, Tensor) else each for each in inputs]
            with recorder:
                module(*meta_inputs)
        except NotRepeatableError:
            raise
        except Exception as error:  # forward may raise anything; the capture that follows reports it in full
            raise NotRepeatableError(f"forward cannot run on meta tensors ({type(error).__name__})") from error
    return recorder.records


@contextlib.contextmanager
def _restored_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers on exit: some forwards replace a buffer by a copy on the device of their input."""
    saved = [(owner, dict(owner._buffers)) for owner in module.modules() if owner._buffers]
    try:
        yield
    finally:
        for owner, buffers in saved:
            owner._buffers.clear()
            owner._buffers.update(buffers)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, LayerRecord] = {}
        self._keep_alive: list[Tensor] = []  # an id names a tensor only while the tensor lives
        self._current: LayerRecord | None = None
        self._inputs: list[Tensor] = []
        self._labels: dict[int, Any] = {}
        self._results: dict[Any, Any] = {}
        self._meta_copies: dict[int, Tensor] = {}
        self._num_calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        record, name = self._current, str(func)
        if record is None:
            return self._on_meta(func, args, kwargs)
        is_custom = func.namespace not in _TORCH_NAMESPACES
        arguments = self._describe(self._without_numbers(name, record, args, kwargs) if is_custom else (args, kwargs))
        out = self._on_meta(func, args, kwargs) if is_custom else self._run(func, (name, arguments), args, kwargs)
        number = len(record.calls)
        for index, result in enumerate(_flat(out)):
            self._label(result, ("result", number, index))
        record.calls.append((name, arguments, _geometry(out)))
        return out

    def _run(self, func: Any, call: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation; reuse the result's geometry when another layer ran it on arguments of the same geometry."""
        if not _is_functional(func):
            return self._on_meta(func, args, kwargs)
        key = (call, _geometry(args), _geometry(tuple(kwargs.values())))
        if key not in self._results:
            out = self._on_meta(func, args, kwargs)
            if isinstance(out, Tensor):
                self._results[key] = (out.size(), out.stride(), out.dtype)
            return out
        size, stride, dtype = self._results[key]
        return torch.empty_strided(size, stride, dtype=dtype, device=_META)

    def _on_meta(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation on meta tensors, with meta results."""
        args = tuple(map(self._to_meta, args))
        kwargs = {name: self._to_meta(argument) for name, argument in kwargs.items()}
        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        return func(*args, **kwargs)

    def _to_meta(self, thing: Any) -> Any:
        if isinstance(thing, Tensor) and thing.device.type != "meta":
            if id(thing) not in self._meta_copies:
                self._keep_alive.append(thing)
                self._meta_copies[id(thing)] = torch.empty_strided(
                    thing.size(), thing.stride(), dtype=thing.dtype, device=_META
                )
            return self._meta_copies[id(thing)]
        return [self._to_meta(item) for item in thing] if isinstance(thing, (tuple, list)) else thing

    def enter(self, path: str, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Begin the record of a layer: its forward pre-hook."""
        if self._current is not None:
            raise NotRepeatableError(f"{path} is called inside another layer")
        record = self._current = LayerRecord()
        if path in self.records:
            record.refusal = f"{path} is called more than once"
        self.records[path] = record
        self._labels, self._num_calls = {}, {}
        for name, tensor in own_tensors(module).items():
            self._label(tensor, ("own", name, _geometry(tensor)))
        leaves = [*_walk(args, "args"), *_walk(dict(kwargs), "kwargs")]
        for index, (_, leaf) in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._label(leaf, ("argument", index))
        record.tensors = [where for where, leaf in leaves if isinstance(leaf, Tensor)]
        record.arguments = (self._describe((args, dict(kwargs))), _geometry([leaf for _, leaf in leaves]))
        self._inputs = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]

    def leave(self, module: nn.Module, args: tuple, out: Any) -> None:
        """Complete the record of the current layer: its forward hook."""
        record = self._current
        assert record is not None
        leaves = list(_walk(out, "out"))
        results = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
        record.outputs = [where for where, leaf in leaves if isinstance(leaf, Tensor)]
        record.result = (self._describe(out), _geometry(out))
        geometries = [_geometry(tensor) for tensor in self._inputs]
        if any(_geometry(tensor) not in geometries for tensor in results):
            record.refusal = "a layer returns a tensor with a geometry that none of its inputs has"
        elif len({tensor.untyped_storage()._cdata for tensor in results}) < len(results):
            record.refusal = "a layer returns tensors that share memory"
        elif any(not _can_be_rebuilt(leaf) for _, leaf in leaves):
            record.refusal = "a layer returns a value that is neither a tensor nor a constant"
        else:
            record.rebuild = _rebuild(out, iter(range(len(results))))
            record.like = tuple(geometries.index(_geometry(tensor)) for tensor in results)
        self._current, self._labels = None, {}

    def _label(self, thing: Any, label: Any) -> None:
        if isinstance(thing, Tensor):
            self._labels.setdefault(id(thing), label)
            self._keep_alive.append(thing)

    def _describe(self, thing: Any) -> Any:
        """A value that is equal for two layers exactly when the two things play the same role in them."""
        if isinstance(thing, Tensor):
            label = self._labels.get(id(thing))
            if label is None:
                self._keep_alive.append(thing)
            return label or ("other", id(thing))
        if isinstance(thing, (tuple, list)):
            return (type(thing).__name__, *map(self._describe, thing))
        if isinstance(thing, Mapping):
            return tuple((key, self._describe(value)) for key, value in thing.items())
        if thing is None or isinstance(
            thing, (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)
        ):
            return (type(thing).__name__, repr(thing))
        return (type(thing).__name__, id(thing))

    def _without_numbers(self, name: str, record: LayerRecord, args: tuple, kwargs: dict) -> Any:
        """A custom op's arguments without its integers, which go to the record to be compared by their differences."""
        index_of_call = self._num_calls[name] = self._num_calls.get(name, -1) + 1
        rest: list[Any] = []
        for index, argument in enumerate(args):
            if isinstance(argument, int) and not isinstance(argument, bool):
                record.numbers[name, index_of_call, index] = argument
                rest.append("number")
            else:
                rest.append(argument)
        return rest, kwargs


@functools.cache
def _is_functional(func: Any) -> bool:
    """Whether an operation writes to no argument and returns only new tensors."""
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
    """Each leaf of nested tuples, lists and dicts, with the Python expression that reaches it."""
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
