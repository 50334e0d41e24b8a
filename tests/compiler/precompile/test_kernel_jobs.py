"""Kernels are found by tracing launches, built by worker processes, and used by later launches."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from pkgutil import walk_packages

import pytest
import torch

triton = pytest.importorskip("triton")

from triton import knobs  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tests.ops import hopper as hoppers  # noqa: E402
from torchweave.compiler.precompile import workers as kernel_workers  # noqa: E402
from torchweave.compiler.precompile.kernel_jobs import (  # noqa: E402
    hash_launches_inner_first,
    kernel_specs,
    missing_kernels,
    wait_for_kernels,
)
from torchweave.compiler.precompile.workers import KernelWorkers  # noqa: E402
from torchweave.ops import kernels  # noqa: E402
from torchweave.ops.kernels import step_io as step  # noqa: E402
from torchweave.ops.kernels.quant import int_linear, int_rows  # noqa: E402
from torchweave.ops.kernels.sampling import sample as sampling  # noqa: E402
from torchweave.ops.quant.int_linear import IntConfig  # noqa: E402
from torchweave.ops.sampling.sample import GREEDY_BELOW  # noqa: E402
from torchweave.ops.slot_state import SlotState  # noqa: E402


@pytest.fixture
def hopper(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A simulated GPU without built kernels, and an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with hoppers.hopper(sampling, step):
        yield


def advance() -> None:
    state, rows = SlotState(4, 2), torch.zeros(4, dtype=torch.int32)
    fields = (state.last_token, state.position, state.min_position, state.stop_ids)
    step.launch_advance(rows, state.slots, rows, *fields, rows)


def scatter() -> None:
    step.launch_scatter(torch.zeros(64, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), 4)


def both() -> None:
    scatter()
    advance()
    scatter()


def draw() -> None:
    state = SlotState(4, 2)
    sampling.launch_sample(torch.zeros(4, 64), state.slots, state, torch.zeros(4, dtype=torch.int32), GREEDY_BELOW)


@pytest.mark.usefixtures("hopper")
def test_kernels_built_by_workers_are_used_by_launches_and_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [*kernel_specs(both), *kernel_specs(scatter)]
    assert [spec.name for spec in wanted] == ["scatter_kernel", "advance_kernel", "scatter_kernel"]
    assert missing_kernels(wanted) == wanted
    with KernelWorkers(2) as workers:
        workers.begin(wanted)
        assert workers.finish() == []
    assert kernel_specs(scatter) == kernel_specs(advance) == []  # they are in place
    for kernel in (step.scatter_kernel, step.advance_kernel):
        kernel.device_caches.clear()
    again = kernel_specs(scatter)
    assert again == wanted[2:] and missing_kernels(again) == [] and kernel_specs(scatter) == []  # from the cache
    loaded: list[str] = []
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(CompiledKernel, "run", property(lambda kernel: loaded.append(kernel.name)))
    for spec in wanted[:2]:
        spec.load()
    assert loaded == ["scatter_kernel"], "what is not in place is left to its launch"


@pytest.mark.usefixtures("hopper")
def test_rank_waits_for_kernels_built_by_another_rank() -> None:
    wanted = kernel_specs(both)
    begin = time.monotonic()
    assert wait_for_kernels(wanted, timeout=0.2) == wanted and time.monotonic() - begin < 5  # no worker builds them
    another = threading.Thread(
        target=lambda: [spec.build() for spec in [*kernel_specs(scatter), *kernel_specs(advance)]]
    )
    another.start()
    assert wait_for_kernels(wanted, timeout=20.0) == []
    another.join()
    assert kernel_specs(both) == []


@pytest.mark.usefixtures("hopper")
def test_launcher_is_built_with_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is C code linked to the GPU's library, which a stub replaces here."""
    if not hasattr(triton.backends.nvidia.driver, "make_launcher"):
        pytest.skip("from Triton 3.7 on one function launches all kernels")
    compiler = shutil.which("gcc") or pytest.skip("there is no compiler of C")
    text = Path(triton.backends.nvidia.driver.__file__).read_text()
    names = {*re.findall(r"cu[A-Z]\w+", text), "cuGetErrorString", "cuFuncSetAttribute"}
    source = tmp_path / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libcuda.so.1")], check=True)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with KernelWorkers(1) as workers:
        workers.begin(kernel_specs(scatter))
        assert workers.finish() == []
    assert len([*tmp_path.glob("*/__triton_launcher*.so")]) == 1


