"""Runs a function on several ranks: gloo processes on this machine, each with its `ProcessGroups`."""

from __future__ import annotations

import gc
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore

from torchweave.distributed.process_groups import ProcessGroups, destroy_process_groups, init_process_groups

_TIMEOUT = 120.0
_PRELOAD = [
    "torchweave.engine.startup.build",
    "torchweave.verify.zoo",
    "torchweave.distributed.symmetric_memory",
    "torch._functorch.aot_autograd",
    "torch._inductor.codecache",
    "torch.utils.cpp_extension",
    "transformers.tokenization_utils_tokenizers",
    "pytest",
]
"""What most ranks import, which takes 5 s of CPU time: imported once, by the process that ranks on a CPU are forked from."""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    pipeline_parallel_size: int = 1,
    device: str = "cpu",
) -> list[Any]:
    """`function(process_groups, *args)` on `size` new processes; returns what each rank returned, by rank.

    `function` is one that a new process can import by name; args and results are pickled. `device="cuda"` gives rank N the
    device `cuda:N`. The first fault of any rank is raised here, with that rank's traceback, and all ranks are ended.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shape = size // pipeline_parallel_size, pipeline_parallel_size, device, store.port
    return _run_processes([(_in_process_groups, (function, rank, *shape, args)) for rank in range(size)], device)


def run_torchrun_ranks(function: Callable[..., Any], size: int, *args: Any) -> Any:
    """What rank 0 returns of `function(*args)`, which `size` processes run in the environment that torchrun gives its ranks.

    Ranks of an engine (`executor="torchrun"`) without a start of their own: imports are those of `run_ranks`. Ranks that torchrun
    and engines start are tested in tests/distributed/test_launchers.py and tests/engine/ranks/test_ranks.py.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return _run_processes([(_as_torchrun_does, (function, rank, size, port, args)) for rank in range(size)])[0]


def _run_processes(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]], device: str = "cpu") -> list[Any]:
    """Make each of the calls in a new process."""
    context = mp.get_context("spawn" if device == "cuda" else "forkserver")
    if device == "cpu":
        context.set_forkserver_preload(_PRELOAD)
    pipes, processes = [], []
    try:
        for call in calls:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, *call), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return _results(pipes, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _results(pipes: list[Connection], processes: list[Any]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=_TIMEOUT)
        if not ready:
            raise TimeoutError(f"ranks {sorted(set(range(len(pipes))) - set(results))} said nothing for {_TIMEOUT} s")
        failed = []
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                worked, results[rank] = pipe.recv()
            except EOFError:
                processes[rank].join(10)
                worked, results[rank] = False, f"the process ended with exit code {processes[rank].exitcode}"
            if not worked:
                failed.append(f"rank {rank}:\n{results[rank]}")
        if failed:
            raise AssertionError("\n".join(failed))
    return [results[rank] for rank in range(len(pipes))]


def _run(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    gc.set_threshold(50_000)  # as in tests/conftest.py
    torch.set_num_threads(1)
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _in_process_groups(
    function: Callable[..., Any],
    rank: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    device: str,
    port: int,
    args: tuple[Any, ...],
) -> Any:
    own = f"cuda:{rank}" if device == "cuda" else device
    if own != "cpu":
        torch.cuda.set_device(own)
    store = TCPStore("localhost", port, is_master=False)
    process_groups: ProcessGroups = init_process_groups(
        rank, tensor_parallel_size, pipeline_parallel_size, own, store, _TIMEOUT
    )
    result = function(process_groups, *args)
    process_groups.barrier()  # a rank that leaves early would take its end of the groups with it
    destroy_process_groups(process_groups)
    return result


def _as_torchrun_does(function: Callable[..., Any], rank: int, size: int, port: int, args: tuple[Any, ...]) -> Any:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"})
    try:
        return function(*args)
    except SystemExit as end:  # an engine's other ranks end their process when rank 0 closes it
        assert rank and not end.code, end
        return None
