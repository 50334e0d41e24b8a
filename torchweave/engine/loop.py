"""The generation loop: fetch requests, form and launch a step, take in an older one, tell what there is to say.

Faults stay where they belong. A callback that raises costs no more than the requests that it was about; a device that fails
ends the loop, and everyone who waits is answered with an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from torchweave.distributed.worker_group import RankFailure
from torchweave.engine.request import MAX_REQUEST_ID, InferenceRequest, Output
from torchweave.engine.responses import Response, Responses, refusal
from torchweave.engine.scheduler.scheduler import Batch, Move
from torchweave.engine.scheduler.step import Step, StepResult
from torchweave.engine.stats import IterationFacts, statistics
from torchweave.utils import gc

GetRequests = Callable[[int], Iterable[InferenceRequest]]
SendResponse = Callable[[int, Output, bool, str], None]
SendResponses = Callable[[Sequence[Response]], None]
PollStop = Callable[[], Collection[int]]
ReturnStats = Callable[[str], None]
TellMoves = Callable[[Sequence[tuple[int, Move]]], None]

_FIRST_LOOK = 0.0005  # seconds of the first wait of an idle loop that has to look for requests itself
_RETRY_SECONDS = 0.02  # requests wait, but no step can be formed: look again
_COMPLAIN_SECONDS = 1.0  # between two log lines about the same callback
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


class Iteration(NamedTuple):
    """One iteration as it is counted: wall-clock seconds, prompt tokens that were read, tokens that were drawn."""

    seconds: float
    num_read: int
    num_drawn: int


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

    def memory_in_use(self) -> int | None:
        """Bytes of the GPU's memory that are taken; None where there is no GPU."""
        ...

    def rest(self) -> None:
        """Called when there is nothing left to run: what only a running engine needs may be let go."""
        ...


@dataclass(frozen=True)
class Callbacks:
    """What the loop calls; see `BatchManager`."""

    get_requests: GetRequests
    send_responses: SendResponses | None
    send_response: SendResponse | None
    poll_stop: PollStop | None
    return_stats: ReturnStats | None
    tell_moves: TellMoves | None = None


