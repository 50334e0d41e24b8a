"""Find the layers of a module that need not be traced: layers of one kind, and tails of lists that repeat earlier layers.

    module      embed, L0, L1, L2, ... L31, norm          L1 to L31 repeat L0, each on the results of the one before
    traced      embed, L0, norm

Equal structure (classes, attributes, shapes; numbers may move with the position) proves nothing: a recorded run
(`record_layers`) has to show that layers are the same. A tail takes a second run, without it: the first run calls no function
of torch between the layers of the tail, and outside its layers it is equal to the second run, with the tail's results in place
of those of the last layer before it.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchweave.compiler.cache.keys import DescriptionCache, describe_module
from torchweave.compiler.capture.trace_once.layer_recorder import (
    LayerRecord,
    NotRepeatableError,
    Recording,
    record_layers,
)

MIN_LAYERS = 3
"""A shorter list is traced in full: the saving would be small."""
_MIN_TAIL = 2
"""A shorter tail does not pay for the second run."""
_NUMBER = re.compile(r"\d+")
_LISTS = (nn.ModuleList, nn.Sequential)
Wire = tuple[str, str, int]
"""The origin of a layer's tensor argument: `("result" or "argument", path of a layer, index)`."""


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


@dataclass(frozen=True)
class SkippedLayer:
    """A layer of a tail, and the origins of its tensor arguments."""

    kind: LayerKind
    layer: Layer
    record: LayerRecord
    given: tuple[Wire, ...]


@dataclass(frozen=True)
class Tail:
    """The layers at the end of a list that are removed while the module is traced.

    Attributes:
        container: the list.
        last: the layer before them, with its `record`.
    """

    container: nn.Module
    last: Layer
    record: LayerRecord
    skipped_layers: tuple[SkippedLayer, ...]


@dataclass(frozen=True)
class RepeatedLayers:
    """The layers of a module that need not be traced.

    Attributes:
        kinds: each is traced once.
        tails: layers that are removed while the module is traced.
        why: the reason why no tail is removed; "" when tails are, or when no list ends with repeated layers.
    """

    kinds: list[LayerKind]
    tails: list[Tail]
    why: str = ""

    def facts(self) -> dict[str, Any]:
        """Fields of the `trace_once` event: traced layers, number of cloned layers, and how many of these are in tails."""
        facts = {
            "traced": [kind.first.path for kind in self.kinds if kind.others],
            "cloned": sum(len(kind.others) for kind in self.kinds),
            "left_out": sum(len(tail.skipped_layers) for tail in self.tails),
        }
        return {**facts, "why_shown": self.why} if self.why else facts


def find_repeated(module: nn.Module, inputs: Sequence[Any]) -> RepeatedLayers | None:
    """The layers that repeat others; None when no list of the module has two layers of one structure.

    Raises:
        NotRepeatableError: layers have one structure, but no two of them can be shown to be the same.
    """
    lists = layer_lists(module)
    if not lists:
        return None
    recording = record_layers(module, inputs, _by_path(lists))
    groups = [_group(layers, recording.records) for layers in lists]
    kinds = [kind for kinds, _ in groups for kind in kinds]
    repeated = [kind for kind in kinds if kind.others]
    if not repeated:
        raise NotRepeatableError(next((why for _, why in groups if why), "forward calls none of the layers"))
    try:
        tails = _find_tails(module, inputs, lists, repeated, recording)
    except NotRepeatableError as error:
        return RepeatedLayers(repeated, [], str(error))
    last = {tail.last.path for tail in tails}
    return RepeatedLayers([kind for kind in kinds if kind.others or kind.first.path in last], tails)


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


def _by_path(lists: Sequence[Sequence[Layer]], without: Collection[str] = ()) -> dict[str, nn.Module]:
    return {layer.path: layer.module for layers in lists for layer in layers if layer.path not in without}


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


@contextlib.contextmanager
def without_tails(tails: Sequence[Tail]) -> Iterator[None]:
    """Remove the tails from their lists; restore them on exit."""
    whole = [(tail.container, tail.container._modules) for tail in tails]
    try:
        for tail in tails:
            skipped = {each.layer.module for each in tail.skipped_layers}
            modules = tail.container._modules
            tail.container._modules = {name: child for name, child in modules.items() if child not in skipped}
        yield
    finally:
        for container, modules in whole:
            container._modules = modules


def skipped_paths(tails: Sequence[Tail]) -> set[str]:
    return {each.layer.path for tail in tails for each in tail.skipped_layers}


def _find_tails(
    module: nn.Module,
    inputs: Sequence[Any],
    lists: Sequence[list[Layer]],
    kinds: Sequence[LayerKind],
    whole: Recording,
) -> list[Tail]:
    """The tails of a module's lists of layers; empty when no list has one.

    Raises:
        NotRepeatableError: a list ends with repeated layers, but other operations may depend on the number of layers.
    """
    tails = [tail for layers in lists if (tail := _tail(module, layers, kinds, whole)) is not None]
    if tails:
        with without_tails(tails):
            try:
                short = record_layers(module, inputs, _by_path(lists, skipped_paths(tails)))
            except NotRepeatableError as error:
                raise NotRepeatableError(f"with fewer layers: {error}") from error
        _check_same_forward(whole, short, tails)
    return tails


