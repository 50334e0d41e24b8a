"""The C library's allocator."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 20  # bytes


def return_large_allocations() -> bool:
    """Let glibc give allocations above 1 MiB back to the system when they are freed; False for another C library.

    Once it has freed one, glibc takes allocations of its size, up to 32 MiB, from the heap, which keeps them: after four
    bodies of 24 MB, 235 MB stayed with an HTTP process.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _LARGE) == 1
