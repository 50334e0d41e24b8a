"""The leader's runner and image encoder: they send each step and image to the other ranks before they run it themselves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torchweave.distributed.process_groups import ProcessGroups, RendezvousStore, destroy_process_groups
from torchweave.distributed.worker_group import MessageKind, RankFailure, WorkerGroup
from torchweave.engine.kv_cache.image_rows import ImageModel
from torchweave.engine.ranks.step_message import StateDigest, encode, encode_image
from torchweave.engine.runner.model_runner import LaunchedStep, ModelRunner
from torchweave.engine.scheduler.step import Step, StepResult
from torchweave.images import ImageInput

_POLL_SECONDS = 5e-5  # between checks of a step in flight
_DIGEST_SECONDS = 30.0


@dataclass
class SentStep:
    """A step that the other ranks have; `launched` on this rank, unless it is None."""

    step: Step
    launched: LaunchedStep | None = None


class LeaderRunner:
    """Rank 0's runner.

    A step on a CPU runs while it is launched. With pipeline stages it is launched when it is collected: otherwise the other stages
    would get the next step only after this rank, the last stage, has run this one.

    Args:
        runner: of this rank.
        worker_group: the other ranks.
        process_groups: of all ranks.

    Attributes:
        digests: each rank's state digest when the engine last became idle, with `torch_compile_config.debug`.
    """

    def __init__(self, runner: ModelRunner, worker_group: WorkerGroup, process_groups: ProcessGroups) -> None:
        self.digests: list[bytes] = []
        self._runner = runner
        self._worker_group = worker_group
        self._process_groups = process_groups
        self._launches_late = process_groups.device == "cpu" and process_groups.pipeline_parallel_size > 1
        self._not_launched: deque[SentStep] = deque()
        self._digest = StateDigest(runner.state, runner.plan.config.torch_compile_config.debug)

    def start(self) -> None:
        self._runner.start()

    def launch(self, step: Step) -> SentStep:
        message = encode(step)
        self._digest.add(message)
        self._worker_group.send(MessageKind.STEP, message)
        self._not_launched.append(sent := SentStep(step))
        if not self._launches_late:
            self._launch_next()
        return sent

    def launch_all(self) -> None:
        """Launch all steps that were sent."""
        while self._not_launched:
            self._launch_next()

    def _launch_next(self) -> None:
        sent = self._not_launched.popleft()
        try:
            sent.launched = self._runner.launch(sent.step)
        except Exception as error:
            self._worker_group.fail_and_raise(error)

    def ready(self, handle: SentStep) -> bool:
        self._worker_group.check()
        return handle.launched is not None and self._runner.ready(handle.launched)

    def collect(self, handle: SentStep) -> StepResult:
        while handle.launched is None:
            self._launch_next()
        # Poll: a collective with a rank that has ended may never complete.
        while not self.ready(handle):
            time.sleep(_POLL_SECONDS)
        try:
            result = self._runner.collect(handle.launched)
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
            self.digests = [self._digest.take(), *self._worker_group.answers(MessageKind.DIGEST, _DIGEST_SECONDS)]
            if len(set(self.digests)) > 1:
                states = "; ".join(f"rank {rank}: {digest.decode()}" for rank, digest in enumerate(self.digests))
                self._worker_group.fail_and_raise(RankFailure(f"The ranks' states differ ({states})"))


class LeaderImageEncoder:
    """Rank 0's image encoder: sends each image to the other ranks, which have the vision tower too, before it encodes the image.

    Args:
        encoder: of this rank.
        runner: of this rank.
        worker_group: the other ranks.
    """

    def __init__(self, encoder: ImageModel, runner: LeaderRunner, worker_group: WorkerGroup) -> None:
        self.num_rows, self.first_image_id, self.token_id = encoder.num_rows, encoder.first_image_id, encoder.token_id
        self.rope_axes, self.both_ways = encoder.rope_axes, encoder.both_ways
        self.rope_offsets = encoder.rope_offsets
        self._encoder, self._runner = encoder, runner
        self._worker_group = worker_group

    def encode(self, image: ImageInput, rows: np.ndarray) -> None:
        """Write the features of an image to `rows` of each rank's pool; errors as the encoder's."""
        self._runner.launch_all()  # steps that were formed before may read rows that the image takes
        self._worker_group.send(MessageKind.IMAGE, encode_image(image, rows))
        self._encoder.encode(image, rows)


@dataclass(frozen=True)
class Executor:
    """The other ranks of an engine, on rank 0.

    Attributes:
        store: kept open while the ranks run.
        release: releases resources reserved for the ranks; None: nothing to release.
    """

    process_groups: ProcessGroups
    worker_group: WorkerGroup
    store: RendezvousStore
    release: Callable[[], None] | None = None

    def close(self) -> None:
        """End the other ranks and destroy the process groups; later calls do nothing, since other groups may exist by then."""
        if not self.worker_group.request_shutdown():
            return
        # The other ranks destroy theirs at the same time.
        destroy_process_groups(self.process_groups, abort=self.worker_group.failure is not None)
        self.worker_group.close()
        if self.release is not None:
            self.release()