def _tail(module: nn.Module, layers: list[Layer], kinds: Sequence[LayerKind], recording: Recording) -> Tail | None:
    repeats = {layer.path: (kind, record) for kind in kinds for layer, record in kind.others}
    first = len(layers)
    while first > 0 and layers[first - 1].path in repeats:
        first -= 1
    if len(layers) - first < _MIN_TAIL or first == 0 or layers[first - 1].path not in recording.records:
        return None
    last, tail = layers[first - 1], layers[first:]
    _check_nothing_between([last, *tail], recording)
    _check_same_results(last, tail[-1], recording)
    origins = _ArgumentOrigins(recording, [last.path, *(kind.first.path for kind in kinds), *repeats], tail[0].path)
    skipped_layers = []
    for layer in tail:
        kind, record = repeats[layer.path]
        skipped_layers.append(SkippedLayer(kind, layer, record, origins.wires(record)))
    container = module.get_submodule(last.path.rpartition(".")[0])
    return Tail(container, last, recording.records[last.path], tuple(skipped_layers))


def _check_nothing_between(layers: Sequence[Layer], recording: Recording) -> None:
    """Refuse layers that are called in another order, or with a function of torch in between."""
    entries, paths = recording.outline.entries, [layer.path for layer in layers]
    start = next(index for index, entry in enumerate(entries) if entry[:2] == ("layer", paths[0]))
    for path, entry in zip(paths, entries[start:], strict=False):
        if entry[0] != "layer":
            raise NotRepeatableError(f"{entry[1]} is called before {path}")
        if entry[1] != path:
            raise NotRepeatableError(f"{entry[1]} is called where {path} was expected")


def _check_same_results(traced: Layer, last: Layer, recording: Recording) -> None:
    """Refuse a last layer whose results differ in kind from those of the last traced layer."""
    traced_record, last_record = recording.records[traced.path], recording.records[last.path]
    if traced_record.refusal:
        raise NotRepeatableError(traced_record.refusal)
    if (traced_record.rebuild, traced_record.result[1]) != (last_record.rebuild, last_record.result[1]):
        raise NotRepeatableError(f"{last.path} returns another kind of result than {traced.path}")


class _ArgumentOrigins:
    """Looks up the arguments of a tail's layers among the results of layers and the arguments of earlier layers.

    Args:
        marked: paths of the layers that the traced graph marks.
        first: the first layer of the tail.
    """

    def __init__(self, recording: Recording, marked: Sequence[str], first: str) -> None:
        self._marked = set(marked)
        self._wires: dict[Any, Wire] = {}
        for path, record in recording.records.items():  # in the order of the calls
            if path == first:
                break
            if path in self._marked:
                for index, label in enumerate(record.given):
                    self._wires.setdefault(label, ("argument", path, index))

    def wires(self, record: LayerRecord) -> tuple[Wire, ...]:
        return tuple(map(self._wire, record.given))

    def _wire(self, label: Any) -> Wire:
        if label[0] == "layer" and label[1] in self._marked:
            return ("result", label[1], label[2])
        if label not in self._wires:
            raise NotRepeatableError("a layer takes an argument that no earlier layer takes")
        return self._wires[label]


def _check_same_forward(whole: Recording, short: Recording, tails: Sequence[Tail]) -> None:
    """Refuse tails whose removal changes the rest of the forward."""
    skipped = skipped_paths(tails)
    names = {tail.last.path: f"{tail.last.path} itself" for tail in tails}
    names |= {tail.skipped_layers[-1].layer.path: tail.last.path for tail in tails}
    expected = [
        tuple(_renamed(part, names) for part in entry)
        for entry in whole.outline.entries
        if entry[:1] != ("layer",) or entry[1] not in skipped
    ]
    for expected_entry, entry in zip(expected, short.outline.entries, strict=False):
        if expected_entry != entry:
            name = expected_entry[1] if expected_entry[0] != "returns" else "the result"
            raise NotRepeatableError(f"{name} depends on the number of layers")
    if len(expected) != len(short.outline.entries):
        raise NotRepeatableError("the number of calls in forward depends on the number of layers")
    for path, record in short.records.items():
        if difference := record.difference(whole.records[path], 0):
            raise NotRepeatableError(f"{path} depends on the number of layers: {difference}")


def _renamed(thing: Any, names: Mapping[str, str]) -> Any:
    """A description with the labels of layer results renamed."""
    if not isinstance(thing, tuple):
        return thing
    if len(thing) == 3 and thing[0] == "layer" and thing[1] in names:
        return ("layer", names[thing[1]], thing[2])
    return tuple(_renamed(item, names) for item in thing)
