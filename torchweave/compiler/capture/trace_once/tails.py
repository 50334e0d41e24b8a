"""Leave layers at the end of a list out while a module is traced: those that only go on with what layers before them do.

    whole     embed, L0, L1, L2, ... L31, norm          L1 to L31 do what L0 does, each with what the one before gave
    shown     embed, L0, norm

That the loop would do the same for the layers that are left out is seen, not guessed: the module is run once with the whole list
and once with the short one. Between the layers that are left out the first run calls nothing of torch, and all else that
it does outside its layers is what the second one does, with the last layer's results for those of the last one shown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchweave.compiler.capture.trace_once.found import Kind, SkippedLayer, Tail, Wire
from torchweave.compiler.capture.trace_once.layers import Layer
from torchweave.compiler.capture.trace_once.watch import NotRepeatableError, Record, Watched, watch

_MIN_TAIL = 2
"""A shorter tail is not worth the second run."""


def find_tails(
    module: nn.Module,
    inputs: Sequence[Tensor],
    lists: Sequence[list[Layer]],
    kinds: Sequence[Kind],
    watched: Watched,
) -> list[Tail]:
    """The tails of a module's lists of layers; empty when no list has one.

    Raises:
        NotRepeatableError: a list ends with layers like others, but it cannot be shown that nothing else depends on
        how many they are.
    """
    tails = [tail for layers in lists if (tail := _tail(module, layers, kinds, watched)) is not None]
    if tails:
        gone = {each.layer.path for tail in tails for each in tail.skipped_layers}
        rest = [layer for layers in lists for layer in layers if layer.path not in gone]
        with without_tails(tails):
            short = _watch_short(module, inputs, rest)
        _compare(watched, short, tails)
    return tails


def _watch_short(module: nn.Module, inputs: Sequence[Tensor], layers: Sequence[Layer]) -> Watched:
    try:
        return watch(module, inputs, layers)
    except NotRepeatableError as error:
        raise NotRepeatableError(f"with fewer layers {error}") from error


@contextlib.contextmanager
def without_tails(tails: Sequence[Tail]) -> Iterator[None]:
    """The lists without their tails meanwhile."""
    whole = [(tail.container, tail.container._modules) for tail in tails]
    try:
        for tail in tails:
            gone = {each.layer.module for each in tail.skipped_layers}
            kept = {name: child for name, child in tail.container._modules.items() if child not in gone}
            tail.container._modules = kept
        yield
    finally:
        for container, modules in whole:
            container._modules = modules


def _tail(module: nn.Module, layers: list[Layer], kinds: Sequence[Kind], watched: Watched) -> Tail | None:
    repeats = {layer.path: (kind, record) for kind in kinds for layer, record in kind.others}
    first = len(layers)
    while first > 0 and layers[first - 1].path in repeats:
        first -= 1
    if len(layers) - first < _MIN_TAIL or first == 0 or layers[first - 1].path not in watched.records:
        return None
    last, tail = layers[first - 1], layers[first:]
    _check_nothing_between([last, *tail], watched)
    _check_results_alike(last, tail[-1], watched)
    known = _ArgumentSources(
        watched, [last.path, *(kind.first.path for kind in kinds if kind.others), *repeats], tail[0].path
    )
    skipped_layers = []
    for layer in tail:
        kind, record = repeats[layer.path]
        skipped_layers.append(SkippedLayer(kind, layer, record, known.wires(record)))
    container = module.get_submodule(last.path.rpartition(".")[0])
    return Tail(container, last, watched.records[last.path], tuple(skipped_layers))


def _check_nothing_between(layers: Sequence[Layer], watched: Watched) -> None:
    """Refuse layers that are not called one after the other with nothing of torch in between."""
    entries, paths = watched.outline.entries, [layer.path for layer in layers]
    start = next(index for index, entry in enumerate(entries) if entry[:2] == ("layer", paths[0]))
    for path, entry in zip(paths, entries[start:], strict=False):
        if entry[0] != "layer":
            raise NotRepeatableError(f"{entry[1]} is called before {path}")
        if entry[1] != path:
            raise NotRepeatableError(f"{entry[1]} is called where {path} would follow")


def _check_results_alike(shown: Layer, last: Layer, watched: Watched) -> None:
    """Refuse a last layer whose results cannot take the place of those of the last one shown."""
    mine, theirs = watched.records[shown.path], watched.records[last.path]
    if mine.refusal:
        raise NotRepeatableError(mine.refusal)
    if (mine.rebuild, mine.result[1]) != (theirs.rebuild, theirs.result[1]):
        raise NotRepeatableError(f"{last.path} gives another kind of result than {shown.path}")


class _ArgumentSources:
    """Finds what the layers of a tail are given among results of layers and what layers before them are given.

    Args:
        marked: paths of the layers that can be told in the graph.
        first: the first layer of the tail.
    """

    def __init__(self, watched: Watched, marked: Sequence[str], first: str) -> None:
        self._marked = set(marked)
        self._known: dict[Any, Wire] = {}
        for path, record in watched.records.items():  # in the order of the calls
            if path == first:
                break
            if path in self._marked:
                for index, label in enumerate(record.given):
                    self._known.setdefault(label, ("argument", path, index))

    def wires(self, record: Record) -> tuple[Wire, ...]:
        return tuple(map(self._wire, record.given))

    def _wire(self, label: Any) -> Wire:
        if label[0] == "layer" and label[1] in self._marked:
            return ("result", label[1], label[2])
        if label not in self._known:
            raise NotRepeatableError("a layer is given what none before it was given")
        return self._known[label]


def _compare(whole: Watched, short: Watched, tails: Sequence[Tail]) -> None:
    """Refuse tails without which the forward does something else."""
    gone = {each.layer.path for tail in tails for each in tail.skipped_layers}
    names = {tail.last.path: f"{tail.last.path} itself" for tail in tails}
    names |= {tail.skipped_layers[-1].layer.path: tail.last.path for tail in tails}
    renamed = [
        tuple(_renamed(part, names) for part in entry)
        for entry in whole.outline.entries
        if entry[:1] != ("layer",) or entry[1] not in gone
    ]
    for theirs, mine in zip(renamed, short.outline.entries, strict=False):
        if theirs != mine:
            raise NotRepeatableError(
                f"{theirs[1] if theirs[0] != 'returns' else 'the result'} depends on how many layers there are"
            )
    if len(renamed) != len(short.outline.entries):
        raise NotRepeatableError("what forward calls depends on how many layers there are")
    for path, record in short.records.items():
        if difference := record.difference(whole.records[path], 0):
            raise NotRepeatableError(f"{path} depends on how many layers there are: {difference}")


def _renamed(thing: Any, names: Mapping[str, str]) -> Any:
    """A description in which results of layers go by other names."""
    if not isinstance(thing, tuple):
        return thing
    if len(thing) == 3 and thing[0] == "layer" and thing[1] in names:
        return ("layer", names[thing[1]], thing[2])
    return tuple(_renamed(item, names) for item in thing)
