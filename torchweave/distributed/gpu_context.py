"""The context of a GPU, made while the interpreter imports: it takes the driver some tenths of a second, and no torch."""

from __future__ import annotations

import ctypes
import threading
from importlib.util import find_spec
from pathlib import Path

_DRIVER = "libcuda.so.1"


def open_gpu_context(index: int) -> threading.Thread | None:
    """Begin to make the context that torch will use on the GPU of that number; None where torch uses none.

    What goes wrong is left to torch, which will say it.
    """
    spec = find_spec("torch")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders):
        return None
    thread = threading.Thread(target=_make_context, args=(index,), name="torchweave-gpu", daemon=True)
    thread.start()
    return thread


def _make_context(index: int) -> None:
    """The device's primary context, which whoever asks for it later gets too. Calls of ctypes hold no lock of the interpreter."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
