"""Reject forwards that change Python objects: a graph holds tensor operations only, and such changes would be lost.

Dynamo reports the existing objects that a forward changes, and its generated code repeats the changes. They are compared
and undone here, since many forwards only set an attribute and reset it.
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
    """The sources of the objects that a forward changes, as Dynamo reports them while it traces; filled on exit."""
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
    """Compare the objects of these sources on entry and on exit, and restore them.

    Raises:
        TraceError: an object has changed.
    """
    before = {source: _snapshot(source, roots) for source in sources}
    yield
    changed = [
        name for source, (thing, contents) in before.items() for name in _restore(source, thing, contents, roots)
    ]
    if changed:
        raise TraceError(
            f"forward changes {' and '.join(changed)}, which a compiled forward would not do; return the new value, or write "
            "it into a tensor that is an input"
        )


def _snapshot(source: str, roots: Mapping[str, Any]) -> tuple[Any, list[_Contents]]:
    try:
        thing = resolve(source, roots)
    except SourceError:
        return None, []
    return thing, _contents(thing)


def _contents(thing: Any) -> list[_Contents]:
    """The items of a container and the attributes of an object; empty when it has neither."""
    contents: list[_Contents] = []
    if isinstance(thing, CellType):
        contents.append({"": thing.cell_contents})
    elif isinstance(thing, dict):
        contents.append(dict(thing))
    elif isinstance(thing, (list, deque)):
        contents.append(dict(enumerate(thing)))
    elif isinstance(thing, set):
        contents.append({each: each for each in thing})
    return [*contents, dict(vars(thing))] if hasattr(thing, "__dict__") else contents


def _restore(source: str, thing: Any, before: list[_Contents], roots: Mapping[str, Any]) -> list[str]:
    """Restore an object. Returns the names of what had changed: the object itself, or its attributes."""
    now, after = _snapshot(source, roots)
    if before and now is thing and all(map(_same, before, after)):
        return []
    name = _REGISTERED.sub(lambda match: f".{match[1]}" if match[1] else "", _ROOT.sub(r"\1", source))
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
    """Give an object exactly these attributes. Returns the names of those that differed."""
    changed = _changed_keys(attributes, vars(thing))
    for name in changed:
        base: Any = type if isinstance(thing, type) else object
        if name in attributes:
            base.__setattr__(thing, name, attributes[name])
        else:
            base.__delattr__(thing, name)
    return changed


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
