"""Triton kernels to be built elsewhere: found by looking at launches, built without a GPU, and put where launches find them."""

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
_POLL_SECONDS = 0.1  # between two looks for what another process builds


@dataclass(frozen=True)
class KernelSpec:
    """A kernel to be built: everything that it is specialised for.

    Attributes:
        module, name: where the kernel's function is.
        device: index of the GPU that it was to be launched on.
        key: of the built kernel among those of this function on this device.
        signature, constants, attributes, options: as Triton's compiler takes them.
        target: backend, architecture, and threads of a warp.
        folder: Triton's cache.
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
        found = getattr(import_module(self.module), self.name)
        _hash_inner_first(found)
        return found

    @cached_property
    def digest(self) -> str:
        """Under which Triton's cache has the kernel."""
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.backends.compiler import GPUTarget
        from triton.compiler import get_cache_key, make_backend

        backend = make_backend(GPUTarget(*self.target))
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(self._source(), backend, options, env_vars=get_cache_invalidating_env_vars())
        return hashlib.sha256(key.encode()).hexdigest()

    def cached_kernel(self) -> BuiltKernel | None:
        """The kernel from Triton's cache, which must be that of this process; None when it is not there."""
        return self._find_built(self.digest, self._source().name)

    def build(self) -> BuiltKernel:
        """The kernel and what launches it, built or from Triton's cache; no GPU is needed.

        In a process of its own: it names the folder of the cache.
        """
        import triton
        from triton.backends.compiler import GPUTarget

        set_triton_cache_dir(self.folder)
        source = self._source()
        compiled = triton.compile(source, target=GPUTarget(*self.target), options=dict(self.options))
        built = self._find_built(compiled.hash, source.name)
        assert built is not None
        if self.target[0] == "cuda":
            # Up to Triton 3.6 that is C, and takes as long as a small kernel. Where it cannot be built, the first launch says so.
            with contextlib.suppress(Exception):
                _cuda_launcher(source, compiled.metadata)
        return built

    def install(self, built: BuiltKernel) -> None:
        """Let launches find the kernel; the first of them loads it onto the GPU."""
        from triton.compiler import CompiledKernel

        kernels = self.kernel().device_caches[self.device][0]
        kernels.setdefault(self.key, CompiledKernel(self._source(), built.files, built.digest))

    def load(self) -> None:
        """Load the kernel onto its GPU, if it was put in place; without this its first launch does."""
        import torch

        built = self.kernel().device_caches[self.device][0].get(self.key)
        if built is not None:
            with torch.cuda.device(self.device):
                _ = built.run  # a property, which loads

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
    """The kernels that `launch` needs and this process has not built yet. None is launched: their results must steer nothing.

    Other threads launch as they always do.
    """
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    set_triton_cache_dir(knobs.cache.dir)  # Inductor would name another folder when it first builds one
    found: dict[tuple[str, str, int, str], KernelSpec] = {}
    with _hook_lock:
        mine, run, hook = threading.get_ident(), JITFunction.run, knobs.runtime.jit_cache_hook

        def run_without_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return run(kernel, *args, grid=grid, warmup=warmup or threading.get_ident() == mine, **kwargs)

        def record_spec(**facts: Any) -> bool | None:
            if threading.get_ident() != mine:
                return None if hook is None else hook(**facts)
            spec = _kernel_spec(
                facts["fn"].jit_function, facts["compile"], driver.active.get_current_target(), knobs.cache.dir
            )
            found.setdefault((spec.module, spec.name, spec.device, spec.key), spec)
            return True

        JITFunction.run, knobs.runtime.jit_cache_hook = run_without_launch, record_spec  # type: ignore[method-assign]
        try:
            launch()
        finally:
            JITFunction.run, knobs.runtime.jit_cache_hook = run, hook  # type: ignore[method-assign]
    return list(found.values())


def _cuda_launcher(source: Any, facts: Any) -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(source, facts)


def _hash_inner_first(kernel: Any) -> None:
    """Triton 3.6 makes another key for a kernel whose functions were hashed before than for one whose were not."""
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    if kernel.hash is not None:
        return
    for name in kernel.fn.__code__.co_names:
        for found in (kernel.fn.__globals__.get(name), getattr(tl, name, None)):
            if isinstance(found, JITFunction) and found is not kernel:
                _hash_inner_first(found)
    assert kernel.cache_key


def missing_kernels(wanted: Iterable[KernelSpec]) -> list[KernelSpec]:
    """What has to be built; what Triton's cache has is put in place."""
    not_built = []
    for spec in wanted:
        cached_kernel = spec.cached_kernel()
        if cached_kernel is None:
            not_built.append(spec)
        else:
            spec.install(cached_kernel)
    return not_built


def wait_for_kernels(wanted: list[KernelSpec], timeout: float) -> list[KernelSpec]:
    """Wait while another process builds kernels, and put each in place; returns what is missing once none came for `timeout` s."""
    since = time.monotonic()
    while wanted and time.monotonic() - since < timeout:
        time.sleep(_POLL_SECONDS)
        not_built = missing_kernels(wanted)
        if len(not_built) < len(wanted):
            wanted, since = not_built, time.monotonic()
    return wanted


def _kernel_spec(kernel: Any, facts: dict[str, Any], target: Any, folder: str) -> KernelSpec:
    """An order from what Triton tells its hook."""
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
