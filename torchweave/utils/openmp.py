"""OpenMP's worker threads, which belong to the thread that computed with them."""

from __future__ import annotations

import ctypes

_SOFT = 1  # omp_pause_soft: what was allocated is given back, settings stay


def release_workers() -> bool:
    """End the OpenMP workers of the calling thread; they come back with its next parallel computation.

    Once there are more workers than processors, GNU OpenMP lets all of them sleep between loops instead of spinning for a
    moment. A model is built on one thread and runs on another, so without this each of the hundred short loops of a decode
    step would wait for the kernel to wake a thread: 3 ms became 8 on two processors. False: this is another OpenMP.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    return pause is not None and pause(_SOFT) == 0
