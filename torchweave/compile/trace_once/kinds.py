"""Which layers of a module do the same: built alike, and seen to do alike."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from torchweave.compile.trace_once.layers import Layer, repeated_layers
from torchweave.compile.trace_once.stand_in import Kind
from torchweave.compile.trace_once.watch import Record, Unwatchable, watch


def repeated_kinds(module: nn.Module, inputs: Sequence[Tensor]) -> list[Kind]:
    """The kinds of layers of which there are several; empty when the module has no list of layers that look alike.

    Raises:
        Unwatchable: layers look alike, but it cannot be shown of any two that they do the same.
    """
    lists = repeated_layers(module)
    if not lists:
        return []
    records = watch(module, inputs, [layer for layers in lists for layer in layers])
    found = [_kinds(layers, records) for layers in lists]
    kinds = [kind for kinds, _ in found for kind in kinds if kind.others]
    if not kinds:
        raise Unwatchable(next((why for _, why in found if why), "forward calls none of the layers"))
    return kinds


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
