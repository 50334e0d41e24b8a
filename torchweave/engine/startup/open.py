"""Open an engine over all its ranks, with the configured executor; this process is rank 0."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from functools import partial

import torch

from torchweave.compiler.codegen.inductor import import_inductor_in_background
from torchweave.config import choose_device
from torchweave.config.options import EngineConfig, read_torchrun_env
from torchweave.distributed.launchers import ray, torchrun
from torchweave.distributed.launchers.local import WorkerPool
from torchweave.distributed.process_groups import (
    RendezvousStore,
    abort_groups,
    create_rendezvous_store,
    init_process_groups,
)
from torchweave.distributed.worker_group import RankFailure, WorkerGroup
from torchweave.engine.control.rank import Rank
from torchweave.engine.ranks.control import RankCalls
from torchweave.engine.ranks.leader_runner import Executor, LeaderImageEncoder, LeaderRunner
from torchweave.engine.startup.build import Engine, build, resolve_plan
from torchweave.engine.startup.early_start import WORKER_ENTRYPOINT
from torchweave.engine.startup.listed_adapters import load_listed_adapters
from torchweave.engine.startup.rank_worker import WorkerTask, run_worker
from torchweave.models.load import LoadedModel
from torchweave.report import Report

_LOCALHOST = "127.0.0.1"


def open_engine(
    config: EngineConfig,
    report: Report | None = None,
    loaded: LoadedModel | None = None,
    worker_pool: WorkerPool | None = None,
) -> Engine:
    """Build an engine on all its ranks; `Engine.close` ends the other ranks.

    Args:
        report: receives every decision; None creates one.
        loaded: a model already in memory.
        worker_pool: local ranks started before (`prestart_workers`); the caller ends those left over.

    Raises:
        ValueError: the model or an option is not supported, on any rank; the message says why and what to do.
        RankFailure: a rank ended during the build.
    """
    report = Report() if report is None else report
    engine = _open_ranks(config, report, loaded, worker_pool)
    try:
        load_listed_adapters(engine, report)
    except BaseException:
        engine.close()
        raise
    return engine


def _open_ranks(
    config: EngineConfig, report: Report, loaded: LoadedModel | None, worker_pool: WorkerPool | None
) -> Engine:
    """See `open_engine`."""
    if config.num_ranks == 1:
        return build(config, report, loaded)
    if loaded is not None:
        raise ValueError(
            f"{loaded.name} is in memory already, but each of several ranks loads its own part; give the model's folder or name."
        )
    plan = resolve_plan(config)  # raises before processes are started
    try:
        return _open(config, plan.device, report, worker_pool or WorkerPool(WORKER_ENTRYPOINT))
    except RankFailure as failure:
        if not failure.user_error:
            raise
        sentence = str(failure)
    raise ValueError(sentence)


def _open(config: EngineConfig, device: str, report: Report, worker_pool: WorkerPool) -> Engine:
    starts = {"local": partial(_start_local, worker_pool=worker_pool), "torchrun": _join_torchrun, "ray": _start_on_ray}
    with report.stage("starting ranks"):
        executor = starts[config.executor](config, device)
    try:
        engine = build(config, report, process_groups=executor.process_groups)
        with report.stage("waiting for ranks"):
            executor.worker_group.wait_until_built()
    except BaseException as error:
        cause = executor.worker_group.root_cause(error) if isinstance(error, RuntimeError) else error
        executor.worker_group.fail(RankFailure(str(cause)))  # other ranks may wait for this one in a collective
        executor.close()
        raise cause from None
    for facts in executor.worker_group.worker_facts.values():
        report.event("rank", **facts)
    steps = LeaderRunner(engine.runner, executor.worker_group, executor.process_groups)
    if (images := engine.scheduler.resources.image_rows) is not None:
        images.model = LeaderImageEncoder(images.model, steps, executor.worker_group)
    end_ranks_with(steps, executor)
    calls = RankCalls(Rank(engine.runner, model=engine.loaded.module.model), executor.worker_group)
    return replace(engine, steps=steps, call_ranks=calls, executor=executor)


def end_ranks_with(steps: LeaderRunner, executor: Executor) -> None:
    """End the other ranks when nothing can launch a step any more: engine and manager were dropped without `close`.

    They also end with this process, whose finalizers are run while a manager may finish its requests.
    """
    weakref.finalize(steps, _end_ranks, executor, os.getpid()).atexit = False


def _end_ranks(executor: Executor, process: int) -> None:
    if os.getpid() == process:  # a fork has no ranks
        executor.close()


def _start_local(config: EngineConfig, device: str, worker_pool: WorkerPool) -> Executor:
    """Start child processes on consecutive GPUs from `device`; CPU ranks share torch's threads."""
    size = config.num_ranks
    num_threads = None
    if device == "cpu":
        num_threads = max(torch.get_num_threads() // size, 1)
        torch.set_num_threads(num_threads)
    store, address = create_rendezvous_store(_LOCALHOST)
    tasks = [WorkerTask(config, rank, device_of_rank(device, rank), address, num_threads) for rank in range(1, size)]
    return create_executor(config, WorkerGroup(worker_pool.assign(tasks), config.rank_timeout), device, store)


def _join_torchrun(config: EngineConfig, device: str) -> Executor:
    """Join torchrun's processes. Ranks other than 0 run steps here until the leader ends, then exit the script."""
    launched = read_torchrun_env()
    if launched is None:
        raise ValueError(
            "executor=torchrun, but torchrun did not start this process; run "
            f"`torchrun --nproc-per-node {config.num_ranks} script.py`, or use executor=local"
        )
    if launched.size != config.num_ranks:
        raise ValueError(
            f"torchrun started {launched.size} processes, but {config.parallel_sizes_text} needs {config.num_ranks}; "
            f"make them equal"
        )
    device = device_of_rank(device.partition(":")[0], launched.local_rank)
    store = torchrun.torchrun_store()
    if launched.rank > 0:
        run_worker(torchrun.connect_to_leader(launched, store), WorkerTask(config, launched.rank, device), store)
        raise SystemExit(0)
    return create_executor(config, torchrun.accept_workers(launched, store, config.rank_timeout), device, store)


def _start_on_ray(config: EngineConfig, device: str) -> Executor:
    """Start actors of a Ray cluster."""
    placement = ray.reserve_placement(config.num_ranks, on_gpus=device != "cpu")
    try:
        store, address = create_rendezvous_store(placement.host)
        worker_device = "cpu" if device == "cpu" else "cuda:0"  # the only GPU visible to an actor
        tasks = [WorkerTask(config, rank, worker_device, address) for rank in range(1, config.num_ranks)]
        worker_group = ray.start_on_ray(placement, WORKER_ENTRYPOINT, tasks, config.rank_timeout)
        return replace(create_executor(config, worker_group, placement.device, store), release=placement.release)
    except BaseException:
        placement.release()
        raise


def create_executor(config: EngineConfig, worker_group: WorkerGroup, device: str, store: RendezvousStore) -> Executor:
    """Create the process groups with started ranks."""
    try:
        with import_inductor_in_background(config.torch_compile_config.enable_inductor):
            worker_group.wait_until_joined()
            process_groups = init_process_groups(
                0, config.tensor_parallel_size, config.pipeline_parallel_size, device, store
            )
    except BaseException:
        worker_group.close()
        raise
    worker_group.on_failure(lambda _: abort_groups(process_groups))
    return Executor(process_groups, worker_group, store)


def device_of_rank(device: str, rank: int) -> str:
    """The device of a rank on this machine, with rank 0 on `device`."""
    kind, _, index = device.partition(":")
    return kind if kind == "cpu" else f"{kind}:{int(index or 0) + rank}"


def replica_config(config: EngineConfig, index: int, count: int) -> EngineConfig:
    """The config of replica `index` of `count` on one machine; CPU replicas share torch's threads.

    Raises:
        ValueError: the machine has too few GPUs for all replicas.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    first = choose_device(config.device, num_gpus)
    if first == "cpu":
        torch.set_num_threads(max(torch.get_num_threads() // count, 1))
        device = first
    else:
        needed, available = count * config.num_ranks, num_gpus - int(first.partition(":")[2])
        if needed > available:
            raise ValueError(
                f"data_parallel_size={count} with {config.parallel_sizes_text} needs {needed} GPUs, but from "
                f"{first} on this machine has {available}; lower one of them"
            )
        device = device_of_rank(first, index * config.num_ranks)
    seed = None if config.seed is None else config.seed + index  # replicas with equal seeds would sample equal tokens
    compile_config = config.torch_compile_config
    if index > 0:
        compile_config = replace(compile_config, dump_dir=None)  # the first replica's dump holds for all
    return replace(config, device=device, seed=seed, torch_compile_config=compile_config)
