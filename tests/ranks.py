"""Runs a function on several ranks: gloo processes on this machine, each with its `ProcessGroups`."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore

from torchweave.distributed.process_groups import ProcessGroups, destroy_process_groups, init_process_groups

_TIMEOUT = 120.0
_PRELOAD = ["torchweave.models", "torchweave.verify.zoo", "torchweave.distributed.symmetric_memory", "pytest"]
"""What most ranks import, which takes 4 s of CPU time: imported once, by the process that ranks on a CPU are forked from."""


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
    context = mp.get_context("spawn" if device == "cuda" else "forkserver")
    if device == "cpu":
        context.set_forkserver_preload(_PRELOAD)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            call = (function, rank, size // pipeline_parallel_size, pipeline_parallel_size, device, store.port, args)
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


def _run(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    device: str,
    port: int,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
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
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
