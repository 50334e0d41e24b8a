"""Find repeated layers in any module: members of a list that are built alike but for numbers that count them.

Nothing is concluded from that alone: a run of the module (`watch`) has to show that the layers do the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from torchweave.compiler.cache.keys import Known, describe_module

_NUMBER = re.compile(r"\d+")
_LISTS = (nn.ModuleList, nn.Sequential)
MIN_LAYERS = 3
"""A list of fewer layers is traced as it is: there is next to nothing to save."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A member of a list of modules.

    Attributes:
        path: its name in the whole module, `model.layers.3`.
        position: its index in the list.
        shape: its parts as text, without the numbers in it.
        numbers: those numbers, in the order in which they stand.
    """

    path: str
    position: int
    module: nn.Module
    shape: str
    numbers: tuple[int, ...]

    def is_built_like(self, other: Layer) -> bool:
        """Whether both have the same parts, and every number is the same or moves with the position."""
        position_offset = self.position - other.position
        return self.shape == other.shape and all(
            mine - theirs in (0, position_offset) for mine, theirs in zip(self.numbers, other.numbers, strict=True)
        )


def repeated_layers(module: nn.Module) -> list[list[Layer]]:
    """The members of every list, not itself in such a list, some of whose members are built alike."""
    return list(_search(module, "", set(), {}))


def _search(module: nn.Module, path: str, seen: set[int], known: Known) -> Iterator[list[Layer]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, _LISTS) and len(module) >= MIN_LAYERS:
        layers = [
            _layer(child, path + name, position, known)
            for position, (name, child) in enumerate(module._modules.items())
            if child is not None
        ]
        if max(Counter(layer.shape for layer in layers).values(), default=0) > 1:
            yield layers
            return
    for name, child in module.named_children():
        yield from _search(child, f"{path}{name}.", seen, known)


def _layer(module: nn.Module, path: str, position: int, known: Known) -> Layer:
    text = describe_module(module, known)
    return Layer(path, position, module, _NUMBER.sub("#", text), tuple(map(int, _NUMBER.findall(text))))
