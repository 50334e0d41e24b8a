"""Triton kernels as build jobs: found by tracing launches, built without a GPU, and installed where launches find them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from torchweave.config.options import set_triton_cache_dir

_hook_lock = threading.Lock()
_POLL_SECONDS = 0.1  # between two checks for kernels of another process


@dataclass(frozen=True)
class KernelSpec:
    """A kernel to be built: everything that it is specialized for.

    Attributes:
        module, name: of the kernel's function.
        device: index of the GPU of the launch.
        key: of the built kernel in Triton's table for this function and device.
        signature, constants, attributes, options: arguments of Triton's compiler.
        target: backend, architecture, and threads per warp.
        folder: of Triton's cache.
    """

    module: str
    name: str
    device: int
    key: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: tuple[str, Any, int]
    folder: str

    def kernel(self) -> Any:
        kernel = getattr(import_module(self.module), self.name)
        _hash_inner_first(kernel)
        return kernel

    @cached_property
    def digest(self) -> str:
        """The kernel's key in Triton's cache."""
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.backends.compiler import GPUTarget
        from triton.compiler import get_cache_key, make_backend

        backend = make_backend(GPUTarget(*self.target))
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(self._source(), backend, options, env_vars=get_cache_invalidating_env_vars())
        return hashlib.sha256(key.encode()).hexdigest()

    def cached_kernel(self) -> BuiltKernel | None:
        """The kernel from this process's Triton cache; None when it is not built."""
        return self._find_built(self.digest, self._source().name)

    def build(self) -> BuiltKernel:
        """The kernel and its launcher, built or from Triton's cache, without a GPU.

        Call it in a separate process: it sets the cache folder of the process.
        """
        import triton
        from triton.backends.compiler import GPUTarget

        set_triton_cache_dir(self.folder)
        source = self._source()
        compiled = triton.compile(source, target=GPUTarget(*self.target), options=dict(self.options))
        built = self._find_built(compiled.hash, source.name)
        assert built is not None
        if self.target[0] == "cuda":
            # Up to Triton 3.6 the launcher is C code and takes as long as a small kernel. The first launch reports an error.
            with contextlib.suppress(Exception):
                from triton.backends.nvidia.driver import CudaLauncher

                CudaLauncher(source, compiled.metadata)
        return built

    def install(self, built: BuiltKernel) -> None:
        """Make launches find the built kernel; the first launch loads it onto the GPU."""
        from triton.compiler import CompiledKernel

        kernels = self.kernel().device_caches[self.device][0]
        kernels.setdefault(self.key, CompiledKernel(self._source(), built.files, built.digest))

    def load(self) -> None:
        """Load an installed kernel onto its GPU before its first launch."""
        import torch

        built = self.kernel().device_caches[self.device][0].get(self.key)
        if built is not None:
            with torch.cuda.device(self.device):
                _ = built.run  # a property that loads the kernel

    def _source(self) -> Any:
        from triton.compiler import ASTSource

        return ASTSource(self.kernel(), self.signature, self.constants, self.attributes)

    @staticmethod
    def _find_built(digest: str, name: str) -> BuiltKernel | None:
        from triton.runtime.cache import get_cache_manager

        facts = f"{name[:150]}.json"
        files = get_cache_manager(digest).get_group(facts)
        return None if not files or facts not in files else BuiltKernel(digest, files)


@dataclass(frozen=True)
class BuiltKernel:
    """A built kernel: its digest in Triton's cache, and the paths of its files by name."""

    digest: str
    files: dict[str, str]


def kernel_specs(launch: Callable[[], None]) -> list[KernelSpec]:
    """The kernels of `launch` that this process has not built yet. No kernel runs, so control flow must not depend on results.

    Launches of other threads are not affected.
    """
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    set_triton_cache_dir(knobs.cache.dir)  # Inductor would set another folder at its first build
    specs: dict[tuple[str, str, int, str], KernelSpec] = {}
    with _hook_lock:
        this_thread, run, hook = threading.get_ident(), JITFunction.run, knobs.runtime.jit_cache_hook

        def run_without_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return run(kernel, *args, grid=grid, warmup=warmup or threading.get_ident() == this_thread, **kwargs)

        def record_spec(**facts: Any) -> bool | None:
            if threading.get_ident() != this_thread:
                return None if hook is None else hook(**facts)
            spec = _kernel_spec(
                facts["fn"].jit_function, facts["compile"], driver.active.get_current_target(), knobs.cache.dir
            )
            specs.setdefault((spec.module, spec.name, spec.device, spec.key), spec)
            return True

        JITFunction.run, knobs.runtime.jit_cache_hook = run_without_launch, record_spec  # type: ignore[method-assign]
        try:
            launch()
        finally:
            JITFunction.run, knobs.runtime.jit_cache_hook = run, hook  # type: ignore[method-assign]
    return list(specs.values())


def hash_launches_inner_first() -> None:
    """Hash inner functions first for kernels that launches build, too: then their keys are those of workers and of other starts."""
    from triton import knobs

    if knobs.runtime.jit_cache_hook is None:  # called before the key of a kernel is computed
        knobs.runtime.jit_cache_hook = _hash_launched


def _hash_launched(*, fn: Any, **_: Any) -> None:
    _hash_inner_first(fn.jit_function)


def _hash_inner_first(kernel: Any) -> None:
    """Hash a kernel's inner functions before itself: Triton 3.6's key depends on whether they were hashed before."""
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    if kernel.hash is not None:
        return
    for name in kernel.fn.__code__.co_names:
        for function in (kernel.fn.__globals__.get(name), getattr(tl, name, None)):
            if isinstance(function, JITFunction) and function is not kernel:
                _hash_inner_first(function)
    assert kernel.cache_key


def missing_kernels(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """The kernels that have to be built; installs those in Triton's cache."""
    missing = []
    for spec in specs:
        cached_kernel = spec.cached_kernel()
        if cached_kernel is None:
            missing.append(spec)
        else:
            spec.install(cached_kernel)
    return missing


def wait_for_kernels(specs: list[KernelSpec], timeout: float) -> list[KernelSpec]:
    """Install kernels as another process builds them; returns the missing ones after `timeout` seconds without a new kernel."""
    since = time.monotonic()
    while specs and time.monotonic() - since < timeout:
        time.sleep(_POLL_SECONDS)
        missing = missing_kernels(specs)
        if len(missing) < len(specs):
            specs, since = missing, time.monotonic()
    return specs


def _kernel_spec(kernel: Any, facts: dict[str, Any], target: Any, folder: str) -> KernelSpec:
    """The job of a kernel, from the arguments of Triton's hook."""
    options = json.loads(facts["specialization_data"])["options"]
    return KernelSpec(
        module=kernel.fn.__module__,
        name=kernel.fn.__qualname__,
        device=facts["device"],
        key=facts["key"],
        signature=dict(facts["signature"]),
        constants=dict(facts["constants"]),
        attributes=dict(facts["configs"][0]),
        options={name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
        target=(target.backend, target.arch, target.warp_size),
        folder=folder,
    )
