"""An engine over as many ranks as its config asks for, however they are started. This process is rank 0."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from torchweave.compiler.codegen.inductor import inductor_imported
from torchweave.config.options import EngineConfig, launched_by_torchrun
from torchweave.distributed.launchers import ray, torchrun
from torchweave.distributed.launchers.local import WaitingRanks
from torchweave.distributed.process_groups import MeetingPoint, abort_groups, init_world, open_meeting_point
from torchweave.distributed.worker_group import Crew, RankFailure
from torchweave.engine.ranks.leader_runner import Lead, LeadRunner
from torchweave.engine.ranks.worker import Task, work
from torchweave.engine.startup.build import Engine, build, planned
from torchweave.engine.startup.early_start import WORK
from torchweave.models.load import LoadedModel
from torchweave.report import Report

_HERE = "127.0.0.1"


def open_engine(
    config: EngineConfig,
    report: Report | None = None,
    loaded: LoadedModel | None = None,
    waiting: WaitingRanks | None = None,
) -> Engine:
    """Build an engine, with all its ranks; `Engine.close` ends them.

    Args:
        report: gets every decision; one is made when none is given.
        loaded: a model that is in memory already.
        waiting: local ranks that were started before (`waiting_ranks`); whoever started them ends those that are not used.

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
    plan = planned(config)  # what cannot be is said before processes are started
    try:
        return _open(config, plan.device, report, waiting or WaitingRanks(WORK))
    except RankFailure as failure:
        if not failure.asked:
            raise
        sentence = str(failure)
    raise ValueError(sentence)


def _open(config: EngineConfig, device: str, report: Report, waiting: WaitingRanks) -> Engine:
    starts = {"local": partial(_start_local, waiting=waiting), "torchrun": _join_torchrun, "ray": _start_on_ray}
    with report.stage("starting ranks"):
        lead = starts[config.executor](config, device)
    try:
        engine = build(config, report, world=lead.world)
        with report.stage("waiting for ranks"):
            lead.crew.wait_until_built()
    except BaseException as error:
        cause = lead.crew.cause_of(error) if isinstance(error, RuntimeError) else error
        lead.crew.fail(RankFailure(str(cause)))  # the others may wait for this rank in a collective
        lead.close()
        raise cause from None
    for facts in lead.crew.built.values():
        report.event("rank", **facts)
    return replace(engine, steps=LeadRunner(engine.runner, lead.crew, lead.world), lead=lead)


def _start_local(config: EngineConfig, device: str, waiting: WaitingRanks) -> Lead:
    """Processes of this machine. GPUs are taken from `device` on; CPU ranks share torch's threads."""
    size = config.num_ranks
    num_threads = None
    if device == "cpu":
        num_threads = max(torch.get_num_threads() // size, 1)
        torch.set_num_threads(num_threads)
    store, address = open_meeting_point(_HERE)
    tasks = [Task(config, rank, device_of(device, rank), address, num_threads) for rank in range(1, size)]
    return lead_of(config, Crew(waiting.give(tasks), config.rank_timeout), device, store)


def _join_torchrun(config: EngineConfig, device: str) -> Lead:
    """The processes of torchrun. On ranks other than 0 this works until the leader has ended, and then ends the script."""
    launched = launched_by_torchrun()
    if launched is None:
        raise ValueError(
            "executor=torchrun was asked for, but torchrun did not start this process; run "
            f"`torchrun --nproc-per-node {config.num_ranks} script.py`, or use executor=local"
        )
    if launched.size != config.num_ranks:
        raise ValueError(
            f"torchrun started {launched.size} processes, but {config.asked_ranks} needs {config.num_ranks}; make them equal"
        )
    device = device_of(device.partition(":")[0], launched.local_rank)
    store = torchrun.meet()
    if launched.rank > 0:
        work(torchrun.report_to_leader(launched, store), Task(config, launched.rank, device), store)
        raise SystemExit(0)
    return lead_of(config, torchrun.gather(launched, store, config.rank_timeout), device, store)


def _start_on_ray(config: EngineConfig, device: str) -> Lead:
    """Actors of a Ray cluster."""
    places = ray.reserve(config.num_ranks, on_gpus=device != "cpu")
    try:
        store, address = open_meeting_point(places.host)
        theirs = "cpu" if device == "cpu" else "cuda:0"  # Ray shows an actor no other GPU
        tasks = [Task(config, rank, theirs, address) for rank in range(1, config.num_ranks)]
        crew = ray.start_on_ray(places, WORK, tasks, config.rank_timeout)
        return replace(lead_of(config, crew, places.device, store), release=places.release)
    except BaseException:
        places.release()
        raise


def lead_of(config: EngineConfig, crew: Crew, device: str, store: MeetingPoint) -> Lead:
    """Join the world with ranks that were started."""
    try:
        with inductor_imported(config.torch_compile_config.enable_inductor):
            crew.wait_until_joined()
            world = init_world(0, config.tensor_parallel_size, config.pipeline_parallel_size, device, store)
    except BaseException:
        crew.close()
        raise
    crew.on_failure(lambda _: abort_groups(world))
    return Lead(world, crew, store)


def device_of(device: str, rank: int) -> str:
    """The device of a rank of this machine, where rank 0 has `device`."""
    kind, _, index = device.partition(":")
    return kind if kind == "cpu" else f"{kind}:{int(index or 0) + rank}"
