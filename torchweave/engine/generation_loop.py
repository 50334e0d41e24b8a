"""Generation loop: takes requests, runs their steps and sends responses, on the batch manager's thread.

It fetches requests, runs control calls, schedules and launches a step, collects an older one, and sends responses. Failures are
isolated: an exception of a callback cancels at most the requests of that call; a failure of the device ends the loop, and every
request is answered with an error.
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from torchweave.distributed.worker_group import RankFailure
from torchweave.engine.control.host import CallRanks, ControlQueue, Host
from torchweave.engine.request import MAX_REQUEST_ID, InferenceRequest, Output, Response, Responses, refusal
from torchweave.engine.scheduler.scheduler import Scheduler, StateChange
from torchweave.engine.scheduler.step import Step, StepResult
from torchweave.engine.stats import IterationFacts, iteration_stats
from torchweave.utils import gc

GetRequests = Callable[[int], Iterable[InferenceRequest]]
SendResponse = Callable[[int, Output, bool, str], None]
SendResponses = Callable[[Sequence[Response]], None]
PollStop = Callable[[], Collection[int]]
ReturnStats = Callable[[str], None]
NotifyStateChanges = Callable[[Sequence[tuple[int, StateChange]]], None]
Value = TypeVar("Value")

_FIRST_POLL_SECONDS = 0.0005  # first wait of an idle loop that polls for requests
_RETRY_SECONDS = 0.02  # requests wait, but no step can be scheduled: retry
_LOG_INTERVAL_SECONDS = 1.0  # between two log lines about the same callback
_MAX_TIMINGS = 4096
_log = logging.getLogger("torchweave")


class Timing(NamedTuple):
    """Host seconds of one iteration: schedule a step, launch it, wait for an older one, process its result."""

    schedule: float
    launch: float
    wait: float
    update: float

    @property
    def host(self) -> float:
        """Seconds without the wait."""
        return self.schedule + self.launch + self.update


class Iteration(NamedTuple):
    """Counts of one iteration: wall-clock seconds, prefill tokens, sampled tokens."""

    seconds: float
    num_prefill_tokens: int
    num_sampled_tokens: int


class StepRunner(Protocol):
    """Executes steps, several in flight."""

    def start(self) -> None:
        """Called once, on the thread of all other calls."""
        ...

    def launch(self, step: Step) -> Any:
        """Launch a step without waiting for it; returns a handle for `collect`."""
        ...

    def ready(self, handle: Any) -> bool:
        """Whether `collect` would return without waiting."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step and return its result."""
        ...

    def memory_in_use(self) -> int | None:
        """GPU memory in use, in bytes; None without a GPU."""
        ...

    def on_idle(self) -> None:
        """Called when no request is active; resources of running steps may be freed."""
        ...


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of the loop; see `BatchManager`."""

    get_requests: GetRequests
    send_responses: SendResponses | None
    send_response: SendResponse | None
    poll_stop: PollStop | None
    return_stats: ReturnStats | None
    notify_state_changes: NotifyStateChanges | None = None


class WakeUp:
    """An event that its one waiter clears. A bare lock takes half the time of `threading.Event`, which every reply waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # locked: not set
        self._lock.acquire()

    def set(self) -> None:
        """Set the event; from any thread, a finalizer's too."""
        with suppress(RuntimeError):  # it is set
            self._lock.release()

    def wait(self, seconds: float | None) -> None:
        """Wait until the event is set, or for `seconds`, and clear it."""
        self._lock.acquire(timeout=-1 if seconds is None else seconds)