@pytest.mark.usefixtures("hopper")
def test_kernel_key_does_not_depend_on_hashing_order() -> None:
    """A worker that builds only the second of two kernels with shared functions uses the same key as this process."""
    shared = [each for each in vars(sampling).values() if isinstance(each, JITFunction)]
    for kernel in shared:
        kernel.hash = None
    *_, last = kernel_specs(draw)
    together = last.kernel().cache_key
    for kernel in shared:
        kernel.hash = None
    assert last.name == "finish_kernel" and last.kernel().cache_key == together


def multiply() -> None:
    x, w = torch.empty(1, 256, dtype=torch.bfloat16), torch.empty(64, 32, dtype=torch.int32)
    scale, out = torch.empty(64, 2, dtype=torch.bfloat16), torch.empty(1, 64, dtype=torch.bfloat16)
    IntConfig("row", 4, 4, 1).run(x, w, scale, None, None, 128, out)


@pytest.mark.usefixtures("hopper")
def test_launch_finds_a_kernel_that_a_worker_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start from a full cache launches kernels that were not traced before."""
    keys: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr("triton.compiler.compile", lambda source, **_: keys.append(source.fn.cache_key))
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *a, **b: run(kernel, *a, **b | {"warmup": True}))
    for prepare in (lambda: None, hash_launches_inner_first):
        for kernel in (each for each in vars(int_rows).values() if isinstance(each, JITFunction)):
            kernel.hash = None
        with hoppers.hopper(int_linear, int_rows):
            prepare()
            multiply()
    launched_first, launched = keys
    with hoppers.hopper(int_linear, int_rows):
        (traced,) = kernel_specs(multiply)
    int_rows.row_kernel.hash = None
    assert launched == traced.kernel().cache_key
    assert launched_first != launched or not triton.__version__.startswith("3.6"), "Triton needs no hook any more"


def test_workers_exit_silently_when_the_process_that_started_them_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("signal.signal", "gc.disable"):
        monkeypatch.setattr(f"torchweave.compiler.precompile.workers.{name}", lambda *_: None)
    parent, worker = kernel_workers.Pipe()
    worker.send("a result that nobody reads")
    parent.close()
    kernel_workers.main(os.dup(worker.fileno()), 1)


def test_kernel_key_does_not_depend_on_addresses() -> None:
    """Triton 3.6 sorts the global variables of a kernel and of its inner functions by name and by the address of their module."""
    modules = [importlib.import_module(each.name) for each in walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    functions = [each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)]
    assert len(functions) > 100
    for function in functions:
        values: dict[str, set[str]] = {}
        for inner in _inner_functions(function):
            for (name, _), (value, _) in inner.used_global_vals.items():
                values.setdefault(name, set()).add(str(value))
        ambiguous = [name for name, different in values.items() if len(different) > 1]
        assert not ambiguous, f"{function.fn.__module__}.{function.fn.__name__} reads two global variables {ambiguous}"


def _inner_functions(function: JITFunction) -> Iterator[JITFunction]:
    """The function, hashed, and those that it calls."""
    assert function.cache_key
    yield function
    for name in function.fn.__code__.co_names:
        inner = function.fn.__globals__.get(name)
        if isinstance(inner, JITFunction) and inner is not function:
            yield from _inner_functions(inner)


@pytest.mark.usefixtures("hopper")
def test_failed_kernel_is_reported_and_others_are_built() -> None:
    good, bad = *kernel_specs(scatter), *kernel_specs(advance)
    with KernelWorkers(2) as workers:
        workers.begin([replace(bad, signature={}), good])
        (told,) = workers.finish()
        assert workers.finish() == []
    assert told.startswith("advance_kernel: ")
    assert kernel_specs(scatter) == [] and kernel_specs(advance) == [bad]


@pytest.mark.usefixtures("hopper")
def test_tracing_launches_leaves_no_patches() -> None:
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def fail() -> None:
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        kernel_specs(fail)
    assert JITFunction.run is run and knobs.runtime.jit_cache_hook is hook
