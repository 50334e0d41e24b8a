"""Rank 0 of several: it alone knows requests, and tells the other ranks each step before it begins that itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torchweave.distributed.channel import MessageKind
from torchweave.distributed.process_groups import ProcessGroups, RendezvousStore, destroy_process_groups
from torchweave.distributed.worker_group import RankFailure, WorkerGroup
from torchweave.engine.ranks.state_digest import StateDigest
from torchweave.engine.ranks.step_message import encode
from torchweave.engine.runner.model_runner import LaunchedStep, ModelRunner
from torchweave.engine.scheduler.step import Step, StepResult

_POLL_SECONDS = 5e-5  # between two looks at a step that the device has not completed
_DIGEST_SECONDS = 30.0


class LeaderRunner:
    """Rank 0's runner: each step is sent to the other ranks, once, before it is launched here.

    Args:
        runner: of this rank.
        worker_group: the other ranks.
        process_groups: of all of them.

    Attributes:
        digests: what each rank had come to when the engine last fell idle, under `torch_compile_config.debug`.
    """

    def __init__(self, runner: ModelRunner, worker_group: WorkerGroup, process_groups: ProcessGroups) -> None:
        self.digests: list[bytes] = []
        self._runner = runner
        self._worker_group = worker_group
        self._process_groups = process_groups
        self._digest = StateDigest(runner.state, runner.plan.config.torch_compile_config.debug)

    def start(self) -> None:
        self._runner.start()

    def launch(self, step: Step) -> LaunchedStep:
        message = encode(step)
        self._digest.add(message)
        self._worker_group.send(MessageKind.STEP, message)
        try:
            return self._runner.launch(step)
        except Exception as error:
            self._worker_group.fail_and_raise(error)

    def ready(self, handle: LaunchedStep) -> bool:
        self._worker_group.check()
        return self._runner.ready(handle)

    def collect(self, handle: LaunchedStep) -> StepResult:
        # A collective whose other rank is gone may never complete, and this thread must see that.
        while not self.ready(handle):
            time.sleep(_POLL_SECONDS)
        try:
            result = self._runner.collect(handle)
        except Exception as error:
            self._worker_group.fail_and_raise(error)
        if fault := self._process_groups.fault():
            self._worker_group.fail_and_raise(RankFailure(fault))
        return result

    def memory_in_use(self) -> int | None:
        return self._runner.memory_in_use()

    def on_idle(self) -> None:
        self._worker_group.send(MessageKind.IDLE)
        self._runner.on_idle()
        if self._digest.enabled:
            self.digests = [self._digest.take(), *self._worker_group.digests(_DIGEST_SECONDS)]
            if len(set(self.digests)) > 1:
                told = "; ".join(f"rank {rank}: {digest.decode()}" for rank, digest in enumerate(self.digests))
                self._worker_group.fail_and_raise(RankFailure(f"The ranks have come to different states ({told})"))


@dataclass(frozen=True)
class Executor:
    """What rank 0 holds beside its own engine: the world, the other ranks, and where they found each other.

    Attributes:
        release: gives back what was reserved for the ranks; None where nothing was.
    """

    process_groups: ProcessGroups
    worker_group: WorkerGroup
    store: RendezvousStore
    release: Callable[[], None] | None = None

    def close(self) -> None:
        """End the other ranks and leave the world, once: this process may be in another world by the second call."""
        if not self.worker_group.request_shutdown():
            return
        destroy_process_groups(
            self.process_groups, abort=self.worker_group.failure is not None
        )  # the others leave it at the same moment
        self.worker_group.close()
        if self.release is not None:
            self.release()
