"""The generation loop on a thread of its own: requests in by one callback, responses out by another.

The contract is that of TensorRT-LLM's batch manager ("GptManager"): callbacks, their order, and when state is freed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from torchweave.engine.batch import Batch, Response
from torchweave.engine.request import MAX_REQUEST_ID, InferenceRequest, Output
from torchweave.engine.stats import IterationFacts, statistics
from torchweave.engine.step import Step, StepResult

GetRequests = Callable[[int], Iterable[InferenceRequest]]
SendResponse = Callable[[int, Output, bool, str], None]
PollStop = Callable[[], Collection[int]]
ReturnStats = Callable[[str], None]

_IDLE_SECONDS = (0.0005, 0.02)  # between two looks for requests when nothing runs: the first, and the longest
_KEPT_TIMINGS = 4096
_log = logging.getLogger("torchweave")


class Timing(NamedTuple):
    """Host seconds of one iteration: forming the step, launching it, waiting for an older one, taking that in."""

    form: float
    launch: float
    wait: float
    absorb: float

    @property
    def host(self) -> float:
        """All but the waiting."""
        return self.form + self.launch + self.absorb


class StepRunner(Protocol):
    """Carries out steps, several in flight. What `launch` returns is the runner's own affair."""

    def start(self) -> None:
        """Called once, on the thread that will make all other calls."""
        ...

    def launch(self, step: Step) -> Any:
        """Begin a step without waiting for it; returns what `collect` takes."""
        ...

    def ready(self, handle: Any) -> bool:
        """Whether `collect` would return at once."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step."""
        ...

    def rest(self) -> None:
        """Called when there is nothing left to run: what only a running engine needs may be let go."""
        ...


