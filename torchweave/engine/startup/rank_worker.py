"""A rank other than the leader: builds the same engine and runs the leader's steps in order.

It has no scheduler and no statistics; its device samples the same tokens as the leader's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchweave.compiler.codegen.inductor import import_inductor_in_background
from torchweave.config.options import EngineConfig
from torchweave.distributed.process_groups import (
    ProcessGroups,
    RendezvousStore,
    StoreAddress,
    destroy_process_groups,
    init_process_groups,
    join_rendezvous_store,
)
from torchweave.distributed.worker_group import Channel, LeaderConnection, MessageKind
from torchweave.engine.control.rank import Rank
from torchweave.engine.ranks.control import answer_message
from torchweave.engine.ranks.step_message import StateDigest, decode, decode_image
from torchweave.engine.startup.build import Engine, build
from torchweave.report import Report
from torchweave.utils import gc

# Delays the report of an error, so that the end of the rank that caused it is reported first.
_FAULT_DELAY_SECONDS = 2.0


@dataclass(frozen=True)
class WorkerTask:
    """The task of a rank.

    Attributes:
        config: of the engine, the same as the leader's.
        rank: of this process.
        device: of this rank.
        store: address of the rendezvous store; None if the executor provides the store.
        num_threads: torch's threads on a CPU; None: torch's default.
    """

    config: EngineConfig
    rank: int
    device: str
    store: StoreAddress | None = None
    num_threads: int | None = None


def run_worker(channel: Channel, task: WorkerTask, store: RendezvousStore | None = None) -> None:
    """Run a rank until the leader ends it; an error is reported to the leader and ends the process."""
    leader = LeaderConnection(channel, task.config.rank_timeout)
    for name in ("transformers", "torch"):  # the leader logs the same
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        _run_worker(leader, task, store)
    except ValueError as error:
        _report_and_exit(leader, str(error), user_error=True)
    except Exception as error:
        time.sleep(_FAULT_DELAY_SECONDS)
        traceback.print_exc()
        _report_and_exit(leader, f"{type(error).__name__}: {error}", user_error=False)


def _report_and_exit(leader: LeaderConnection, sentence: str, user_error: bool) -> None:
    # Every rank fails alike, and the leader may have ended after another rank's report.
    with contextlib.suppress(OSError):
        leader.report_failure(sentence, user_error)
    os._exit(1)


def _run_worker(leader: LeaderConnection, task: WorkerTask, store: RendezvousStore | None) -> None:
    config = task.config
    if task.num_threads is not None:
        torch.set_num_threads(task.num_threads)
    if task.device != "cpu":
        torch.cuda.set_device(task.device)
    with import_inductor_in_background(config.torch_compile_config.enable_inductor):
        leader.report_joined()
        if store is None:
            assert task.store is not None
            store = join_rendezvous_store(task.store)
        process_groups = init_process_groups(
            task.rank, config.tensor_parallel_size, config.pipeline_parallel_size, task.device, store
        )
    report = Report(show=False)
    begin = time.monotonic()
    # The leader writes the dump.
    worker_config = replace(config, torch_compile_config=replace(config.torch_compile_config, dump_dir=None))
    engine = build(worker_config, report, process_groups=process_groups)
    leader.report_built(_rank_facts(report, task, time.monotonic() - begin))
    with gc.gc_frozen():
        _run_steps(engine, leader, process_groups)
    engine.runner.recordings.release()
    destroy_process_groups(process_groups)


def _rank_facts(report: Report, task: WorkerTask, seconds: float) -> dict[str, Any]:
    """Fields of the leader's `rank` event."""
    events = report.select("cache")
    reasons = [f"{event['entry']}: {event['why']}" for event in events if event["outcome"] == "miss"]
    counts = {"loaded": sum(event["outcome"] == "hit" for event in events), "compiled": len(reasons)}
    facts = {"rank": task.rank, "device": task.device, "process": os.getpid(), "seconds": seconds, **counts}
    return facts | ({"why": "; ".join(reasons)} if reasons else {})


def _run_steps(engine: Engine, leader: LeaderConnection, process_groups: ProcessGroups) -> None:
    """Run the leader's steps, images and calls in order, with as many steps in flight as on the leader."""
    runner, images = engine.runner, engine.scheduler.resources.image_rows
    runner.start()
    digest = StateDigest(runner.state, runner.plan.config.torch_compile_config.debug)
    in_flight: deque[Any] = deque()
    rank = Rank(runner, process_groups.rank, engine.loaded.module.model)

    def collect() -> None:
        runner.collect(in_flight.popleft())
        if fault := process_groups.fault():
            raise RuntimeError(fault)

    while True:
        kind, payload = leader.messages.get()
        if kind == MessageKind.STEP:
            digest.add(payload)
            in_flight.append(runner.launch(decode(payload)))
            if len(in_flight) > runner.plan.run_ahead:
                collect()
            continue
        if kind == MessageKind.IMAGE:
            assert images is not None, "the leader has a model with images"
            with contextlib.suppress(ValueError):  # the leader fails alike, and ends the request
                images.model.encode(*decode_image(payload))
            continue
        while in_flight:
            collect()
        if kind == MessageKind.CALL:
            leader.answer(MessageKind.ANSWER, answer_message(rank, payload))
            continue
        runner.on_idle()
        if kind == MessageKind.END:
            return
        if digest.enabled:
            leader.answer(MessageKind.DIGEST, digest.take())
