"""Pool of CUDA side streams, reused from owner to owner.

cuBLAS keeps a workspace, 32 MiB on an H100, for each stream on which a thread has run a matrix product, until the process ends.
With new streams for each engine, or with streams in another order, each engine would leave 100 MB behind.
"""

from __future__ import annotations

import time
import weakref
from contextlib import AbstractContextManager, nullcontext

import torch

_POLL_SECONDS = 0.001
_free: dict[torch.device, list[torch.cuda.Stream]] = {}


def side_stream(owner: object, device: torch.device) -> torch.cuda.Stream:
    """Reserve a stream for the lifetime of `owner`; the next owner's work runs after the work left on it."""
    free = _free.setdefault(device, [])
    free.sort(key=lambda stream: stream.stream_id)  # engines reserve in the same order, so each stream keeps its use
    stream = free.pop(0) if free else torch.cuda.Stream(device)
    weakref.finalize(owner, free.append, stream).atexit = False
    return stream


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Make a stream the current one; None, on a CPU, changes nothing."""
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def wait_until_idle(stream: torch.cuda.Stream, seconds: float) -> bool:
    """Wait at most `seconds` for all work on a stream, and return whether it has ended; other threads run meanwhile."""
    end = time.monotonic() + seconds
    while True:
        try:
            if stream.query():
                return True
        except RuntimeError:  # a failed device runs no work
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_SECONDS)