class GenerationLoop:
    """Runs on one thread (`run`); `stop` and `wake` may be called by any.

    Args:
        batch: forms the steps.
        runner: carries them out.
        callbacks: where requests come from and answers go.
        run_ahead: steps in flight at the most.
        max_num_requests: requests taken in at the most, waiting ones included; negative: any number.
        idle_seconds: longest time between two looks for requests while nothing runs; None: only `wake` ends the wait.
        stats_interval: seconds between two statistics at the least.
        seed: seeds the requests that bring no seed; None draws one.

    Attributes:
        failure: what ended the loop, if it did not end as it should.
        counts: steps by the way they ran.
        timings: of the last iterations.
        iterations: the last ones; who counts them takes them away.
    """

    def __init__(
        self,
        batch: Batch,
        runner: StepRunner,
        callbacks: Callbacks,
        *,
        run_ahead: int,
        max_num_requests: int,
        idle_seconds: float | None,
        stats_interval: float,
        seed: int | None,
    ) -> None:
        self.failure: BaseException | None = None
        self.counts: dict[str, int] = {}
        self.timings: deque[Timing] = deque(maxlen=_KEPT_TIMINGS)
        self.iterations: deque[Iteration] = deque(maxlen=_KEPT_TIMINGS)
        self._batch = batch
        self._runner = runner
        self._callbacks = callbacks
        self._run_ahead = max(run_ahead, 1)
        self._max_num_requests = max_num_requests
        self._idle_seconds = idle_seconds
        self._stats_interval = stats_interval
        self._seeds = np.random.default_rng(seed)
        self._in_flight: deque[tuple[Step, Any]] = deque()
        self._num_new = self._num_completed = 0
        self._iteration_began = self._told_stats = float("-inf")
        self._stopping: str | None = None  # "drain" or "abandon"
        self._wake = threading.Event()
        self._forming = self._launching = 0.0
        self._complained: dict[str, float] = {}
        if batch.grammars is not None:
            batch.grammars.on_ready(self._wake.set)

    # -- from any thread -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    def stop(self, drain: bool) -> None:
        """End after the active requests have been answered, or now, with an error to each of them."""
        if self._stopping != "abandon":
            self._stopping = "drain" if drain else "abandon"
        self._wake.set()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            with gc.at_rest():
                self._runner.start()
                self._loop()
        except BaseException as failure:
            self.failure = failure
            # Of another rank's end the failure says all; where this one waited for it means nothing.
            of_a_rank = isinstance(failure, RankFailure)
            why = f" ({failure})" if of_a_rank else ""
            _log.error(
                "The generation loop failed%s; every request in flight is answered with an error.",
                why,
                exc_info=not of_a_rank,
            )
            self._answer(self._batch.abandon(f"The engine failed: {failure}"))
            self._refuse_the_rest()

    def _loop(self) -> None:
        while True:
            if self._stopping is None:
                self._fetch()
            if self._stopping == "abandon":
                self._drop_in_flight()
                self._answer(self._batch.abandon("The engine was shut down before the request had finished."))
                return
            begin = time.perf_counter()
            self._answer(self._batch.attend())
            step = self._batch.next_step()
            formed = time.perf_counter()
            if step is not None:
                if not self._in_flight:
                    self._iteration_began = begin
                self._in_flight.append((step, self._runner.launch(step)))
            self._forming, self._launching = formed - begin, time.perf_counter() - formed
            if self._batch.moves:
                self._tell_moves()
            if self._in_flight:
                self._collect(wait=step is None or len(self._in_flight) >= self._run_ahead)
            elif self._stopping == "drain" and self._batch.num_active == 0:
                return
            else:
                self._idle()

    def _tell_moves(self) -> None:
        moves, self._batch.moves = self._batch.moves, []
        if self._callbacks.tell_moves is None:
            return
        try:
            self._callbacks.tell_moves(moves)
        except Exception:
            self._complain("tell_moves", "nobody hears of it")

    def _idle(self) -> None:
        """Nothing runs: wait for requests."""
        if self._batch.num_active:  # they wait for something that is not in this loop's power
            self._wait(_FIRST_LOOK if self._batch.is_landing else _RETRY_SECONDS)
            self._poll_stop()
            return
        self._runner.rest()
        pause = _FIRST_LOOK
        while self._stopping is None and self._batch.num_active == 0:
            self._wait(None if self._idle_seconds is None else min(pause, self._idle_seconds))
            pause *= 2
            if self._stopping is None:
                self._fetch()

    def _wait(self, seconds: float | None) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _fetch(self) -> None:
        room = self._max_num_requests
        if room >= 0:
            room = max(room - self._batch.num_active, 0)
        try:
            for request in self._callbacks.get_requests(room):
                self._take_in(request)
        except Exception:
            self._complain("get_requests", "the requests in flight go on")

    def _take_in(self, request: InferenceRequest) -> None:
        try:
            error = self._why_not(request)
            if not error:
                self._batch.add(request, int(self._seeds.integers(2**64, dtype=np.uint64)))
        except Exception as fault:
            error = f"The request cannot be read ({fault}); give an InferenceRequest."
        if not error:
            self._num_new += 1
        elif isinstance(request, InferenceRequest) and isinstance(request.id, (int, np.integer)):
            self._answer([refusal(request.id, error)])
        else:
            _log.error("A request without a number for an id cannot be answered, and is left out: %.200r", request)

    def _why_not(self, request: InferenceRequest) -> str:
        if not isinstance(request.id, (int, np.integer)):
            return "The request id is not a whole number; give one from 0 to 2**64 - 1."
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
        num_active = self._batch.num_active + responses.num_final
        if self._batch.moves:
            self._tell_moves()
        self._answer(responses)
        self._poll_stop()
        seconds = time.perf_counter() - self._iteration_began
        self.iterations.append(Iteration(seconds, step.num_context_tokens, int(np.count_nonzero(step.emits))))
        if self._callbacks.return_stats is not None:
            self._tell_stats(step, num_active)
        ended = time.perf_counter()
        self._iteration_began = ended
        self.timings.append(Timing(self._forming, self._launching, collected - begin, ended - collected))

    def _poll_stop(self) -> None:
        poll_stop = self._callbacks.poll_stop
        if poll_stop is None:
            return
        try:
            found = poll_stop()
            stops = [int(each) for each in found] if found is not None else []
        except Exception:
            self._complain("poll_stop", "nothing is stopped")
            return
        if stops:
            self._answer(Responses(response for each in stops for response in self._batch.cancel(each)))

    def _tell_stats(self, step: Step, num_active: int) -> None:
        assert self._callbacks.return_stats is not None
        now = time.perf_counter()
        if now - self._told_stats < self._stats_interval and self._batch.num_active:
            return
        self._told_stats = now
        facts = IterationFacts(
            latency=now - self._iteration_began,
            num_active=num_active,
            num_new=self._num_new,
            num_waiting=self._batch.num_waiting,
            num_completed=self._num_completed,
            num_paused=self._batch.num_paused,
            static=self._batch.static,
            max_requests=self._batch.limits.max_batch_size,
            memory_in_use=self._runner.memory_in_use(),
        )
        self._num_new = self._num_completed = 0
        try:
            self._callbacks.return_stats(statistics(step, self._batch.kv, facts))
        except Exception:
            self._complain("return_stats", "these statistics are lost")

    # -- answers -------------------------------------------------------------------------------------------------------

    def _answer(self, responses: Sequence[Response]) -> None:
        if not responses:
            return
        self._num_completed += responses.num_final if isinstance(responses, Responses) else len(responses)
        together = self._callbacks.send_responses
        if together is None:
            for response in responses:
                self._answer_one(response)
            return
        try:
            together(responses)
        except Exception:
            self._complain("send_responses", "the requests that it was about are stopped")
            self._give_up(response.id for response in responses if not response.final)

    def _answer_one(self, response: Response) -> None:
        assert self._callbacks.send_response is not None
        try:
            self._callbacks.send_response(response.id, response.output, response.final, response.error)
        except Exception:
            self._complain("send_response", f"request {response.id} is stopped")
            if not response.final:
                self._give_up([response.id])

    def _give_up(self, request_ids: Iterable[int]) -> None:
        """Stop requests whose client cannot be told about them."""
        for request_id in request_ids:
            self._answer(self._batch.cancel(request_id))

    def _complain(self, callback: str, consequence: str) -> None:
        """Log the exception at hand, not more often than once a second for each callback."""
        now = time.monotonic()
        if now - self._complained.get(callback, float("-inf")) >= _COMPLAIN_SECONDS:
            self._complained[callback] = now
            _log.exception("%s failed; %s.", callback, consequence)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _drop_in_flight(self) -> None:
        while self._in_flight:
            self._runner.collect(self._in_flight.popleft()[1])

    def _refuse_the_rest(self) -> None:
        """After a failure: answer what is still handed in, once, so that nobody waits for ever."""
        try:
            rest = list(self._callbacks.get_requests(-1))
        except Exception:
            self._complain("get_requests", "the engine has failed anyway")
            return
        self._answer([refusal(request.id, f"The engine failed: {self.failure}") for request in rest])
