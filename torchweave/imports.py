"""Imports of a process that is the project's own: a command, a rank, the engine of a server."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def for_good() -> Iterator[None]:
    """What is imported in here stays, and the collector never looks at it: the engine's imports make 1.5 million objects, through
    which it went a thousand times, 1.2 s of 5.5."""
    collect = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if collect:
            gc.enable()
