"""Modules that somebody imports for code that no engine runs, imported when that code runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


@contextmanager
def standing_in(names: Mapping[str, tuple[str, ...]]) -> Iterator[None]:
    """In here these modules are not imported when somebody imports them.

    Args:
        names: by module, what is only imported or named while others are imported, and called later, if ever. Whoever needs more of
            a module gets it as ever.
    """
    stand_ins = [_StandIn(module, later) for module, later in names.items() if module not in sys.modules]
    sys.modules.update({each.__name__: each for each in stand_ins})
    try:
        yield
    finally:
        for each in stand_ins:
            each.leave()


class _StandIn(ModuleType):
    """Stands for a module until something of it is asked for that is none of what is called `later`."""

    def __init__(self, name: str, later: tuple[str, ...]) -> None:
        super().__init__(name)
        self._later = later
        if "." not in name:  # else the packages around it would be imported to find it
            self.__spec__ = find_spec(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of every module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in self._later:
            return _called_later(self.__name__, name)
        self.leave()
        return getattr(import_module(self.__name__), name)

    def leave(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


def _called_later(module: str, name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    return function
