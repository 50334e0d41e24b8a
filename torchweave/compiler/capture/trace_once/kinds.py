"""Which layers of a module do the same: built alike, and seen to do alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchweave.compiler.capture.trace_once.found import Kind, Tail
from torchweave.compiler.capture.trace_once.layers import Layer, repeated_layers
from torchweave.compiler.capture.trace_once.tails import find_tails
from torchweave.compiler.capture.trace_once.watch import NotRepeatableError, Record, watch


@dataclass(frozen=True)
class Repeated:
    """What of a module need not be traced.

    Attributes:
        kinds: of layers, each traced once.
        tails: layers that tracing is not even shown.
        why: why it has to be shown all of them; "" when it need not, or when no list ends with layers like others.
    """

    kinds: list[Kind]
    tails: list[Tail]
    why: str = ""

    def facts(self) -> dict[str, Any]:
        """Which layers are traced, how many are cloned from these, and how many of those tracing is not shown."""
        facts = {
            "traced": [kind.first.path for kind in self.kinds if kind.others],
            "cloned": sum(len(kind.others) for kind in self.kinds),
            "left_out": sum(len(tail.skipped_layers) for tail in self.tails),
        }
        return {**facts, "why_shown": self.why} if self.why else facts


def find_repeated(module: nn.Module, inputs: Sequence[Tensor]) -> Repeated | None:
    """The layers that do what others do; None when the module has no list of layers that look alike.

    Raises:
        NotRepeatableError: layers look alike, but it cannot be shown of any two that they do the same.
    """
    lists = repeated_layers(module)
    if not lists:
        return None
    watched = watch(module, inputs, [layer for layers in lists for layer in layers])
    found = [_kinds(layers, watched.records) for layers in lists]
    kinds = [kind for kinds, _ in found for kind in kinds]
    several = [kind for kind in kinds if kind.others]
    if not several:
        raise NotRepeatableError(next((why for _, why in found if why), "forward calls none of the layers"))
    try:
        tails = find_tails(module, inputs, lists, several, watched)
    except NotRepeatableError as error:
        return Repeated(several, [], str(error))
    last = {tail.last.path for tail in tails}
    return Repeated([kind for kind in kinds if kind.others or kind.first.path in last], tails)


def _kinds(layers: list[Layer], records: dict[str, Record]) -> tuple[list[Kind], str]:
    """The layers of a list by what they do, and why the first that is a kind of its own is one."""
    kinds: list[Kind] = []
    why = ""
    for layer in layers:
        if layer.path not in records:
            continue
        record = records[layer.path]
        for kind in kinds:
            if not layer.is_built_like(kind.first):
                continue
            difference = record.difference(kind.record, layer.position - kind.first.position)
            if not difference:
                kind.others.append((layer, record))
                break
            why = why or f"{layer.path} and {kind.first.path}: {difference}"
        else:
            kinds.append(Kind(layer, record, []))
    return kinds, why or "no two layers are built alike"