class GenerationLoop:
    """Runs on one thread (`run`); `stop` and `wake` may be called from any thread. For the arguments see `BatchManager`.

    Attributes:
        failure: exception that ended the loop; None without a failure.
        counts: number of steps by execution mode.
        timings: host times of the last iterations.
        iterations: counts of the last iterations, removed by their consumer.
        control: work for the loop's thread between two steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        callbacks: Callbacks,
        *,
        run_ahead: int,
        max_num_requests: int,
        idle_seconds: float | None,
        stats_interval: float,
        seed: int | None,
        call_ranks: CallRanks | None,
    ) -> None:
        self.failure: BaseException | None = None
        self.counts: dict[str, int] = {}
        self.timings: deque[Timing] = deque(maxlen=_MAX_TIMINGS)
        self.iterations: deque[Iteration] = deque(maxlen=_MAX_TIMINGS)
        self._scheduler = scheduler
        self._runner = runner
        self._callbacks = callbacks
        self._run_ahead = max(run_ahead, 1)
        self._max_num_requests = max_num_requests
        self._idle_seconds = idle_seconds
        self._stats_interval = stats_interval
        self._seeds = np.random.default_rng(seed)
        self._in_flight: deque[tuple[Step, Any]] = deque()
        self._num_new = self._num_completed = 0
        self._iteration_began = self._last_stats_time = float("-inf")
        self._stopping: str | None = None  # "finish" (fetch once more, then drain), "drain" or "abandon"
        self._wake = WakeUp()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._schedule_seconds = self._launch_seconds = 0.0
        self._last_logged: dict[str, float] = {}
        self._host = Host(scheduler, self._send, self._collect_all, call_ranks)
        self.control = ControlQueue(self._host)
        self._host.wake = self._continue_tasks
        if (grammars := scheduler.resources.grammars) is not None:
            grammars.on_ready(self._wake.set)

    # -- from any thread -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    def _continue_tasks(self) -> None:
        """Let the loop continue the calls that wait: an idle one looks for queued calls alone."""
        self.control.run_on_loop(lambda _: None)
        self._wake.set()

    def stop(self, drain: bool) -> None:
        """End the loop after the active requests (`drain`), or now with an error to each of them."""
        if self._stopping != "abandon":
            self._stopping = "drain" if drain else "abandon"
        self._wake.set()

    def finish_at_exit(self) -> None:
        """Finish the requests before the interpreter ends: it would kill this daemon thread in the middle of a step."""
        if self._thread is None or os.getpid() != self._process:  # a fork has no loop
            return
        if self._stopping is None:
            self._stopping = "finish"
        self._wake.set()
        self._thread.join()

    @property
    def is_paused(self) -> bool:
        return self._host.pause_mode is not None

    @property
    def end_reason(self) -> str:
        """Why no loop runs in this process."""
        if self._thread is not None and os.getpid() != self._process:
            return "this process is a fork, which has no threads of its parent; create the engine in the process that uses it"
        return str(self.failure or "it was shut down")

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self._thread, self._process = threading.current_thread(), os.getpid()
        atexit.register(self.finish_at_exit)
        try:
            with gc.gc_frozen():
                self._runner.start()
                self._loop()
        except BaseException as failure:
            self.failure = failure
            # The failure of another rank is complete in its message; the traceback of this rank's wait adds nothing.
            of_a_rank = isinstance(failure, RankFailure)
            detail = f" ({failure})" if of_a_rank else ""
            _log.error(
                "The generation loop failed%s; every request in flight is answered with an error.",
                detail,
                exc_info=not of_a_rank,
            )
            self._send(self._scheduler.abort_all(f"The engine failed: {failure}"))
            self._reject_pending()
        finally:
            self.control.close(f"The engine has ended: {self.end_reason}")
            atexit.unregister(self.finish_at_exit)

    def _loop(self) -> None:
        while True:
            if self._stopping in (None, "finish"):
                last = self._stopping == "finish"
                self._fetch()
                self._stopping = "drain" if last and self._stopping == "finish" else self._stopping
            if self.control.queued or self._host.tasks:
                self._run_calls()
            if self._stopping == "abandon" or (self._stopping == "drain" and self._host.pause_mode is not None):
                self._discard_in_flight()
                self._send(self._scheduler.abort_all("The engine was shut down before the request had finished."))
                return
            begin = time.perf_counter()
            self._send(self._scheduler.poll_parts())
            step = None if self._host.pause_mode == "keep" else self._scheduler.schedule()
            scheduled = time.perf_counter()
            if step is not None:
                if not self._in_flight:
                    self._iteration_began = begin
                self._in_flight.append((step, self._runner.launch(step)))
                self._host.num_launched += 1
            self._schedule_seconds, self._launch_seconds = scheduled - begin, time.perf_counter() - scheduled
            if self._scheduler.state_changes:
                self._notify_state_changes()
            if self._in_flight:
                self._collect(wait=step is None or len(self._in_flight) >= self._run_ahead)
            elif self._stopping == "drain" and self._scheduler.num_active == 0:
                return
            else:
                self._idle()

    def _notify_state_changes(self) -> None:
        state_changes, self._scheduler.state_changes = self._scheduler.state_changes, []
        if self._callbacks.notify_state_changes is None:
            return
        try:
            self._callbacks.notify_state_changes(state_changes)
        except BaseException:
            self._log_callback_error("notify_state_changes", "these state changes are not reported")

    def _idle(self) -> None:
        """Wait for requests while no step is in flight."""
        if self._scheduler.num_active:  # they wait for a grammar or for blocks from host memory
            self._wake.wait(_FIRST_POLL_SECONDS if self._scheduler.is_loading else _RETRY_SECONDS)
            self._poll_stop()
            return
        self._runner.on_idle()
        pause = _FIRST_POLL_SECONDS
        while self._stopping is None and self._scheduler.num_active == 0 and not self.control.queued:
            self._wake.wait(None if self._idle_seconds is None else min(pause, self._idle_seconds))
            pause *= 2
            if self._stopping is None:
                self._fetch()

    def _fetch(self) -> None:
        if self._host.pause_mode is not None:  # new requests wait where they are
            return
        room = self._max_num_requests
        if room >= 0:
            room = max(room - self._scheduler.num_active, 0)
        try:
            for request in self._callbacks.get_requests(room):
                self._add_request(request)
        except BaseException:
            self._log_callback_error("get_requests", "the requests in flight continue")

    def _add_request(self, request: InferenceRequest) -> None:
        try:
            error = self._rejection_reason(request)
            if not error:
                self._scheduler.add(request, int(self._seeds.integers(2**64, dtype=np.uint64)))
        except Exception as failure:
            error = f"The request is invalid ({failure}); give an InferenceRequest."
        if not error:
            self._num_new += 1
        elif isinstance(request, InferenceRequest) and isinstance(request.id, (int, np.integer)):
            self._send([refusal(request.id, error)])
        else:
            _log.error("Ignored a request without an integer id, which cannot be answered: %.200r", request)

    def _rejection_reason(self, request: InferenceRequest) -> str:
        if not isinstance(request.id, (int, np.integer)):
            return "The request id is not a whole number; give one from 0 to 2**64 - 1."
        if not 0 <= request.id <= MAX_REQUEST_ID:
            return f"The request id {request.id} is outside 0..2**64 - 1; give another."
        if self._scheduler.has_request(request.id):
            return f"A request with the id {request.id} is in flight; reuse the id after its final response."
        return self._scheduler.rejection_reason(request)

    def _collect(self, wait: bool) -> None:
        """Process the oldest step in flight, if it has completed or `wait` is set."""
        step, handle = self._in_flight[0]
        if not wait and not self._runner.ready(handle):
            return
        self._in_flight.popleft()
        begin = time.perf_counter()
        result = self._runner.collect(handle)
        collected = time.perf_counter()
        self.counts[result.how] = self.counts.get(result.how, 0) + 1
        responses = self._scheduler.update(step, result)
        has_stats, num_waiting, num_running = self._callbacks.return_stats is not None, 0, 0
        if has_stats:
            num_waiting = self._scheduler.num_waiting
            num_running = self._scheduler.num_active - num_waiting + responses.num_final
        if self._scheduler.state_changes:
            self._notify_state_changes()
        if responses.others or responses.ids.size:
            self._send(responses)
        self._poll_stop()
        seconds, is_plain = time.perf_counter() - self._iteration_began, not step.chunks and step.query_len == 1
        num_tokens = (0, len(step.slots)) if is_plain else (step.num_prefill_tokens, result.num_sampled_tokens)
        self.iterations.append(Iteration(seconds, *num_tokens))
        if has_stats:
            self._emit_stats(step, result, num_running, num_waiting)
        ended = time.perf_counter()
        self._iteration_began = ended
        self.timings.append(Timing(self._schedule_seconds, self._launch_seconds, collected - begin, ended - collected))

    def _run_calls(self) -> None:
        if not (self._host.tasks or self.control.queued):
            return
        was_paused = self.is_paused
        self.control.run()
        if was_paused and not self.is_paused:  # requests have come meanwhile
            self._fetch()

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect(wait=True)

    def _poll_stop(self) -> None:
        poll_stop = self._callbacks.poll_stop
        if poll_stop is None:
            return
        try:
            returned = poll_stop()
            request_ids = [] if returned is None else list(returned)
        except BaseException:
            self._log_callback_error("poll_stop", "no request is cancelled")
            return
        stops = []
        for each in request_ids:
            try:
                stops.append(operator.index(each))
            except TypeError:
                self._log_callback_error("poll_stop", f"{each!r:.80} is no request id and is left out")
        if stops:
            self._send(Responses(response for each in stops for response in self._scheduler.cancel(each)))

    def _emit_stats(self, step: Step, result: StepResult, num_running: int, num_waiting: int) -> None:
        assert self._callbacks.return_stats is not None
        now = time.perf_counter()
        if now - self._last_stats_time < self._stats_interval and self._scheduler.num_active:
            return
        self._last_stats_time = now
        facts = IterationFacts(
            latency=now - self._iteration_began,
            num_active=num_running + num_waiting,
            num_running=num_running,
            num_decoded=result.num_tokens_of(step.num_decode_rows),
            num_new=self._num_new,
            num_waiting=self._scheduler.num_waiting,
            num_completed=self._num_completed,
            max_requests=self._max_num_requests
            if self._max_num_requests >= 0
            else self._scheduler.limits.max_batch_size,
            memory_in_use=self._runner.memory_in_use(),
        )
        self._num_new = self._num_completed = 0
        try:
            self._callbacks.return_stats(iteration_stats(step, self._scheduler, facts))
        except BaseException:
            self._log_callback_error("return_stats", "these statistics are lost")

    # -- responses -----------------------------------------------------------------------------------------------------

    def _send(self, responses: Sequence[Response]) -> None:
        if not responses:
            return
        self._num_completed += responses.num_final if isinstance(responses, Responses) else len(responses)
        send_all = self._callbacks.send_responses
        if send_all is None:
            for response in responses:
                self._send_one(response)
            return
        try:
            send_all(responses)
        except BaseException:
            self._log_callback_error("send_responses", "the requests of this call are cancelled")
            self._cancel_all(response.id for response in responses if not response.final)

    def _send_one(self, response: Response) -> None:
        assert self._callbacks.send_response is not None
        try:
            self._callbacks.send_response(response.id, response.output, response.final, response.error)
        except BaseException:
            self._log_callback_error("send_response", f"request {response.id} is cancelled")
            if not response.final:
                self._cancel_all([response.id])

    def _cancel_all(self, request_ids: Iterable[int]) -> None:
        """Cancel requests whose responses cannot be sent."""
        for request_id in request_ids:
            self._send(self._scheduler.cancel(request_id))

    def _log_callback_error(self, callback: str, effect: str) -> None:
        """Log the current exception, at most once a second per callback.

        Callers catch every exception: asyncio's CancelledError, of a future that a callback reads, is no `Exception`.
        """
        now = time.monotonic()
        if now - self._last_logged.get(callback, float("-inf")) >= _LOG_INTERVAL_SECONDS:
            self._last_logged[callback] = now
            _log.exception("%s failed; %s.", callback, effect)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _discard_in_flight(self) -> None:
        while self._in_flight:
            self._runner.collect(self._in_flight.popleft()[1])

    def _reject_pending(self) -> None:
        """Answer the requests of one more `get_requests` call with an error after a failure, so that no client waits forever."""
        try:
            requests = list(self._callbacks.get_requests(-1))
        except BaseException:
            self._log_callback_error("get_requests", "the engine had already failed")
            return
        self._send([refusal(request.id, f"The engine failed: {self.failure}") for request in requests])
