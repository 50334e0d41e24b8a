"""Inductor imports no training-only modules and leaves no unused worker processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch._inductor import async_compile, config

from torchweave.compiler.codegen.inductor import load_kernels_in_process, start_inductor_workers, stop_inductor_workers

IMPORTS = """
import os, sys
import torch  # once for all, which takes seconds
from torchweave.compiler.codegen.inductor import import_inductor_in_background, start_inductor_workers
for way in sys.argv[1:]:
    if os.fork() == 0:
        with eval(way):
            pass
        import torch._inductor.compile_fx
        assert "torch._functorch.partitioners" in sys.modules
        assert "networkx" not in sys.modules, "imported for nothing"
        from torch._functorch._activation_checkpointing import knapsack_evaluator
        assert list(knapsack_evaluator.nx.topological_sort(knapsack_evaluator.nx.DiGraph([(2, 1)]))) == [2, 1]
        import networkx
        assert networkx.DiGraph is sys.modules["networkx"].DiGraph and networkx.__file__
        sys.exit()
    assert os.wait()[1] == 0, way
"""


def test_inductor_import_skips_training_only_modules() -> None:
    ways = "import_inductor_in_background()", "start_inductor_workers(torch.device('cpu'))"
    command = [sys.executable, "-c", IMPORTS, *ways]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Pool:
    """Processes that take their time to end."""

    def __init__(self) -> None:
        self.pending_futures: dict[int, Any] = {}
        self.told, self.may_end, self.ended = threading.Event(), threading.Event(), threading.Event()

    def shutdown(self) -> None:
        self.told.set()
        assert self.may_end.wait(20)
        self.ended.set()


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    pools: set[Any] = set()
    monkeypatch.setattr(async_compile, "_pool_set", pools)
    monkeypatch.setattr(async_compile.AsyncCompile, "_ready_future", None)
    return pools


def test_inductor_workers_end_after_compilation_without_waiting(pools: set[Any]) -> None:
    pool = Pool()
    with stop_inductor_workers():
        pools.add(pool)
        async_compile.AsyncCompile._ready_future = object()  # type: ignore[assignment]
    assert pool.told.wait(20) and not pool.ended.is_set()
    assert not pools and async_compile.AsyncCompile._ready_future is None, "the next piece would be sent to them"
    pool.may_end.set()
    assert pool.ended.wait(20)


def test_workers_of_other_code_are_kept(pools: set[Any]) -> None:
    theirs = Pool()
    pools.add(theirs)
    with stop_inductor_workers():
        pass
    assert pools == {theirs} and not theirs.told.is_set()


def test_busy_workers_of_other_code_are_kept(pools: set[Any]) -> None:
    pool, ready = Pool(), object()
    pool.may_end.set()
    for theirs in ({0: ready, 1: object()}, {0: ready}):
        with stop_inductor_workers():
            pools.add(pool)
            pool.pending_futures = theirs
            async_compile.AsyncCompile._ready_future = ready  # type: ignore[assignment]
        assert (pool in pools) == (len(theirs) == 2)
        pools.clear()
    assert pool.ended.wait(20)


def test_cached_kernels_are_loaded_without_workers() -> None:
    threads = async_compile.get_compile_threads()
    with load_kernels_in_process(kernels=False):
        assert async_compile.get_compile_threads() == threads
    with load_kernels_in_process(kernels=True):
        assert async_compile.get_compile_threads() == 1 and not async_compile.AsyncCompile.use_process_pool()
    assert config.compile_threads == threads


def test_reawakened_workers_end_too(pools: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    pool.may_end.set()
    monkeypatch.setattr(async_compile.AsyncCompile, "wakeup", lambda: pools.add(pool))
    with stop_inductor_workers(), start_inductor_workers(torch.device("cuda")):
        pass
    assert pool.ended.wait(20)
