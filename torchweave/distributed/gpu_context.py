"""Create a GPU's context while the interpreter imports: the driver needs tenths of a second for it, and not torch."""

from __future__ import annotations

import ctypes
import threading
from importlib.util import find_spec
from pathlib import Path

_DRIVER = "libcuda.so.1"


def open_gpu_context(index: int) -> threading.Thread | None:
    """Start a thread that creates the context torch will use on GPU `index`; None if torch is built without CUDA.

    Errors are ignored: torch reports them later.
    """
    spec = find_spec("torch")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders):
        return None
    thread = threading.Thread(target=_make_context, args=(index,), name="torchweave-gpu", daemon=True)
    thread.start()
    return thread


def _make_context(index: int) -> None:
    """Retain the device's primary context, which torch then shares. ctypes releases the interpreter lock during calls."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
