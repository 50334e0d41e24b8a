"""Whether a forward leaves Python objects as they were: what it changes besides tensors is in no graph, and would be lost.

Dynamo tells which objects a forward changes that were there before, and its code around the graph changes them. That is watched,
and undone: many a forward only sets what it then sets back.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType
from typing import Any

from torchweave.compiler.errors import TraceError
from torchweave.compiler.ir.sources import SourceError, resolve

_WARNING_PREFIX = "While compiling, we found certain side effects"
_REGISTERED = re.compile(r"\.(?:__dict__\[')?_(?:modules|buffers|parameters)(?:'\])?(?:\['(\w+)'\])?")
_ROOT = re.compile(r"^[LG]\['(\w+)'\]")
_REGISTRIES = tuple(f"_{kind}{end}" for kind in ("modules", "buffers", "parameters") for end in ("", "']"))
_PLAIN = (bool, int, float, complex, str, bytes)
_Contents = dict[Any, Any]


@contextmanager
def record_side_effects() -> Iterator[list[str]]:
    """What Dynamo says, while it traces in here, of a forward's changes: the sources of the objects, there at the end."""
    from torch._dynamo import config

    sources: list[str] = []
    with warnings.catch_warnings(record=True) as caught, config.patch(side_effect_replay_policy="warn"):
        warnings.filterwarnings("always", message=_WARNING_PREFIX)
        yield sources
    for each in caught:
        message = str(each.message)
        if message.startswith(_WARNING_PREFIX):
            sources += ast.literal_eval(message[message.index("[") :])
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)


@contextmanager
def reject_side_effects(sources: Sequence[str], roots: Mapping[str, Any]) -> Iterator[None]:
    """See to it that the objects of these sources are in the end what they were, and refuse what was not so.

    Raises:
        TraceError: one of them was changed.
    """
    before = {source: _snapshot(source, roots) for source in sources}
    yield
    changed = [
        name for source, (thing, contents) in before.items() for name in _restore(source, thing, contents, roots)
    ]
    if changed:
        raise TraceError(
            f"forward changes {' and '.join(changed)}, which a compiled forward would not do; return what changes, or write it "
            "into a tensor that is an input"
        )


def _snapshot(source: str, roots: Mapping[str, Any]) -> tuple[Any, list[_Contents]]:
    try:
        thing = resolve(source, roots)
    except SourceError:
        return None, []
    return thing, _contents(thing)


def _contents(thing: Any) -> list[_Contents]:
    """What an object holds as a container, and its attributes; neither, where nobody could see it change."""
    found: list[_Contents] = []
    if isinstance(thing, CellType):
        found.append({"": thing.cell_contents})
    elif isinstance(thing, dict):
        found.append(dict(thing))
    elif isinstance(thing, (list, deque)):
        found.append(dict(enumerate(thing)))
    elif isinstance(thing, set):
        found.append({each: each for each in thing})
    return [*found, dict(vars(thing))] if hasattr(thing, "__dict__") else found


def _restore(source: str, thing: Any, before: list[_Contents], roots: Mapping[str, Any]) -> list[str]:
    """Names of what is another object or holds something else than before; it holds the same again."""
    now, after = _snapshot(source, roots)
    if before and now is thing and all(map(_same, before, after)):
        return []
    name = _REGISTERED.sub(lambda found: f".{found[1]}" if found[1] else "", _ROOT.sub(r"\1", source))
    if isinstance(thing, CellType):
        thing.cell_contents = before[0][""]
    elif isinstance(thing, (dict, set)):
        thing.clear()
        thing.update(before[0])
    elif isinstance(thing, (list, deque)):
        thing.clear()
        thing.extend(before[0].values())
    names = _set_attributes(thing, before[-1]) if now is thing and hasattr(thing, "__dict__") else []
    if source.endswith(_REGISTRIES):
        names = _changed_keys(before[0], after[0])
    return [f"{name}.{attribute}" for attribute in names] or [name]


def _set_attributes(thing: Any, attributes: _Contents) -> list[str]:
    """Give an object these attributes and no others; returns the names of those that were not so."""
    wrong = _changed_keys(attributes, vars(thing))
    for name in wrong:
        base: Any = type if isinstance(thing, type) else object
        if name in attributes:
            base.__setattr__(thing, name, attributes[name])
        else:
            base.__delattr__(thing, name)
    return wrong


def _changed_keys(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> list[Any]:
    return [key for key in {**one, **other} if key not in one or key not in other or not _same(one[key], other[key])]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, _PLAIN) and one == other
