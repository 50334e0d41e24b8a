"""The kernels of a step, as torch.profiler sees them, beside what the step takes when nobody looks.

Two kinds of step: `decode`, in which requests generate and nothing else happens, and `mixed`, which reads prompts beside them, as
many tokens of them as the scheduler gives such a step.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from torchweave.engine.build import Engine
from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.engine.step import Step

KINDS = ("decode", "mixed")
_WARM = 3
"""Steps before any is timed: those in flight are of the kind before, and a kernel may be loaded by its first launch."""
Row = dict[str, Any]


class Steps:
    """Steps of an engine that nobody else drives, over requests that do not end.

    Args:
        engine: its batch manager has ended.
        running: requests that generate.
        input_len: tokens of each prompt.
        count: steps in a run.

    Raises:
        ValueError: the engine cannot run as many such requests.
    """

    def __init__(self, engine: Engine, running: int, input_len: int, count: int, seed: int) -> None:
        plan = engine.plan
        self.count = count
        self.device = plan.device
        self._batch, self._runner = engine.batch, engine.steps
        self._run_ahead = max(plan.run_ahead, 1)
        self._random = np.random.default_rng(seed)
        self._vocab_size, self._input_len = engine.loaded.module.vocab_size, input_len
        self._unread, self._num_requests = 0, 0
        sizes = plan.mixed_step_sizes
        self._backlog = sizes[0] if sizes else 1  # prompt tokens that wait for a mixed step: no fewer than it takes
        self._runner.start()
        # The first to generate draw a token in every step to come, and in those that read the other prompts.
        reading = running + running * input_len // max((sizes[0] if sizes else plan.max_num_tokens) // 2, 1)
        most = len(KINDS) * (2 * count + _WARM) + self._run_ahead + reading
        if input_len + most > plan.max_model_len:
            raise ValueError(
                f"prompts of input_len={input_len} tokens and {most} steps are more than max_model_len={plan.max_model_len}; ask "
                "for shorter prompts or fewer steps."
            )
        for _ in range(running):
            self._add(most)
        self._fill(running, plan.max_batch_size)

    def run(self, kind: str, count: int) -> list[tuple[Step, str]]:
        """Take so many steps as the batch manager does, some ahead; returns each, and the way in which it ran."""
        done: list[tuple[Step, str]] = []
        in_flight: deque[tuple[Step, Any]] = deque()
        for _ in range(count):
            while kind == "mixed" and self._unread < self._backlog:
                self._add(1)
            step = self._batch.next_step()
            assert step is not None, "requests run"
            self._unread -= step.num_context_tokens
            in_flight.append((step, self._runner.launch(step)))
            if len(in_flight) >= self._run_ahead:
                done.append(self._take(*in_flight.popleft()))
        done += [self._take(*each) for each in in_flight]
        return done

    def _take(self, step: Step, handle: Any) -> tuple[Step, str]:
        result = self._runner.collect(handle)
        self._batch.absorb(step, result)
        return step, result.how

    def _add(self, max_tokens: int) -> None:
        prompt = self._random.integers(self._vocab_size, size=self._input_len).astype(np.int32)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = InferenceRequest(self._num_requests, prompt, params)
        if why := self._batch.why_not(request):
            raise ValueError(why)
        self._num_requests += 1
        self._unread += len(prompt)
        self._batch.add(request, 0)

    def _fill(self, running: int, max_batch_size: int) -> None:
        while self._unread:
            step = self._batch.next_step()
            if step is None or not step.chunks:
                kv = self._batch.kv
                raise ValueError(
                    f"running={running} requests do not run at once: max_batch_size is {max_batch_size}, and the KV cache has "
                    f"{kv.num_blocks} blocks of {kv.block_size} tokens; ask for fewer, or for shorter prompts."
                )
            self._unread -= step.num_context_tokens
            self._take(step, self._runner.launch(step))


def profile(work: Steps, kind: str, advance: Callable[[], None]) -> Row:
    """What steps of a kind take, and where: `ms` a step without the profiler; with it `kernels`, each with its microseconds (`us`)
    and its `launches` a step, the longest first, and on a GPU `busy_ms`: in which a step had at least one of them running."""
    work.run(kind, _WARM)
    begin = time.perf_counter()
    work.run(kind, work.count)
    seconds = time.perf_counter() - begin
    is_gpu = work.device.startswith("cuda")
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as found:
        taken = work.run(kind, work.count)
    row: Row = {
        "kind": kind,
        "rows": _mean(step.num_rows for step, _ in taken),
        "tokens": _mean(step.num_tokens for step, _ in taken),
        "how": dict(Counter(how for _, how in taken)),
        "ms": seconds * 1e3 / work.count,
    }
    if is_gpu:
        kernels = [each for each in found.events() or () if each.device_type == DeviceType.CUDA]
        spans = [(each.name, each.time_range.start, each.time_range.end) for each in kernels]
        row["busy_ms"] = _busy((start, end) for _, start, end in spans) / 1e3 / work.count
        parts = [(name, end - start, 1) for name, start, end in spans]
    else:
        parts = [(each.key, each.self_cpu_time_total, each.count) for each in found.key_averages()]
    advance()
    return row | {"kernels": _by_name(parts, work.count)}


def _by_name(parts: Iterable[tuple[str, float, int]], num_steps: int) -> list[Row]:
    microseconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for name, taken, count in parts:
        microseconds[name] += taken  # type: ignore[assignment]
        launches[name] += count
    order = sorted(microseconds, key=lambda name: -microseconds[name])
    return [
        {"name": each, "us": microseconds[each] / num_steps, "launches": launches[each] / num_steps} for each in order
    ]


def _busy(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of them was under way."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def _mean(values: Iterable[int]) -> float:
    return round(float(np.mean(list(values))), 1)
