"""What Python's collector of cycles need not look through: it stops every thread while it looks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_AUTO_COLLECT_THRESHOLD = 50_000
"""New objects after which the interpreter collects by itself, where nobody calls `collect_if_due` for so long."""
_YOUNG_THRESHOLD, _OLDER_THRESHOLD = 700, 10  # the interpreter's own: new objects, and collections of what is younger


@contextmanager
def gc_paused() -> Iterator[None]:
    """The collector rests in here. Imports and tracing make a million objects that stay, and it would go through all of them again
    and again: 1.2 s of an engine's 5.5 s of imports, and nothing was found."""
    collect = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collect:
            gc.enable()


@contextmanager
def gc_frozen_after() -> Iterator[None]:
    """What is imported in here stays, and the collector never looks at it, now or later. For processes of the project's own."""
    with gc_paused():
        yield
        gc.freeze()


@contextmanager
def gc_frozen() -> Iterator[None]:
    """What exists when this begins is looked through again only when it has ended.

    While an engine runs that is all that was imported and woven, half a million objects or more: to look through them took 0.4 s in
    the middle of requests, and nothing was found.
    """
    gc.collect(1)  # what was let go of lately; not what is old, which takes as long
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def gc_frozen_manual_collect() -> Iterator[None]:
    """As `gc_frozen`; and what is made in here is collected when somebody calls `collect_if_due`."""
    usual = gc.get_threshold()
    with gc_frozen():
        gc.set_threshold(_AUTO_COLLECT_THRESHOLD, *usual[1:])
        try:
            yield
        finally:
            gc.set_threshold(*usual)


def collect_if_due() -> None:
    """Collect what the interpreter would have collected by now, at a moment when nobody waits: 1 to 9 ms."""
    young, middle, old = gc.get_count()
    if young > _YOUNG_THRESHOLD:
        gc.collect(2 if old > _OLDER_THRESHOLD else 1 if middle > _OLDER_THRESHOLD else 0)
