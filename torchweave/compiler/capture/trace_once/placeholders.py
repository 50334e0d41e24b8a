"""Placeholders: while a module is captured, each repeated layer is one opaque node.

The first layer of each kind is traced between two marks; the others are only called, and the tail of a list is one call
behind the last layer before it. The classes of the layers' instances are exchanged inside a `with`; nothing else of them
changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from torchweave.compiler.capture.trace_once.layer_recorder import LayerRecord
from torchweave.compiler.capture.trace_once.repeated_layers import Layer, LayerKind, RepeatedLayers, Tail, skipped_paths

PlaceholderMap = dict[int, tuple[LayerKind, Layer] | Tail]
"""The meaning of the numbers of marks and placeholders in a graph: a layer and its kind, or a tail."""


def begin(number: int, *tensors: Tensor) -> None:
    """Mark the begin of layer `number`, with its arguments."""


def end(number: int, *tensors: Tensor) -> None:
    """Mark the end of layer `number`, with its results."""


def layer_placeholder(number: int, like: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The call of layer or tail `number`; result i has the geometry of argument `like[i]`."""
    return tuple(torch.empty_like(tensors[index]) for index in like)


@contextlib.contextmanager
def placeholder_layers(repeated: RepeatedLayers) -> Iterator[PlaceholderMap]:
    """Replace the forwards of all layers but the first of each kind. Yields the meaning of the numbers in the graph."""
    from torch._dynamo import allow_in_graph

    for function in (begin, end, layer_placeholder):
        allow_in_graph(function)
    meanings: PlaceholderMap = {}
    last = {tail.last.path: tail for tail in repeated.tails}
    skipped = skipped_paths(repeated.tails)
    with contextlib.ExitStack() as patches:
        for kind in repeated.kinds:
            for layer in (kind.first, *(other for other, _ in kind.others)):
                if layer.path in skipped:
                    continue
                number = len(meanings)
                meanings[number] = (kind, layer)
                if layer is not kind.first:
                    patches.enter_context(_patched_forward(layer, _placeholder_forward(number, kind)))
                    continue
                tail_call = _identity
                if layer.path in last:  # always the first of its kind: otherwise it would be in the tail itself
                    tail_call = _tail_call(len(meanings), last[layer.path].record)
                    meanings[len(meanings)] = last[layer.path]
                patches.enter_context(_patched_forward(layer, _traced_forward(number, kind, tail_call)))
        yield meanings


def _traced_forward(number: int, kind: LayerKind, tail_call: Callable[[Any], Any]) -> Callable[..., Any]:
    """The first layer of a kind between its marks, followed by the tail of its list, a function of the layer's result."""
    arguments, results = _tuple_of(kind.record.tensors, "args, kwargs"), _tuple_of(kind.record.outputs, "out")
    module = kind.first.module
    own = vars(module).get("forward")
    original = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin(number, *arguments(args, kwargs))
        out = original(self, *args, **kwargs) if own is None else own(*args, **kwargs)
        end(number, *results(out))
        return tail_call(out)

    return forward


def _placeholder_forward(number: int, kind: LayerKind) -> Callable[..., Any]:
    """A repeated layer as one call."""
    arguments, like = _tuple_of(kind.record.tensors, "args, kwargs"), kind.record.like
    rebuild = eval(f"lambda t: {kind.record.rebuild}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return rebuild(layer_placeholder(number, like, *arguments(args, kwargs)))

    return forward


def _tail_call(number: int, record: LayerRecord) -> Callable[[Any], Any]:
    """The tail of a list as one call on the result of the layer before it, which has this record."""
    results, like = _tuple_of(record.outputs, "out"), tuple(range(len(record.outputs)))
    rebuild = eval(f"lambda t: {record.rebuild}")
    return lambda out: rebuild(layer_placeholder(number, like, *results(out)))


def _identity(out: Any) -> Any:
    return out


def _tuple_of(expressions: Sequence[str], names: str) -> Callable[..., tuple[Tensor, ...]]:
    """A function of `names` that returns a tuple of the expressions, which are subscripts of those names alone."""
    return eval(f"lambda {names}: ({''.join(f'{item}, ' for item in expressions)})")


@contextlib.contextmanager
def _patched_forward(layer: Layer, forward: Callable[..., Any]) -> Iterator[None]:
    """Give the layer another forward: by a subclass for this one instance, or, where the instance has a forward of its own,
    as that (it may call the forward of its class)."""
    module, original = layer.module, type(layer.module)
    own = vars(module).get("forward")
    if own is not None:
        module.forward = MethodType(forward, module)
    else:
        body = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        module.__class__ = subclass = type(original.__name__, (original,), body)
        subclass.forward = forward  # set last: a base class may wrap the forward that a new class defines
    try:
        yield
    finally:
        module.__class__ = original
        if own is not None:
            module.forward = own
