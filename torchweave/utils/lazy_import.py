"""Lazy import of modules that dependencies import for code that an engine does not run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


@contextmanager
def lazy_modules(names: Mapping[str, tuple[str, ...]]) -> Iterator[None]:
    """Replace modules by placeholders in this context: importing them does not run them.

    Args:
        names: by module, its functions that importers bind and call only later. Access to any other attribute imports the module.
    """
    placeholders = [_LazyModule(module, deferred) for module, deferred in names.items() if module not in sys.modules]
    sys.modules.update({each.__name__: each for each in placeholders})
    try:
        yield
    finally:
        for each in placeholders:
            each._uninstall()


class _LazyModule(ModuleType):
    """Placeholder that imports its module when an attribute not in `deferred` is accessed."""

    def __init__(self, name: str, deferred: tuple[str, ...]) -> None:
        super().__init__(name)
        self._deferred = deferred
        if "." not in name:  # find_spec of a submodule imports its packages
            self.__spec__ = find_spec(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the interpreter looks these up on every module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in self._deferred:
            return _deferred_function(self.__name__, name)
        self._uninstall()
        return getattr(import_module(self.__name__), name)

    def _uninstall(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


def _deferred_function(module: str, name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    return function
