"""What a forward returns, as a tree over the flat outputs of its graph, and what it changes.

A forward that changes Python objects is rejected: a graph holds tensor operations only, and such changes would be lost. Dynamo
reports the existing objects that a forward changes, and its generated code repeats the changes. They are compared and undone
here, since many forwards only set an attribute and reset it.
"""

from __future__ import annotations

import ast
import contextlib
import re
import warnings
from collections import ChainMap, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchweave.compiler.errors import TraceError, source_location
from torchweave.compiler.ir.graph import Attribute, Constant, Input, OutputTree, SourceError, resolve, same_geometry
from torchweave.compiler.ir.symbols import value

_VIEW_ATTRIBUTES = ("T", "mT", "H", "mH", "data")


def output_tree(
    captured: Any,
    arguments: Sequence[Any],
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    roots: Mapping[str, Any],
    side_effects: Sequence[str],
) -> OutputTree:
    """Run Dynamo's generated code around the graph on marker tensors, and find each marker in the return value.

    Args:
        captured: Dynamo's capture of the module's forward for these arguments.
        arguments: of forward: inputs, and defaults between them.
        roots: of its sources.
        side_effects: sources of the objects that the generated code changes.

    Raises:
        TraceError: forward returns an object that cannot be returned again at each call, or changes Python objects.
    """
    output = captured.backend_input.graph_module.graph.output_node()
    if sizes := [node for node in output.all_input_nodes if not isinstance(value(node), Tensor)]:
        raise TraceError(
            "forward returns a size, or a number computed from sizes; return tensors", source_location(sizes[0])
        )
    markers = tuple(torch.empty(0) for _ in output.args[0])
    try:
        generated = captured.forward_callable(compiled_fn=lambda *args: markers, extra_globals=roots["G"])
        roots = {**roots, "G": ChainMap(generated.__globals__, roots["G"])}
        with reject_side_effects(side_effects, roots):
            result = generated(module, *arguments)
    except TraceError:
        raise
    except Exception as error:  # raised by the code that Dynamo generated
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(
            f"forward returns an object that cannot be rebuilt at each call, such as a generator; return tensors ({message})"
        ) from error
    index_of = {id(marker): index for index, marker in enumerate(markers)}
    input_of = {id(tensor): name for name, tensor in inputs.items()}
    flat, spec = pytree.tree_flatten(result)
    leaves: list[Any] = []
    for leaf in flat:
        if id(leaf) in index_of:
            leaves.append(index_of[id(leaf)])
        elif id(leaf) in input_of:
            leaves.append(Input(input_of[id(leaf)]))
        elif isinstance(leaf, Tensor):
            leaves.append(_attribute_of(leaf, inputs) or Constant(leaf))
        elif leaf is None or isinstance(leaf, (bool, str, float)):
            leaves.append(("value", leaf))
        else:
            raise TraceError(_unsupported_leaf(leaf))
    return OutputTree(spec, tuple(leaves))


def _unsupported_leaf(leaf: Any) -> str:
    kind = "an int, which may be a size" if type(leaf) is int else f"a {type(leaf).__name__}"
    advice = "; or register its class by `torch.export.register_dataclass`" if is_dataclass(leaf) else ""
    return f"forward returns {kind}; return tensors, or None, a bool, float or string{advice}"


def _attribute_of(leaf: Tensor, inputs: Mapping[str, Tensor]) -> Attribute | None:
    """The attribute of an input that a returned tensor is; None when it is no view of an input."""
    for name, tensor in inputs.items():
        if leaf.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            continue
        for attribute in _VIEW_ATTRIBUTES:
            with contextlib.suppress(RuntimeError):  # not every input has every attribute
                if same_geometry(getattr(tensor, attribute), leaf):
                    return Attribute(name, attribute)
        raise TraceError(f"forward returns a view of {name} that is not part of the traced graph; return a copy of it")
    return None


_WARNING_PREFIX = "While compiling, we found certain side effects"
_REGISTERED = re.compile(r"\.(?:__dict__\[')?_(?:modules|buffers|parameters)(?:'\])?(?:\['(\w+)'\])?")
_ROOT = re.compile(r"^[LG]\['(\w+)'\]")
_REGISTRIES = tuple(f"_{kind}{end}" for kind in ("modules", "buffers", "parameters") for end in ("", "']"))
EXTRA_KEYWORDS = "**"
"""Key of the roots under which the name of forward's `**kwargs` stands."""
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
    before = {source: _snapshot(source, roots) for source in sources if not _is_of_call(source, roots)}
    yield
    changed = [
        name for source, (thing, contents) in before.items() for name in _restore(source, thing, contents, roots)
    ]
    if changed:
        raise TraceError(
            f"forward changes {' and '.join(changed)}, which a compiled forward would not do; return the new value, or write "
            "it into a tensor that is an input"
        )


def _is_of_call(source: str, roots: Mapping[str, Any]) -> bool:
    """Whether the object is the dict of a call's further keyword arguments, which ends with the call."""
    root = _ROOT.match(source)
    return root is not None and source.startswith("L[") and root[1] == roots.get(EXTRA_KEYWORDS)


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


def source_text(source: str) -> str:
    """Dynamo's source of an object as the user writes it: `self.layer.count`."""
    return _REGISTERED.sub(lambda match: f".{match[1]}" if match[1] else "", _ROOT.sub(r"\1", source))


def _restore(source: str, thing: Any, before: list[_Contents], roots: Mapping[str, Any]) -> list[str]:
    """Restore an object. Returns the names of what had changed: the object itself, or its attributes."""
    now, after = _snapshot(source, roots)
    if before and now is thing and all(map(_same, before, after)):
        return []
    name = source_text(source)
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
