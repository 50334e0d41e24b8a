"""Inductor's imports and worker processes: import in the background, start, stop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch

from torchweave.utils.lazy_import import lazy_modules

_FOR_TRAINING = {"networkx": ("DiGraph",)}
"""A dependency of AOTAutograd's memory visualisation for training; imports take 0.2 to 1 s, growing with the installed packages."""


@contextmanager
def import_inductor_in_background(wanted: bool = True) -> Iterator[None]:
    """Import the modules that load a built piece in a thread, which takes most of a second; joined at exit.

    The gain is largest around work that imports nothing itself.
    """
    if not wanted:
        yield
        return
    modules = ("torch.export._trace", "torch._inductor.compile_fx", "torch._inductor.standalone_compile")

    def load() -> None:
        with lazy_modules(_FOR_TRAINING):
            for name in modules:
                import_module(name)

    with ThreadPoolExecutor(1, "torchweave-import") as pool:
        importing = pool.submit(load)
        yield
        importing.result()


@contextmanager
def start_inductor_workers(device: torch.device) -> Iterator[None]:
    """Start Inductor's worker processes for GPU kernels in the background; the start has been requested at exit.

    The workers need some seconds; until then Inductor compiles kernels serially in this process. Before the start Inductor hashes
    torch's source (2500 files), which is mostly I/O.
    """
    with lazy_modules(_FOR_TRAINING):
        import_module("torch._functorch.partitioners")
    if device.type != "cuda":
        yield
        return
    from torch._inductor.async_compile import AsyncCompile

    with ThreadPoolExecutor(1, "torchweave-waking") as pool:
        waking = pool.submit(AsyncCompile.wakeup)
        yield
        waking.result()


@contextmanager
def stop_inductor_workers() -> Iterator[None]:
    """Shut down worker processes that were started in the body, without the wait of 2 s that Inductor adds at process exit.

    Workers that are busy for another thread's compilation stay.
    """
    before = _pools()
    try:
        yield
    finally:
        started = _pools() - before
        if started and not before and not any(map(_is_busy, started)):
            from torch._inductor import async_compile

            async_compile.AsyncCompile._ready_future = None
            async_compile.after_fork()  # the next compilation starts new workers
            for pool in started:
                threading.Thread(target=pool.shutdown, name="torchweave-ending", daemon=True).start()


def _is_busy(pool: Any) -> bool:
    """Whether a pool has pending work besides its readiness check."""
    from torch._inductor.async_compile import AsyncCompile

    work = list(getattr(pool, "pending_futures", {}).values())
    return any(each is not AsyncCompile._ready_future for each in work)


def _pools() -> set[Any]:
    """Existing worker pools; empty if Inductor is not imported."""
    return set(getattr(sys.modules.get("torch._inductor.async_compile"), "_pool_set", ()))


@contextmanager
def load_kernels_in_process(kernels: bool) -> Iterator[None]:
    """Load GPU kernels in this process if `kernels`.

    By default Inductor would start its worker processes for that, hash torch's source, and wait for the workers at exit.
    """
    from torch._inductor import config

    with config.patch(compile_threads=1) if kernels else nullcontext():
        yield
