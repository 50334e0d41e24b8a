"""What Python's collector of cycles need not look through: it stops every thread while it looks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
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
def for_good() -> Iterator[None]:
    """What is imported in here stays, and the collector never looks at it, now or later. For processes of the project's own."""
    with uncollected():
        yield
        gc.freeze()


@contextmanager
def at_rest() -> Iterator[None]:
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
