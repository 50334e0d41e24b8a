"""When Python's garbage collector must wait."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_waits() -> Iterator[None]:
    """Nothing is collected meanwhile, and the collector is as it was afterwards.

    Tracing makes many objects that stay, so that the collector goes through all of them again and again for next to nothing.
    """
    collect = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collect:
            gc.enable()
