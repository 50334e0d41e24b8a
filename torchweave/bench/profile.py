"""Kernel times of a step from torch.profiler, with the step time measured without the profiler.

Two kinds of step: `decode`, and `mixed`, which also prefills as many prompt tokens as the scheduler puts into a step.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler_util import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, schedule

from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.engine.scheduler.policies import step_token_budget
from torchweave.engine.scheduler.step import Step
from torchweave.engine.startup.build import Engine

KINDS = ("decode", "mixed")
_NUM_WARMUP_STEPS = 3
"""Steps before timing, since the first launch of a kernel may load it, and before profiling, since a profiler that has just
started may miss kernels."""
Row = dict[str, Any]


class StepDriver:
    """Drive the steps of an engine over requests that do not end.

    Construct and use it on a single thread, whose autograd mode and stream it changes.

    Args:
        engine: an engine whose batch manager has ended.
        running: decoding requests.
        input_len: tokens of each prompt.
        count: steps in a run.

    Raises:
        ValueError: the engine has no capacity for these requests.
    """

    def __init__(self, engine: Engine, running: int, input_len: int, count: int, seed: int) -> None:
        plan = engine.plan
        self.count = count
        self.device = plan.device
        self._scheduler, self._runner = engine.scheduler, engine.steps
        self._run_ahead = max(plan.run_ahead, 1)
        self._random = np.random.default_rng(seed)
        self._vocab_size, self._input_len = engine.loaded.module.vocab_size, input_len
        self._running, self._num_unread_tokens, self._num_requests = running, 0, 0
        sizes = plan.mixed_step_sizes
        self._runner.start()
        # The first request generates a token in every later step, prefill steps of the other prompts included.
        reading = running + running * input_len // max((sizes[0] if sizes else plan.max_num_tokens) // 2, 1)
        most = len(KINDS) * 2 * (count + _NUM_WARMUP_STEPS) + self._run_ahead + reading
        if input_len + most > plan.max_model_len:
            raise ValueError(
                f"prompts of input_len={input_len} tokens and {most} steps exceed max_model_len={plan.max_model_len}; use "
                "shorter prompts or fewer steps."
            )
        for _ in range(running):
            self._add(most)
        self._prefill_all()

    def run(self, kind: str, count: int) -> list[tuple[Step, str]]:
        """Run steps with run-ahead, as the batch manager does; returns each with its execution mode.

        Raises:
            ValueError: a mixed step prefills fewer tokens than its budget.
        """
        done: list[tuple[Step, str]] = []
        in_flight: deque[tuple[Step, Any]] = deque()
        for _ in range(count):
            while kind == "mixed" and self._num_unread_tokens < self._prefill_budget():
                self._add(1)
            room = self._prefill_budget() if kind == "mixed" else 0
            step = self._scheduler.schedule()
            assert step is not None, "requests run"
            if step.num_prefill_tokens < room:
                raise self._capacity_error(
                    f"running={self._running} requests leave no room for the prompts of a mixed step, which prefilled "
                    f"{step.num_prefill_tokens} tokens"
                )
            self._num_unread_tokens -= step.num_prefill_tokens
            in_flight.append((step, self._runner.launch(step)))
            if len(in_flight) >= self._run_ahead:
                done.append(self._finish_step(*in_flight.popleft()))
        done += [self._finish_step(*each) for each in in_flight]
        return done

    def _prefill_budget(self) -> int:
        """Prompt tokens of the next step, given the waiting ones; 1 if the scheduler has no mixed step sizes."""
        limits = self._scheduler.limits
        if not limits.mixed_step_sizes or not limits.chunked_context:
            return 1
        size = step_token_budget(limits.max_num_tokens, limits.mixed_step_sizes, self._running, self._num_unread_tokens)
        return max(size - self._running, 1)

    def _finish_step(self, step: Step, handle: Any) -> tuple[Step, str]:
        result = self._runner.collect(handle)
        self._scheduler.update(step, result)
        return step, result.how

    def _add(self, max_tokens: int) -> None:
        prompt = self._random.integers(self._vocab_size, size=self._input_len).astype(np.int32)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = InferenceRequest(self._num_requests, prompt, params)
        if why := self._scheduler.rejection_reason(request):
            raise ValueError(why)
        self._num_requests += 1
        self._num_unread_tokens += len(prompt)
        self._scheduler.add(request, 0)

    def _prefill_all(self) -> None:
        while self._num_unread_tokens:
            step = self._scheduler.schedule()
            if step is None or not step.chunks:
                raise self._capacity_error(f"running={self._running} requests do not fit at once")
            self._num_unread_tokens -= step.num_prefill_tokens
            self._finish_step(step, self._runner.launch(step))

    def _capacity_error(self, what: str) -> ValueError:
        kv, max_batch_size = self._scheduler.kv, self._scheduler.limits.max_batch_size
        return ValueError(
            f"{what}: max_batch_size is {max_batch_size}, and the KV cache has {kv.num_blocks} blocks of {kv.block_size} tokens; "
            "use fewer requests, shorter prompts, or more slots and blocks."
        )


def profile_all_kinds(
    engine: Engine, running: int, input_len: int, count: int, seed: int, advance: Callable[[], None]
) -> list[Row]:
    """Profile steps of each kind; see `StepDriver` and `profile`."""
    device = engine.plan.device
    stream = torch.cuda.stream(torch.cuda.current_stream(device)) if device.startswith("cuda") else nullcontext()
    with torch.no_grad(), stream:  # restores the thread's state
        work = StepDriver(engine, running, input_len, count, seed)
        return [profile(work, kind, advance) for kind in KINDS]


def profile(work: StepDriver, kind: str, advance: Callable[[], None]) -> Row:
    """Profile steps of one kind.

    Returns `ms` per step without the profiler; `kernels` with microseconds (`us`) and `launches` per step, longest first; on a
    GPU also `busy_ms` (time with at least one kernel running) and `idle` (gaps by the kernel that ends them).

    Raises:
        ValueError: the profiler recorded no kernel on the GPU.
    """
    work.run(kind, _NUM_WARMUP_STEPS)
    begin = time.perf_counter()
    work.run(kind, work.count)
    seconds = time.perf_counter() - begin
    is_gpu = work.device.startswith("cuda")
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    warm_up_once = schedule(wait=0, warmup=1, active=1)
    with torch.profiler.profile(activities=[activity], schedule=warm_up_once, acc_events=True) as profiler:
        work.run(kind, _NUM_WARMUP_STEPS)
        profiler.step()
        steps = work.run(kind, work.count)
    row: Row = {
        "kind": kind,
        "rows": _mean(step.num_rows for step, _ in steps),
        "tokens": _mean(step.num_tokens for step, _ in steps),
        "how": dict(Counter(how for _, how in steps)),
        "ms": seconds * 1e3 / work.count,
    }
    events = [each for each in profiler.events() or () if not each.is_user_annotation]  # drops ProfilerStep
    if is_gpu:
        kernels = [each for each in events if each.device_type == DeviceType.CUDA]
        if not kernels:
            raise ValueError(
                f"the profiler recorded no kernel on {work.device}: another profiler may be active, or CUPTI may lack permission; "
                "end the other profiler, or run as root."
            )
        spans = [(each.name, each.time_range.start, each.time_range.end) for each in kernels]
        gaps, busy = kernel_gaps(spans)
        row["busy_ms"] = busy / 1e3 / work.count
        row["idle"] = _by_name(gaps, work.count)
        parts = [(name, end - start, 1) for name, start, end in spans]
    else:
        parts = [(each.name, each.self_cpu_time_total, 1) for each in events]
    advance()
    return row | {"kernels": _by_name(parts, work.count)}


def _by_name(parts: Iterable[tuple[str, float, int]], num_steps: int) -> list[Row]:
    microseconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for name, duration, count in parts:
        microseconds[name] += duration  # type: ignore[assignment]
        launches[name] += count
    order = sorted(microseconds, key=lambda name: -microseconds[name])
    return [
        {"name": each, "us": microseconds[each] / num_steps, "launches": launches[each] / num_steps} for each in order
    ]


def kernel_gaps(spans: Iterable[tuple[str, float, float]]) -> tuple[list[tuple[str, float, int]], float]:
    """Gaps between kernels (name, start, end), by the kernel that ends them, and the time with at least one running."""
    gaps: list[tuple[str, float, int]] = []
    busy, until = 0.0, None
    for name, start, end in sorted(spans, key=lambda span: span[1:]):
        if until is not None and start > until:
            gaps.append((name, start - until, 1))
        begin = start if until is None else max(start, until)
        busy += max(end - begin, 0.0)
        until = max(begin, end)
    return gaps, busy


def _mean(values: Iterable[int]) -> float:
    return round(float(np.mean(list(values))), 1)
