"""OpenMP worker threads of torch on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_SOFT_PAUSE = 1  # omp_pause_soft: frees resources, keeps settings


@cache
def _pause() -> Callable[[int], int] | None:
    """The loaded OpenMP's `omp_pause_resource_all`, kept since opening a library takes 70 us."""
    return getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)


def release_workers() -> bool:
    """End the calling thread's OpenMP workers, which its next parallel region starts again; False if the OpenMP cannot do this.

    A model is built on one thread and runs on another. With more workers than processors, each of the hundred short loops of a
    decode step would wake a thread that waits for a processor: 8 ms instead of 3 on two processors.
    """
    pause = _pause()
    return pause is not None and pause(_SOFT_PAUSE) == 0
