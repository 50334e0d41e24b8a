"""The CUDA context is created without torch, on the rank's GPU, and never where torch uses no GPU."""

from __future__ import annotations

import shutil
import subprocess
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from torchweave.config.options import EngineConfig
from torchweave.distributed import gpu_context as gpu
from torchweave.engine.startup import early_start as startup

DRIVER = """
#include <stdio.h>
static int note(const char *name, int number) {
    FILE *file = fopen("%s", "a");
    fprintf(file, "%%s %%d\\n", name, number);
    return fclose(file);
}
int cuInit(unsigned flags) { return note("init", flags); }
int cuDeviceGet(int *device, int index) { *device = index + 10; return index > 7; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return note("retain", device); }
"""


@pytest.fixture
def torch_with_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    spec = ModuleSpec("torch", None, is_package=True)
    assert spec.submodule_search_locations is not None
    spec.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr(gpu, "find_spec", lambda name: spec)


@pytest.mark.usefixtures("torch_with_cuda")
def test_driver_creates_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("gcc") or pytest.skip("there is no compiler of C")
    source, called = tmp_path / "driver.c", tmp_path / "called"
    source.write_text(DRIVER % called)
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "driver.so")], check=True)
    monkeypatch.setattr(gpu, "_DRIVER", str(tmp_path / "driver.so"))
    for index in (3, 9):  # there are eight
        thread = gpu.open_gpu_context(index)
        assert thread is not None
        thread.join()
    assert called.read_text() == "init 0\nretain 13\ninit 0\n"


@pytest.mark.usefixtures("torch_with_cuda")
def test_a_machine_without_a_driver_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_DRIVER", "/no/such/library.so")
    thread = gpu.open_gpu_context(0)
    assert thread is not None
    thread.join()


def test_a_torch_without_cuda_opens_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = ModuleSpec("torch", None, is_package=True)
    monkeypatch.setattr(gpu, "find_spec", lambda name: spec)
    assert gpu.open_gpu_context(0) is None
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert gpu.open_gpu_context(0) is None


@pytest.mark.parametrize(
    ("options", "replica", "leader", "others"),
    [
        ({}, 0, 0, []),
        ({"device": "cuda:2"}, 1, 3, []),
        ({"device": "cpu", "tensor_parallel_size": 2}, 0, None, [None]),
        ({"device": "cuda:2", "tensor_parallel_size": 2}, 0, 2, [3]),
        ({"device": "cuda", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1, 4, [5, 6, 7]),
        ({"tensor_parallel_size": 2, "executor": "ray"}, 0, None, []),
        ({"tensor_parallel_size": 2, "executor": "torchrun"}, 0, None, []),
        ({"device": "cuda:x"}, 0, None, []),
    ],
)
def test_each_rank_opens_its_own_gpu(
    options: dict[str, Any], replica: int, leader: int | None, others: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    started: list[int | None] = []
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(startup, "open_gpu_context", opened.append)
    monkeypatch.setattr(
        "torchweave.distributed.launchers.local._spawn", lambda rank, function, gpu: started.append(gpu)
    )
    startup.prestart_workers(EngineConfig("demo", **options), replica)
    assert opened == ([] if leader is None else [leader]) and started == others
