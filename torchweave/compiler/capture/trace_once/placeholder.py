"""Stand-ins: while a module is captured, layers that repeat another one are one opaque node each.

Of each kind the first layer is traced as it is, between two marks; the others are only called, and the whole tail of a list is one
call behind the last layer that is shown. Classes of the layers' instances are exchanged for the while of a `with`, and nothing
else about them changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from torchweave.compiler.capture.trace_once.found import Kind, PlaceholderMap, Tail
from torchweave.compiler.capture.trace_once.layers import Layer
from torchweave.compiler.capture.trace_once.watch import Record


def begin(number: int, *tensors: Tensor) -> None:
    """A mark: layer `number` begins, with these arguments."""


def end(number: int, *tensors: Tensor) -> None:
    """A mark: layer `number` ends, with these results."""


def layer_placeholder(number: int, like: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The call of layer or tail `number`; its results have the geometry of those of its arguments that `like` counts."""
    return tuple(torch.empty_like(tensors[index]) for index in like)


@contextlib.contextmanager
def lazy_modules(kinds: Sequence[Kind], tails: Sequence[Tail]) -> Iterator[PlaceholderMap]:
    """Trace only the first layer of each kind meanwhile, and nothing of tails. Yields what the numbers in the graph mean."""
    from torch._dynamo import allow_in_graph

    for function in (begin, end, layer_placeholder):
        allow_in_graph(function)
    placeholder_map: PlaceholderMap = {}
    last = {tail.last.path: tail for tail in tails}
    gone = {each.layer.path for tail in tails for each in tail.skipped_layers}
    with contextlib.ExitStack() as exchanged:
        for kind in kinds:
            for layer in (kind.first, *(other for other, _ in kind.others)):
                if layer.path in gone:
                    continue
                number = len(placeholder_map)
                placeholder_map[number] = (kind, layer)
                rest = _as_it_is
                if layer.path in last:  # the first of its kind, or it would be left out itself
                    rest = _rest(len(placeholder_map), last[layer.path].record)
                    placeholder_map[len(placeholder_map)] = last[layer.path]
                forward = (
                    _traced_forward(number, kind, rest) if layer is kind.first else _placeholder_forward(number, kind)
                )
                exchanged.enter_context(_patched_forward(layer, forward))
        yield placeholder_map


def _traced_forward(number: int, kind: Kind, rest: Callable[[Any], Any]) -> Callable[..., Any]:
    """The first layer of a kind between its marks, and then the `rest` of its list, a function of the layer's result."""
    arguments, results = _tuple_of(kind.record.tensors, "args, kwargs"), _tuple_of(kind.record.outputs, "out")
    module = kind.first.module
    own = vars(module).get("forward")
    original = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin(number, *arguments(args, kwargs))
        out = original(self, *args, **kwargs) if own is None else own(*args, **kwargs)
        end(number, *results(out))
        return rest(out)

    return forward


def _placeholder_forward(number: int, kind: Kind) -> Callable[..., Any]:
    """One more layer of a kind as one call."""
    arguments, like = _tuple_of(kind.record.tensors, "args, kwargs"), kind.record.like
    rebuild = eval(f"lambda t: {kind.record.rebuild}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return rebuild(layer_placeholder(number, like, *arguments(args, kwargs)))

    return forward


def _rest(number: int, record: Record) -> Callable[[Any], Any]:
    """The tail of a list as one call on the result of the last layer that is shown, whose record this is."""
    results, like = _tuple_of(record.outputs, "out"), tuple(range(len(record.outputs)))
    rebuild = eval(f"lambda t: {record.rebuild}")
    return lambda out: rebuild(layer_placeholder(number, like, *results(out)))


def _as_it_is(out: Any) -> Any:
    return out


def _tuple_of(expressions: Sequence[str], names: str) -> Callable[..., tuple[Tensor, ...]]:
    """A function of `names` that returns a tuple of the expressions, which are subscripts of those names alone."""
    return eval(f"lambda {names}: ({''.join(f'{item}, ' for item in expressions)})")


@contextlib.contextmanager
def _patched_forward(layer: Layer, forward: Callable[..., Any]) -> Iterator[None]:
    """The layer with another forward: a subclass of its class for this one instance, or a forward of the instance's own where
    it has one, which may ask for that of its class."""
    module, original = layer.module, type(layer.module)
    own = vars(module).get("forward")
    if own is not None:
        module.forward = MethodType(forward, module)
    else:
        body = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        module.__class__ = subclass = type(original.__name__, (original,), body)
        subclass.forward = forward  # only now: a base class may wrap the forward that a new class brings
    try:
        yield
    finally:
        module.__class__ = original
        if own is not None:
            module.forward = own
