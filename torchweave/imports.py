"""Imports of a process that is the project's own: a command, a rank, the engine of a server."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """The collector rests in here: the engine's imports make 1.5 million objects, through which it went a thousand times, 1.2 s of
    5.5, and found nothing."""
    collect = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collect:
            gc.enable()


@contextmanager
def for_good() -> Iterator[None]:
    """What is imported in here stays, and the collector never looks at it, now or later."""
    with uncollected():
        yield
        gc.freeze()
