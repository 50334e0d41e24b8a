"""Inductor as it lives in a process: what it imports, and when the processes start and end in which it builds kernels."""

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
"""What AOTAutograd draws pictures of a training step's memory with: 0.2 to 1 s of imports, as many packages as are installed are
asked whether they have backends for it."""


@contextmanager
def import_inductor_in_background(wanted: bool = True) -> Iterator[None]:
    """Import what loads a built piece, which takes most of a second, while in here nothing is imported; it is there at the end."""
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
    """Start the processes in which Inductor builds kernels for a GPU; they are started at the end of this.

    They take some seconds to be ready, and until then it builds one after the other in this process. To start them it first hashes
    torch's source, 2500 files, which is mostly reading.
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
    """The processes that are started in here are told to end, and nobody waits for that: whoever exits would wait 2 s.

    They stay where somebody else has work for them, who compiles code of his own in another thread.
    """
    before = _pools()
    try:
        yield
    finally:
        started = _pools() - before
        if started and not before and not any(map(_is_busy, started)):
            from torch._inductor import async_compile

            async_compile.AsyncCompile._ready_future = None
            async_compile.after_fork()  # whoever builds kernels from now on starts others
            for pool in started:
                threading.Thread(target=pool.shutdown, name="torchweave-ending", daemon=True).start()


def _is_busy(pool: Any) -> bool:
    """Whether it has work, beside the one that says when its processes are there."""
    from torch._inductor.async_compile import AsyncCompile

    work = list(getattr(pool, "pending_futures", {}).values())
    return any(each is not AsyncCompile._ready_future for each in work)


def _pools() -> set[Any]:
    """The groups of processes that there are; none where nobody has asked for one."""
    return set(getattr(sys.modules.get("torch._inductor.async_compile"), "_pool_set", ()))


@contextmanager
def load_kernels_in_process(kernels: bool) -> Iterator[None]:
    """What is loaded in here has its `kernels`, if it has any for a GPU, loaded by this process.

    Inductor would first start those that build kernels: it hashes torch's source for them, and waits for them at the end.
    """
    from torch._inductor import config

    with config.patch(compile_threads=1) if kernels else nullcontext():
        yield
