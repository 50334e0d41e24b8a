"""Control of Python's garbage collector, whose collections stop every thread."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_AUTO_COLLECT_THRESHOLD = 50_000
"""New objects until an automatic collection, if `collect_if_due` is not called before."""
# The interpreter's defaults: new objects, and collections of the younger generation.
_YOUNG_THRESHOLD, _OLDER_THRESHOLD = 700, 10


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable collection in this context. Imports and tracing create a million long-lived objects: repeated collections took
    1.2 s of an engine's 5.5 s of imports and freed nothing."""
    collect = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collect:
            gc.enable()


@contextmanager
def gc_frozen_after() -> Iterator[None]:
    """Freeze all objects at the end of this context for the life of the process; for this project's own processes."""
    with gc_paused():
        yield
        gc.freeze()


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Freeze the existing objects during this context.

    A running engine has half a million objects or more from imports and compilation: a full collection took 0.4 s in the middle of
    requests and freed nothing.
    """
    gc.collect(1)  # young generations only: a full collection takes as long as the pause to avoid
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def gc_frozen_manual_collect() -> Iterator[None]:
    """Like `gc_frozen`, with new objects collected mainly by calls of `collect_if_due`."""
    usual = gc.get_threshold()
    with gc_frozen():
        gc.set_threshold(_AUTO_COLLECT_THRESHOLD, *usual[1:])
        try:
            yield
        finally:
            gc.set_threshold(*usual)


def collect_if_due() -> None:
    """Run the collection that the interpreter's default thresholds demand, at a time when no request waits: 1 to 9 ms."""
    young, middle, old = gc.get_count()
    if young > _YOUNG_THRESHOLD:
        gc.collect(2 if old > _OLDER_THRESHOLD else 1 if middle > _OLDER_THRESHOLD else 0)
