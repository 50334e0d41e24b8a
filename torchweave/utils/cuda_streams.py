"""Streams of a GPU beside the default one, which go from owner to owner.

cuBLAS keeps a workspace, 32 MiB on an H100, for each stream on which a thread has run a product, until the process ends. An engine
with streams that nobody had before would leave 100 MB behind, and so would one whose streams had other uses before.
"""

from __future__ import annotations

import time
import weakref

import torch

_POLL_SECONDS = 0.001
_free: dict[torch.device, list[torch.cuda.Stream]] = {}


def side_stream(owner: object, device: torch.device) -> torch.cuda.Stream:
    """A stream that is `owner`'s alone for as long as it exists; the next owner's work runs behind what is left on it."""
    free = _free.setdefault(device, [])
    free.sort(key=lambda stream: stream.stream_id)  # engines ask in the same order, so that each stream keeps its use
    stream = free.pop(0) if free else torch.cuda.Stream(device)
    weakref.finalize(owner, free.append, stream).atexit = False
    return stream


def wait_until_idle(stream: torch.cuda.Stream, seconds: float) -> bool:
    """Wait until all work on a stream has ended, so many seconds at the most; whether it has. Other threads run meanwhile."""
    end = time.monotonic() + seconds
    while True:
        try:
            if stream.query():
                return True
        except RuntimeError:  # a device that has failed runs nothing any more
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_SECONDS)
