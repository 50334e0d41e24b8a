"""Find the layers of a module that need not be traced, because they repeat an earlier one.

    module      embed, L0, L1, L2, ... L31, norm          L1 to L31 repeat L0
    traced      embed, L0, norm, and one call for each of L1 to L31

Equal structure (classes, attributes, shapes; numbers may move with the position) proves nothing: a recorded run
(`record_layers`) has to show that layers are the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchweave.compiler.cache.keys import DescriptionCache, describe_module
from torchweave.compiler.capture.trace_once.layer_recorder import LayerRecord, NotRepeatableError, record_layers

MIN_LAYERS = 3
"""A shorter list is traced in full: the saving would be small."""
_NUMBER = re.compile(r"\d+")
_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True, eq=False)
class Layer:
    """A member of a list of modules.

    Attributes:
        path: its name in the whole module, `model.layers.3`.
        position: its index in the list.
        structure: its description as text, without the numbers in it.
        numbers: those numbers, in the order of the text.
    """

    path: str
    position: int
    module: nn.Module
    structure: str
    numbers: tuple[int, ...]

    def is_built_like(self, other: Layer) -> bool:
        """Whether both have the same structure, and each number is the same or moves with the position."""
        position_offset = self.position - other.position
        return self.structure == other.structure and all(
            own - number in (0, position_offset) for own, number in zip(self.numbers, other.numbers, strict=True)
        )


@dataclass(frozen=True)
class LayerKind:
    """Layers that are the same.

    Attributes:
        first: the layer that is traced.
        record: of the first layer.
        others: the layers that are cloned from it, each with its record.
    """

    first: Layer
    record: LayerRecord
    others: list[tuple[Layer, LayerRecord]]


def trace_once_facts(kinds: Sequence[LayerKind]) -> dict[str, Any]:
    """Fields of the `trace_once` event: traced layers, and the number of cloned ones."""
    return {"traced": [kind.first.path for kind in kinds], "cloned": sum(len(kind.others) for kind in kinds)}


def find_repeated(module: nn.Module, inputs: Sequence[Any]) -> list[LayerKind] | None:
    """The kinds of layers that are repeated; None when no list of the module has two layers of one structure.

    Raises:
        NotRepeatableError: layers have one structure, but no two of them can be shown to be the same.
    """
    lists = layer_lists(module)
    if not lists:
        return None
    records = record_layers(module, inputs, {layer.path: layer.module for layers in lists for layer in layers})
    groups = [_group(layers, records) for layers in lists]
    repeated = [kind for kinds, _ in groups for kind in kinds if kind.others]
    if not repeated:
        raise NotRepeatableError(next((why for _, why in groups if why), "forward calls none of the layers"))
    return repeated


def layer_lists(module: nn.Module) -> list[list[Layer]]:
    """The members of every outermost list with at least two members of one structure."""
    return list(_search(module, "", set(), {}))


def _search(module: nn.Module, path: str, seen: set[int], cache: DescriptionCache) -> Iterator[list[Layer]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, _LISTS) and len(module) >= MIN_LAYERS:
        layers = [
            _layer(child, path + name, position, cache)
            for position, (name, child) in enumerate(module._modules.items())
            if child is not None
        ]
        if max(Counter(layer.structure for layer in layers).values(), default=0) > 1:
            yield layers
            return
    for name, child in module.named_children():
        yield from _search(child, f"{path}{name}.", seen, cache)


def _layer(module: nn.Module, path: str, position: int, cache: DescriptionCache) -> Layer:
    text = describe_module(module, cache)
    return Layer(path, position, module, _NUMBER.sub("#", text), tuple(map(int, _NUMBER.findall(text))))


def _group(layers: list[Layer], records: dict[str, LayerRecord]) -> tuple[list[LayerKind], str]:
    """The layers of a list by kind, and the reason why the first layer with a kind of its own has one."""
    kinds: list[LayerKind] = []
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
            kinds.append(LayerKind(layer, record, []))
    return kinds, why or "no two layers have the same structure"
