"""An engine over as many ranks as its config asks for, however they are started. This process is rank 0."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from torchweave.compiler.codegen.inductor import import_inductor_in_background
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
from torchweave.engine.ranks.leader_runner import Executor, LeaderRunner
from torchweave.engine.startup.build import Engine, build, resolve_plan
from torchweave.engine.startup.early_start import WORKER_ENTRYPOINT
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
    """Build an engine, with all its ranks; `Engine.close` ends them.

    Args:
        report: gets every decision; one is made when none is given.
        loaded: a model that is in memory already.
        worker_pool: local ranks that were started before (`prestart_workers`); whoever started them ends those that are not used.

    Raises:
        ValueError: the model or an option cannot be, on any rank; the message says why and what to do.
        RankFailure: a rank ended while it was built.
    """
    report = Report() if report is None else report
    if config.num_ranks == 1:
        return build(config, report, loaded)
    if loaded is not None:
        raise ValueError(
            f"{loaded.name} is in memory already, and several ranks each load their own part; give its folder or name."
        )
    plan = resolve_plan(config)  # what cannot be is said before processes are started
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
        executor.worker_group.fail(RankFailure(str(cause)))  # the others may wait for this rank in a collective
        executor.close()
        raise cause from None
    for facts in executor.worker_group.worker_facts.values():
        report.event("rank", **facts)
    return replace(
        engine, steps=LeaderRunner(engine.runner, executor.worker_group, executor.process_groups), executor=executor
    )


def _start_local(config: EngineConfig, device: str, worker_pool: WorkerPool) -> Executor:
    """Processes of this machine. GPUs are taken from `device` on; CPU ranks share torch's threads."""
    size = config.num_ranks
    num_threads = None
    if device == "cpu":
        num_threads = max(torch.get_num_threads() // size, 1)
        torch.set_num_threads(num_threads)
    store, address = create_rendezvous_store(_LOCALHOST)
    tasks = [WorkerTask(config, rank, device_of_rank(device, rank), address, num_threads) for rank in range(1, size)]
    return create_executor(config, WorkerGroup(worker_pool.assign(tasks), config.rank_timeout), device, store)


def _join_torchrun(config: EngineConfig, device: str) -> Executor:
    """The processes of torchrun. On ranks other than 0 this works until the leader has ended, and then ends the script."""
    launched = read_torchrun_env()
    if launched is None:
        raise ValueError(
            "executor=torchrun was asked for, but torchrun did not start this process; run "
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
    """Actors of a Ray cluster."""
    placement = ray.reserve_placement(config.num_ranks, on_gpus=device != "cpu")
    try:
        store, address = create_rendezvous_store(placement.host)
        worker_device = "cpu" if device == "cpu" else "cuda:0"  # Ray shows an actor no other GPU
        tasks = [WorkerTask(config, rank, worker_device, address) for rank in range(1, config.num_ranks)]
        worker_group = ray.start_on_ray(placement, WORKER_ENTRYPOINT, tasks, config.rank_timeout)
        return replace(create_executor(config, worker_group, placement.device, store), release=placement.release)
    except BaseException:
        placement.release()
        raise


def create_executor(config: EngineConfig, worker_group: WorkerGroup, device: str, store: RendezvousStore) -> Executor:
    """Join the world with ranks that were started."""
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
    """The device of a rank of this machine, where rank 0 has `device`."""
    kind, _, index = device.partition(":")
    return kind if kind == "cpu" else f"{kind}:{int(index or 0) + rank}"
