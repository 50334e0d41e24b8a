"""Registries of plug points: objects by name, from Torchweave, from a program, or from entry points of installed packages.

An entry is loaded when it is asked for, so that a registry costs nothing until then and a package that is not used is never
imported. A name may also be `module:Name`, an object on the import path.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import metadata
from typing import Any, Generic, NamedTuple, TypeVar

from torchweave.utils.suggest import did_you_mean

Item = TypeVar("Item")
OWN_PACKAGE = "torchweave"
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class Origin(NamedTuple):
    """Where an entry comes from: the package that brings it, and `module:Name`, or the object itself where that is empty."""

    package: str
    path: str
    item: Any = None


class PluginError(ValueError):
    """An entry that cannot be loaded or is not what the registry holds; the message names its package."""


class Registry(Generic[Item]):
    """Objects of one kind by name.

    Args:
        kind: as messages name it, "attention backend".
        group: entry-point group of installed packages.
        builtin: Torchweave's own entries: `module:Name` by name.
        needs: attributes that each object has; others are refused.
    """

    def __init__(
        self, kind: str, group: str, builtin: Mapping[str, str] | None = None, needs: tuple[str, ...] = ()
    ) -> None:
        self.kind, self.group, self._needs = kind, group, needs
        self._registered = {name: Origin(OWN_PACKAGE, path) for name, path in (builtin or {}).items()}

    def register(self, name: str, item: Item | None = None) -> Callable[[Any], Any]:
        """Add an object of this process; `@registry.register("name")` above a class does the same.

        Other processes do not see it: name `module:Name`, or use an entry point, where an engine has several ranks.

        Raises:
            ValueError: the name is taken by another object.
        """

        def add(added: Any) -> Any:
            known = self._registered.get(name)
            if known is not None and (known.path or known.item is not added):
                raise ValueError(f"{self.kind} {name!r} exists already, of {known.package}; choose another name")
            self._registered[name] = Origin(getattr(added, "__module__", "this program"), "", added)
            return added

        if item is not None:
            add(item)
        return add

    def unregister(self, name: str) -> None:
        """Remove what `register` added."""
        del self._registered[name]

    def names(self, packages: Collection[str] | None = None) -> tuple[str, ...]:
        """All names, Torchweave's first.

        Args:
            packages: installed packages whose entry points count; None: all.
        """
        return tuple(dict.fromkeys((*self._registered, *(name for name, _ in self._installed(packages)))))

    def has(self, name: str, packages: Collection[str] | None = None) -> bool:
        """Whether `get` looks for the object: the name of an entry, or `module:Name`."""
        return name in self._registered or is_path(name) or any(name == other for other, _ in self._installed(packages))

    def get(self, name: str, packages: Collection[str] | None = None) -> Item:
        """The object of a name.

        Args:
            packages: as in `names`.

        Raises:
            ValueError: the name is unknown (with the nearest known name), or the object cannot be loaded or is of another kind.
        """
        origin = self._registered.get(name)
        if origin is None and is_path(name):
            origin = Origin("", name)
        if origin is None:
            installed = [each for other, each in self._installed(packages) if other == name]
            if len(installed) > 1:
                both = " and ".join(sorted({each.package for each in installed}))
                raise PluginError(
                    f"{self.kind} {name!r} is in the packages {both}; uninstall one, or name it in plugins"
                )
            origin = installed[0] if installed else None
        if origin is None:
            raise ValueError(f"unknown {self.kind} {name!r}; {self._hint(name, packages)}")
        return self._load(name, origin)

    def installed(self, packages: Collection[str] | None = None) -> Iterator[tuple[str, Item]]:
        """Names and objects of the entry points of installed packages, and of those that this process registered."""
        for name, origin in sorted(self._registered.items()):
            if origin.package != OWN_PACKAGE:
                yield name, self._load(name, origin)
        for name, origin in self._installed(packages):
            yield name, self._load(name, origin)

    def _hint(self, name: str, packages: Collection[str] | None) -> str:
        if packages is not None:
            excluded = [each.package for other, each in self._installed(None) if other == name]
            if excluded:
                return f"the package {excluded[0]} has it, which the option plugins leaves out"
        return did_you_mean(name, self.names(packages), f"available: {', '.join(self.names(packages)) or 'none'}")

    def _installed(self, packages: Collection[str] | None) -> list[tuple[str, Origin]]:
        """Entry points by name and package, in that order, so that all processes agree."""
        if packages is not None and not packages:
            return []
        allowed = None if packages is None else {_normalize(each) for each in packages}
        entries = []
        for point in _entry_points(tuple(sys.path)).select(group=self.group):
            package = point.dist.name if point.dist is not None else point.value
            if allowed is None or _normalize(package) in allowed:
                entries.append((point.name, Origin(package, point.value)))
        return sorted(entries, key=lambda entry: (entry[0], entry[1].package))

    def _load(self, name: str, origin: Origin) -> Item:
        if not origin.path:
            return self._checked(name, origin, origin.item)
        what = f"{self.kind} {name!r}" + (f" of the package {origin.package}" if origin.package else "")
        module_name, _, attribute = origin.path.partition(":")
        try:
            loaded: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                loaded = getattr(loaded, part)
        except AttributeError as error:
            raise PluginError(f"{what} cannot be loaded: module {module_name} has no attribute {attribute}") from error
        except ImportError as error:
            hint = "update it or leave it out" if origin.package else "is the module on PYTHONPATH?"
            raise PluginError(f"{what} cannot be imported ({error}); {hint}") from error
        except Exception as error:  # a plug-in's own code
            raise PluginError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
        return self._checked(name, origin, loaded)

    def _checked(self, name: str, origin: Origin, item: Any) -> Item:
        if missing := [attribute for attribute in self._needs if not hasattr(item, attribute)]:
            of = f" of the package {origin.package}" if origin.package else ""
            raise PluginError(
                f"{name!r}{of} is no {self.kind}: it lacks {', '.join(missing)}; docs/how-to/write-a-plugin.md describes the "
                "interface"
            )
        return item


def path_of(item: Any) -> str:
    """`module:Name` of a class, so that other processes find it; a name stays.

    Raises:
        ValueError: the class is within a function.
    """
    if isinstance(item, str):
        return item
    path = f"{getattr(item, '__module__', '?')}:{getattr(item, '__qualname__', item)}"
    if not is_path(path):
        raise ValueError(f"{path} cannot be imported by its name; define the class at the top of a module")
    return path


@functools.lru_cache(maxsize=4)
def _entry_points(path: tuple[str, ...]) -> Any:
    """Of all packages on `path`, which is `sys.path`: reading them takes a tenth of a second."""
    return metadata.entry_points()


def is_path(name: str) -> bool:
    """Whether a name is `module:Name`."""
    return _PATH.fullmatch(name) is not None


def _normalize(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()
