"""Globals that traced code reads: their names, found in its bytecode, and digests that detect another value.

A captured graph holds what these globals were: the code of functions, and plain values as numbers. The digests are stored with
the graph and compared when it is loaded, so that a rebound function or a setting of another file is a miss.
"""

from __future__ import annotations

import dis
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any

from torch import nn

from torchweave.compiler.cache.keys import MISSING, DescriptionCache, describe, describe_class, describe_module

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_OPAQUE_MODULES = sys.stdlib_module_names - {"builtins", "types", "collections", "functools", "pathlib"}
"""Objects of these modules, such as loggers, are described by their class: their state differs between processes."""
_DEPTH = 3
"""Objects are described to a smaller depth than those of the module itself: a global may lead to everything."""


def globals_of(code: CodeType, module: str) -> Iterator[str]:
    """The globals that a function of a module and the functions in it read, as `module:name` or `module:name.attribute`."""
    instructions = list(dis.get_instructions(code))
    source = ""
    for at, each in enumerate(instructions):
        if each.opname in _LOADS:
            attributes = []
            for following in instructions[at + 1 :]:
                if following.opname not in _ATTRIBUTES:
                    break
                attributes.append(following.argval)
            yield f"{module}:{'.'.join([each.argval, *attributes])}"
        elif each.opname == "IMPORT_NAME":  # after the constants of its level and its names
            level = instructions[at - 2].argval or 0
            source = _resolve_import("." * level + each.argval, module)
        elif each.opname == "IMPORT_FROM":
            yield f"{source}:{each.argval}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from globals_of(constant, module)


def _resolve_import(name: str, module: str) -> str:
    package = getattr(sys.modules.get(module), "__package__", None) or ""
    return importlib.util.resolve_name(name, package) if package or not name.startswith(".") else name


def global_digests(names: Iterable[str]) -> dict[str, str]:
    """A digest of each global; `MISSING` for one that does not exist, such as a builtin.

    Modules are left out, and what is read from those of the standard library: `sys.modules` leads to every loaded package.
    """
    cache: DescriptionCache = {}
    values = {name: _resolve(name) for name in names}
    return {
        name: value if value is MISSING else hashlib.sha256(_describe(value, cache).encode()).hexdigest()[:16]
        for name, value in values.items()
        if not isinstance(value, ModuleType)
    }


def _resolve(name: str) -> Any:
    """The value of `module:name.attribute...`; attributes are followed through plain modules outside the standard library."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module, MISSING)
    for attribute in path.split("."):
        if type(value) is not ModuleType or value.__name__.partition(".")[0] in sys.stdlib_module_names:
            break
        value = vars(value).get(attribute, MISSING)
    return value


def _describe(value: Any, cache: DescriptionCache) -> str:
    if isinstance(value, nn.Module):
        return describe_module(value, cache)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__} {describe_class(value, cache)}"
    if type(value).__module__.partition(".")[0] in _OPAQUE_MODULES:
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return describe(value, _DEPTH, cache)
