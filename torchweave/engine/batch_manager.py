"""Batch manager: a thread that takes requests from one callback, runs them in the generation loop, and passes on responses.

The contract is that of TensorRT-LLM's batch manager ("GptManager"): callbacks, their order, and when state is freed.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torchweave.engine.control.calls import invoke
from torchweave.engine.control.host import CallRanks, Host
from torchweave.engine.generation_loop import (
    Callbacks,
    GenerationLoop,
    GetRequests,
    Iteration,
    NotifyStateChanges,
    PollStop,
    ReturnStats,
    SendResponse,
    SendResponses,
    StepRunner,
    Timing,
    Value,
)
from torchweave.engine.scheduler.scheduler import Scheduler


class BatchManager:
    """Runs requests until `shutdown`. When the object is garbage-collected or the program ends, active requests are finished first.

    Each iteration calls `get_requests`; when a step has completed, it calls `send_response`, `poll_stop` and `return_stats`, in
    this order. All run on the manager's own thread and should return soon, because no step is scheduled meanwhile.

    An exception of a callback is logged and cancels at most the requests of that call. After an exception of the runner, every
    request is answered with an error, the thread ends, and `failure` holds the exception.

    Args:
        scheduler: schedules the steps.
        runner: executes the steps.
        get_requests: called with the number of requests that can be added (negative: any number); returns new requests. A
            request whose id is in flight is answered with an error; the first one continues.
        send_response: `(id, output, final, error)`, called for each response. A non-empty error implies final. All state of a
            request is freed before its final response. None if `send_responses` is given.
        poll_stop: returns ids of requests to cancel.
        return_stats: receives statistics as JSON; not called without active requests.
        send_responses: replaces `send_response`: one call per iteration with all responses.
        notify_state_changes: receives (id, `started`, `paused` or `answering`) of requests whose state changed, before their
            responses.
        run_ahead: most steps in flight.
        max_num_requests: most requests in flight, including waiting ones; negative: any number.
        idle_seconds: interval of `get_requests` calls without active requests; None: only after `wake`.
        stats_interval: least seconds between two statistics; the last ones before the manager becomes idle are always sent.
        seed: seed for the requests without a seed; None: random.
        call_ranks: runs rank handlers of control calls (`Engine.call_ranks`); None: calls that need them are refused.
        tell_moves: deprecated name of `notify_state_changes`.

    Raises:
        ValueError: neither `send_response` nor `send_responses` is given, or both.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        get_requests: GetRequests,
        send_response: SendResponse | None = None,
        poll_stop: PollStop | None = None,
        return_stats: ReturnStats | None = None,
        *,
        send_responses: SendResponses | None = None,
        notify_state_changes: NotifyStateChanges | None = None,
        run_ahead: int = 2,
        max_num_requests: int = -1,
        idle_seconds: float | None = 0.02,
        stats_interval: float = 0.0,
        seed: int | None = None,
        call_ranks: CallRanks | None = None,
        tell_moves: NotifyStateChanges | None = None,
    ) -> None:
        if (send_response is None) == (send_responses is None):
            raise ValueError("Responses need exactly one callback; give either send_response or send_responses.")
        if tell_moves is not None:
            message = "tell_moves is deprecated and will be removed in the next release; use notify_state_changes."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            notify_state_changes = notify_state_changes or tell_moves
        self._loop = GenerationLoop(
            scheduler,
            runner,
            Callbacks(get_requests, send_responses, send_response, poll_stop, return_stats, notify_state_changes),
            run_ahead=run_ahead,
            max_num_requests=max_num_requests,
            idle_seconds=idle_seconds,
            stats_interval=stats_interval,
            seed=seed,
            call_ranks=call_ranks,
        )
        self._thread = threading.Thread(target=self._loop.run, name="torchweave-batch-manager", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _drain, self._loop, os.getpid())  # the thread references only the loop

    # -- from any thread -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let an idle loop call `get_requests` now."""
        self._loop.wake()

    def call(self, name: str, **arguments: Any) -> Future[Any]:
        """Run a control call (see `engine/control/calls.py`) between two steps; the future has its result or error."""
        return self.run_on_loop(lambda host: invoke(host, name, arguments))

    def run_on_loop(self, work: Callable[[Host], Value]) -> Future[Value]:
        """Run `work` on the loop's thread between two steps; the future has its result or error."""
        future = self._loop.control.run_on_loop(work)
        self._loop.wake()
        return future

    def join(self) -> None:
        """Wait until the loop has ended; see `failure`."""
        self._thread.join()

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the loop after the active requests (`drain`), or now with an error to each of them."""
        self._loop.stop(drain)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def __enter__(self) -> BatchManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown(drain=exc[0] is None)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait because of a control call."""
        return self._loop.is_paused

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the loop; None without a failure."""
        return self._loop.failure

    @property
    def end_reason(self) -> str:
        """Why no loop runs in this process: its failure, a shutdown or a fork."""
        return self._loop.end_reason

    @property
    def counts(self) -> dict[str, int]:
        """Number of steps by execution mode: decode_graph, mixed_graph, piecewise_graph, plain."""
        return self._loop.counts

    @property
    def timings(self) -> deque[Timing]:
        """Host time of the last iterations."""
        return self._loop.timings

    @property
    def iterations(self) -> deque[Iteration]:
        """The last iterations. A single consumer may remove them (`popleft`), on any thread."""
        return self._loop.iterations


def _drain(loop: GenerationLoop, process: int) -> None:
    if os.getpid() == process:  # a fork has no loop, and perhaps a lock that nobody will release
        loop.stop(drain=True)
