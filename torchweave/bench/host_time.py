"""Host time of a decode step, measured without a device; it must not grow with the model or the batch."""

from __future__ import annotations

import queue
import statistics
import time

import numpy as np

from torchweave.engine.batch_manager import BatchManager
from torchweave.engine.client import Client, Inbox
from torchweave.engine.generation_loop import Timing
from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.request import Responses, SamplingParams
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.policies import POLICIES
from torchweave.engine.scheduler.scheduler import Scheduler
from torchweave.engine.scheduler.step import Step, StepResult
from torchweave.images import EncodedPrompt
from torchweave.ops.slot_state import SlotState

_BLOCK_SIZE = 64


class FakeRunner:
    """A runner whose steps take no time: it applies slot updates and returns a constant token."""

    def __init__(self, state: SlotState) -> None:
        self.state = state

    def start(self) -> None:
        pass

    def launch(self, step: Step) -> np.ndarray:
        if step.updates is not None:
            self.state.write(*step.updates)
        return np.full(step.num_rows, 5, np.int32)

    def ready(self, handle: object) -> bool:
        return True

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, np.ndarray)
        return StepResult(handle, "plain")

    def memory_in_use(self) -> int | None:
        return None

    def on_idle(self) -> None:
        pass


def measure_host_time(num_requests: int = 256, num_steps: int = 1000, streaming: bool = False) -> list[Timing]:
    """Timings of decode steps with `num_requests` running, in the batch manager's own loop, thread and callbacks."""
    prompt_len, max_model_len = 128, 128 + num_steps + 8
    width = -(-max_model_len // _BLOCK_SIZE)
    limits = Limits(num_requests, max(8192, num_requests), max_model_len, vocab_size=1000)
    state = SlotState(num_requests, width)
    kv = BlockManager(num_requests * width, _BLOCK_SIZE, num_requests, width)
    scheduler = Scheduler(limits, kv, POLICIES["guaranteed_no_evict"], state.updates())
    client = Client()
    inbox: Inbox = queue.SimpleQueue()
    prompt = EncodedPrompt(np.arange(prompt_len) % 1000)
    for _ in range(num_requests):
        client.submit(prompt, SamplingParams(temperature=0, max_tokens=num_steps), inbox, streaming)
    manager = BatchManager(
        scheduler,
        FakeRunner(state),
        client.get_requests,
        poll_stop=client.poll_stop,
        send_responses=client.send_responses,
    )
    manager.timings.clear()
    deadline = time.monotonic() + 120
    left = num_requests
    while left:
        message = inbox.get(timeout=max(deadline - time.monotonic(), 0.1))
        assert isinstance(message, Responses), "all requests share an inbox"
        left -= message.num_final
    manager.shutdown()
    steps = list(manager.timings)
    return steps[len(steps) // 4 : -(len(steps) // 10)]  # without prefill and final steps


def summary(timings: list[Timing]) -> dict[str, float]:
    """Medians in microseconds, and the 99th percentile of the total."""
    totals = sorted(timing.host for timing in timings)
    parts = {
        part: statistics.median(getattr(timing, part) for timing in timings)
        for part in ("schedule", "launch", "update", "host")
    }
    result = {f"{part}_us": seconds * 1e6 for part, seconds in parts.items()}
    result["host_p99_us"] = totals[int(len(totals) * 0.99)] * 1e6
    return result