class BatchManager:
    """Runs requests in flight until it is shut down.

    Args:
        batch: forms the steps.
        runner: carries them out.
        get_requests: called at the start of each iteration with the number of requests that can be taken (negative would mean
            any number); returns new ones. An id that is in flight is answered with an error; the first goes on.
        send_response: called at the end of an iteration, `(id, output, final, error)`, for each request with something to say.
            A non-empty error implies final. All state of a request is freed before its final response.
        poll_stop: returns ids of requests to stop; called at the end of each iteration.
        return_stats: gets statistics as JSON at the end of each iteration; never called while nothing is active.
        run_ahead: steps in flight at the most.
        seed: seeds the requests that bring no seed; None draws one.
    """

    def __init__(
        self,
        batch: Batch,
        runner: StepRunner,
        get_requests: GetRequests,
        send_response: SendResponse,
        poll_stop: PollStop | None = None,
        return_stats: ReturnStats | None = None,
        *,
        run_ahead: int = 2,
        seed: int | None = None,
    ) -> None:
        self._batch = batch
        self._runner = runner
        self._get_requests = get_requests
        self._send_response = send_response
        self._poll_stop = poll_stop
        self._return_stats = return_stats
        self._run_ahead = max(run_ahead, 1)
        self._seeds = np.random.default_rng(seed)
        self._in_flight: deque[tuple[Step, Any]] = deque()
        self._num_new = 0
        self._last_iteration = time.monotonic()
        self._accepting = True
        self._stopping: str | None = None  # "drain" or "abandon"
        self._wake = threading.Event()
        self.failure: BaseException | None = None
        self.counts: dict[str, int] = {}
        self.timings: deque[Timing] = deque(maxlen=_KEPT_TIMINGS)
        self._forming = self._launching = 0.0
        self._thread = threading.Thread(target=self._main, name="torchweave-batch-manager", daemon=True)
        self._thread.start()

    # -- from any thread -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look for new requests now rather than at the next look of an idle loop."""
        self._wake.set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait until the loop has ended; `failure` then says whether it failed."""
        self._thread.join()

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the loop: after the active requests have been answered, or with an error to each of them now."""
        self._accepting = False
        self._stopping = "drain" if drain else "abandon"
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def __enter__(self) -> BatchManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown(drain=exc[0] is None)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._runner.start()
            self._loop()
        except BaseException as failure:
            self.failure = failure
            _log.exception("The generation loop failed; every request in flight is answered with an error.")
            self._answer(self._batch.abandon(f"The engine failed: {failure}"))
            self._refuse_the_rest()

    def _loop(self) -> None:
        idle = _IDLE_SECONDS[0]
        while True:
            if self._accepting:
                self._fetch()
            if self._stopping == "abandon":
                self._drop_in_flight()
                self._answer(self._batch.abandon("The engine was shut down before the request had finished."))
                return
            begin = time.perf_counter()
            step = self._batch.next_step()
            formed = time.perf_counter()
            if step is not None:
                self._in_flight.append((step, self._runner.launch(step)))
            self._forming, self._launching = formed - begin, time.perf_counter() - formed
            if self._in_flight:
                self._collect(wait=step is None or len(self._in_flight) >= self._run_ahead)
                idle = _IDLE_SECONDS[0]
                continue
            if self._stopping == "drain" and self._batch.num_active == 0:
                return
            if idle == _IDLE_SECONDS[0]:
                self._runner.rest()
            self._wake.wait(idle)
            self._wake.clear()
            idle = min(idle * 2, _IDLE_SECONDS[1])

    def _fetch(self) -> None:
        room = self._batch.room()
        if room == 0:
            return
        for request in self._get_requests(room):
            error = self._why_not(request)
            if error:
                self._answer([Response(request.id, Output(np.empty(0, np.int32), "error"), final=True, error=error)])
                continue
            self._batch.add(request, int(self._seeds.integers(2**64, dtype=np.uint64)))
            self._num_new += 1

    def _why_not(self, request: InferenceRequest) -> str:
        if not 0 <= request.id <= MAX_REQUEST_ID:
            return f"The request id {request.id} is outside 0..2**64 - 1; give another."
        if self._batch.knows(request.id):
            return f"A request with the id {request.id} is in flight; use the id again after its final response."
        return self._batch.why_not(request)

    def _collect(self, wait: bool) -> None:
        """Take in the oldest step in flight, if it has completed or there is nothing better to do than wait for it."""
        step, handle = self._in_flight[0]
        if not wait and not self._runner.ready(handle):
            return
        self._in_flight.popleft()
        begin = time.perf_counter()
        result = self._runner.collect(handle)
        collected = time.perf_counter()
        self.counts[result.how] = self.counts.get(result.how, 0) + 1
        responses = self._batch.absorb(step, result)
        if self._poll_stop is not None:
            for request_id in self._poll_stop():
                responses += self._batch.cancel(request_id)
        if self._return_stats is not None:
            self._return_stats(self._statistics(step, sum(response.final for response in responses)))
        self._answer(responses)
        absorbed = time.perf_counter() - collected
        self.timings.append(Timing(self._forming, self._launching, collected - begin, absorbed))

    def _statistics(self, step: Step, num_completed: int) -> str:
        now = time.monotonic()
        facts = IterationFacts(
            latency=now - self._last_iteration,
            num_active=self._batch.num_active + num_completed,
            num_new=self._num_new,
            num_waiting=self._batch.num_waiting,
            num_completed=num_completed,
            num_paused=self._batch.num_paused,
            static=self._batch.static,
            max_requests=self._batch.limits.max_batch_size,
        )
        self._last_iteration, self._num_new = now, 0
        return statistics(step, self._batch.kv, facts)

    def _answer(self, responses: Iterable[Response]) -> None:
        for response in responses:
            try:
                self._send_response(response.id, response.output, response.final, response.error)
            except Exception:
                _log.exception("send_response failed for request %d; it is stopped.", response.id)
                if not response.final:
                    self._answer_failed(response.id)

    def _answer_failed(self, request_id: int) -> None:
        for response in self._batch.cancel(request_id):
            _log.warning("Request %d was stopped because its client could not be told about it.", response.id)

    def _drop_in_flight(self) -> None:
        while self._in_flight:
            self._runner.collect(self._in_flight.popleft()[1])

    def _refuse_the_rest(self) -> None:
        """After a failure: answer what is still handed in, once, so that nobody waits for ever."""
        try:
            rest = list(self._get_requests(-1))
        except Exception:
            return
        message = f"The engine failed: {self.failure}"
        self._answer(Response(r.id, Output(np.empty(0, np.int32), "error"), final=True, error=message) for r in rest)
