"""Stand-ins: while a module is captured, layers that repeat another one are one opaque node each.

Of each kind the first layer is traced as it is, between two marks; the others are only called. Classes of the layers'
instances are exchanged for the while of a `with`, and nothing else about them changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchweave.compile.trace_once.layers import Layer
from torchweave.compile.trace_once.watch import Record


@dataclass(frozen=True)
class Kind:
    """Layers that do the same.

    Attributes:
        first: the one that is traced.
        record: what it does.
        others: those that are cloned from it, each with the numbers that its custom ops take.
    """

    first: Layer
    record: Record
    others: list[tuple[Layer, Record]]


def begin(number: int, *tensors: Tensor) -> None:
    """A mark: layer `number` begins, with these arguments."""


def end(number: int, *tensors: Tensor) -> None:
    """A mark: layer `number` ends, with these results."""


def stand_in(number: int, like: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The call of layer `number`; its results have the geometry of those of its arguments that `like` counts."""
    return tuple(torch.empty_like(tensors[index]) for index in like)


@contextlib.contextmanager
def standing_in(kinds: Sequence[Kind]) -> Iterator[dict[int, tuple[Kind, Layer]]]:
    """Trace only the first layer of each kind meanwhile. Yields what the numbers in the graph mean."""
    from torch._dynamo import allow_in_graph

    for function in (begin, end, stand_in):
        allow_in_graph(function)
    meaning: dict[int, tuple[Kind, Layer]] = {}
    with contextlib.ExitStack() as exchanged:
        for kind in kinds:
            for layer in (kind.first, *(other for other, _ in kind.others)):
                number = len(meaning)
                meaning[number] = (kind, layer)
                make = _marked if layer is kind.first else _opaque
                exchanged.enter_context(_exchanged(layer, make(number, kind)))
        yield meaning


def _marked(number: int, kind: Kind) -> Callable[..., Any]:
    arguments, results = _tuple_of(kind.record.tensors, "args, kwargs"), _tuple_of(kind.record.outputs, "out")
    module = kind.first.module
    own = vars(module).get("forward")
    original = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin(number, *arguments(args, kwargs))
        out = original(self, *args, **kwargs) if own is None else own(*args, **kwargs)
        end(number, *results(out))
        return out

    return forward


def _opaque(number: int, kind: Kind) -> Callable[..., Any]:
    arguments, like = _tuple_of(kind.record.tensors, "args, kwargs"), kind.record.like
    rebuild = eval(f"lambda t: {kind.record.rebuild}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return rebuild(stand_in(number, like, *arguments(args, kwargs)))

    return forward


def _tuple_of(expressions: Sequence[str], names: str) -> Callable[..., tuple[Tensor, ...]]:
    """A function of `names` that returns a tuple of the expressions, which are subscripts of those names alone."""
    return eval(f"lambda {names}: ({''.join(f'{item}, ' for item in expressions)})")


@contextlib.contextmanager
def _exchanged(layer: Layer, forward: Callable[..., Any]) -> Iterator[None]:
    """The layer with another forward: a subclass of its class for this one instance."""
    module, original = layer.module, type(layer.module)
    own = vars(module).pop("forward", None)
    body = {"forward": forward, "__module__": original.__module__, "__qualname__": original.__qualname__}
    module.__class__ = type(original.__name__, (original,), body)
    try:
        yield
    finally:
        module.__class__ = original
        if own is not None:
            module.forward = own
