"""Rank 0 of several: it alone knows requests, and tells the other ranks each step before it begins that itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torchweave.distributed import channel
from torchweave.distributed.process_groups import MeetingPoint, World, close_world
from torchweave.distributed.worker_group import Crew, RankFailure
from torchweave.engine.ranks.state_digest import Digest
from torchweave.engine.ranks.step_message import encode
from torchweave.engine.runner.model_runner import Handle, Runner
from torchweave.engine.scheduler.step import Step, StepResult

_LOOK_SECONDS = 5e-5  # between two looks at a step that the device has not completed
_DIGEST_SECONDS = 30.0


class LeadRunner:
    """Rank 0's runner: each step is sent to the other ranks, once, before it is launched here.

    Args:
        runner: of this rank.
        crew: the other ranks.
        world: of all of them.

    Attributes:
        digests: what each rank had come to when the engine last fell idle, under `torch_compile_config.debug`.
    """

    def __init__(self, runner: Runner, crew: Crew, world: World) -> None:
        self.digests: list[bytes] = []
        self._runner = runner
        self._crew = crew
        self._world = world
        self._digest = Digest(runner.state, runner.plan.config.torch_compile_config.debug)

    def start(self) -> None:
        self._runner.start()

    def launch(self, step: Step) -> Handle:
        message = encode(step)
        self._digest.add(message)
        self._crew.send(channel.STEP, message)
        try:
            return self._runner.launch(step)
        except Exception as error:
            self._crew.fail_for(error)

    def ready(self, handle: Handle) -> bool:
        self._crew.check()
        return self._runner.ready(handle)

    def collect(self, handle: Handle) -> StepResult:
        # A collective whose other rank is gone may never complete, and this thread must see that.
        while not self.ready(handle):
            time.sleep(_LOOK_SECONDS)
        try:
            result = self._runner.collect(handle)
        except Exception as error:
            self._crew.fail_for(error)
        if fault := self._world.fault():
            self._crew.fail_for(RankFailure(fault))
        return result

    def memory_in_use(self) -> int | None:
        return self._runner.memory_in_use()

    def rest(self) -> None:
        self._crew.send(channel.REST)
        self._runner.rest()
        if self._digest.wanted:
            self.digests = [self._digest.take(), *self._crew.digests(_DIGEST_SECONDS)]
            if len(set(self.digests)) > 1:
                told = "; ".join(f"rank {rank}: {digest.decode()}" for rank, digest in enumerate(self.digests))
                self._crew.fail_for(RankFailure(f"The ranks have come to different states ({told})"))


@dataclass(frozen=True)
class Lead:
    """What rank 0 holds beside its own engine: the world, the other ranks, and where they found each other.

    Attributes:
        release: gives back what was reserved for the ranks; None where nothing was.
    """

    world: World
    crew: Crew
    store: MeetingPoint
    release: Callable[[], None] | None = None

    def close(self) -> None:
        """End the other ranks and leave the world, once: this process may be in another world by the second call."""
        if not self.crew.dismiss():
            return
        close_world(self.world, abort=self.crew.failure is not None)  # the others leave it at the same moment
        self.crew.close()
        if self.release is not None:
            self.release()
