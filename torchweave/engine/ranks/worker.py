"""What a rank other than the leader runs: it builds the same engine, then carries out the leader's steps in their order.

It knows no requests, forms no steps and tells no statistics; whatever its device draws, the leader's draws too.
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

from torchweave.compiler.codegen.inductor import inductor_imported
from torchweave.config.options import EngineConfig
from torchweave.distributed import channel
from torchweave.distributed.channel import Link
from torchweave.distributed.leader_connection import Follower
from torchweave.distributed.process_groups import MeetingPoint, World, close_world, init_world, join_meeting_point
from torchweave.engine.ranks.state_digest import Digest
from torchweave.engine.ranks.step_message import decode
from torchweave.engine.runner.model_runner import Runner
from torchweave.engine.startup.build import build
from torchweave.report import Report
from torchweave.utils import gc

_ECHO_SECONDS = 2.0  # by which the fault of a collective is told later than the end of the rank that caused it


@dataclass(frozen=True)
class Task:
    """What a rank has to know to begin.

    Attributes:
        config: of the engine, as the leader was asked.
        rank: of this process.
        device: of this rank.
        store: address of the leader's meeting point; None where the ranks have one already.
        num_threads: of torch on a CPU; None: as many as it likes.
    """

    config: EngineConfig
    rank: int
    device: str
    store: tuple[str, int] | None = None
    num_threads: int | None = None


def work(link: Link, task: Task, store: MeetingPoint | None = None) -> None:
    """Run a rank until the leader ends it; a fault is told to the leader and ends the process."""
    follower = Follower(link, task.config.rank_timeout)
    for name in ("transformers", "torch"):  # the leader says what there is to say
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        _work(follower, task, store)
    except ValueError as error:
        _give_up(follower, str(error), asked=True)
    except Exception as error:
        time.sleep(_ECHO_SECONDS)
        traceback.print_exc()
        _give_up(follower, f"{type(error).__name__}: {error}", asked=False)


def _give_up(follower: Follower, sentence: str, asked: bool) -> None:
    with contextlib.suppress(OSError):  # all refuse the same, and the leader may have ended them for another's word
        follower.failed(sentence, asked)
    os._exit(1)


def _work(follower: Follower, task: Task, store: MeetingPoint | None) -> None:
    config = task.config
    if task.num_threads is not None:
        torch.set_num_threads(task.num_threads)
    if task.device != "cpu":
        torch.cuda.set_device(task.device)
    with inductor_imported(config.torch_compile_config.enable_inductor):
        follower.joined()
        if store is None:
            assert task.store is not None
            store = join_meeting_point(task.store)
        world = init_world(task.rank, config.tensor_parallel_size, config.pipeline_parallel_size, task.device, store)
    report = Report(show=False)
    begin = time.monotonic()
    quiet = replace(config, torch_compile_config=replace(config.torch_compile_config, dump_dir=None))  # the leader's
    engine = build(quiet, report, world=world)
    follower.built(_facts(report, task, time.monotonic() - begin))
    with gc.at_rest():
        _carry_out(engine.runner, follower, world)
    engine.runner.forget_recordings()
    close_world(world)


def _facts(report: Report, task: Task, seconds: float) -> dict[str, Any]:
    """What the leader tells of this rank."""
    used = [event["outcome"] for event in report.select("cache")]
    found = {"loaded": used.count("hit"), "compiled": used.count("miss")}
    return {"rank": task.rank, "device": task.device, "process": os.getpid(), "seconds": seconds, **found}


def _carry_out(runner: Runner, follower: Follower, world: World) -> None:
    """Steps in the order in which they come, as many in flight as the leader has."""
    runner.start()
    digest = Digest(runner.state, runner.plan.config.torch_compile_config.debug)
    in_flight: deque[Any] = deque()

    def collect() -> None:
        runner.collect(in_flight.popleft())
        if fault := world.fault():
            raise RuntimeError(fault)

    while True:
        kind, payload = follower.messages.get()
        if kind == channel.STEP:
            digest.add(payload)
            in_flight.append(runner.launch(decode(payload)))
            if len(in_flight) > runner.plan.run_ahead:
                collect()
            continue
        while in_flight:
            collect()
        if kind == channel.END:
            return
        if digest.wanted:
            follower.digest(digest.take())
        runner.rest()
