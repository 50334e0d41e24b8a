"""A fake GPU for inspecting launches: kernels are specialized for it and can be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Hopper:
    """The parts of a GPU driver that compilation needs; a launch would fail."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def hopper(*modules: ModuleType) -> Iterator[None]:
    """Within, Triton sees a fake GPU for which no kernel of `modules` is compiled."""
    kernels = [each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)]
    for kernel in kernels:
        kernel.device_caches.clear()
    with patch.object(driver, "_active", Hopper()):
        yield
    for kernel in kernels:
        kernel.device_caches.clear()
