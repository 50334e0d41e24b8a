"""What is known of a module's layers once it has been watched: which of them need not be traced, and what they are then."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from torchweave.compiler.capture.trace_once.layers import Layer
from torchweave.compiler.capture.trace_once.watch import Record

Wire = tuple[str, str, int]
"""Where a tensor that a layer takes comes from: `("result" or "argument", path of a layer, index)`."""


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


@dataclass(frozen=True)
class SkippedLayer:
    """A layer of a tail: its kind, what it does, and where the tensors that it takes come from."""

    kind: Kind
    layer: Layer
    record: Record
    given: tuple[Wire, ...]


@dataclass(frozen=True)
class Tail:
    """The layers at the end of a list that tracing is not shown.

    Attributes:
        container: the list.
        last: the layer before them.
        record: what that one does.
    """

    container: nn.Module
    last: Layer
    record: Record
    skipped_layers: tuple[SkippedLayer, ...]


PlaceholderMap = dict[int, tuple[Kind, Layer] | Tail]
"""What the numbers of marks and stand-ins in a graph mean: a layer and its kind, or a tail."""
