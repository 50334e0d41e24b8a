"""A GPU that is not there, for looking at launches: kernels are specialised for it, and may be built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Hopper:
    """As much of a GPU's driver as compiling asks for; a launch would fail."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def hopper(*modules: ModuleType) -> Iterator[None]:
    """In here Triton finds a GPU on which no kernel of `modules` was built yet."""
    kernels = [each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)]
    for kernel in kernels:
        kernel.device_caches.clear()
    with patch.object(driver, "_active", Hopper()):
        yield
    for kernel in kernels:
        kernel.device_caches.clear()
