"""Requests in by one callback, responses out by another, and a thread between them.

The contract is that of TensorRT-LLM's batch manager ("GptManager"): callbacks, their order, and when state is freed.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

from torchweave.engine.loop import (
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
)
from torchweave.engine.scheduler.scheduler import Scheduler


class BatchManager:
    """Runs requests in flight until it is shut down, or dropped: then what is active is finished first.

    In each iteration `get_requests` is called first; when a step has completed, `send_response`, `poll_stop` and `return_stats`,
    in this order. All of them run on the manager's own thread, and should return soon: no step is formed meanwhile.

    A callback that raises is logged, and costs no more than the requests that it was about. When the runner raises, every
    request is answered with an error, the thread ends, and `failure` holds the exception.

    Args:
        scheduler: forms the steps.
        runner: carries them out.
        get_requests: called with the number of requests that can be taken (negative: any number); returns new ones. An id
            that is in flight is answered with an error; the first goes on.
        send_response: `(id, output, final, error)`, called for each request with something to say. A non-empty error implies
            final. All state of a request is freed before its final response. None where `send_responses` is given.
        poll_stop: returns ids of requests to stop.
        return_stats: gets statistics as JSON; never called while nothing is active.
        send_responses: takes the place of `send_response`: one call an iteration with all responses.
        notify_state_changes: gets (id, `started`, `paused` or `answering`) of requests whose state changed, before their responses.
        run_ahead: steps in flight at the most.
        max_num_requests: requests in flight at the most, waiting ones included; negative: any number.
        idle_seconds: while nothing runs, `get_requests` is called this often; None: only after `wake`.
        stats_interval: seconds between two statistics at the least; the last before the manager falls idle always come.
        seed: seeds the requests that bring no seed; None draws one.

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
    ) -> None:
        if (send_response is None) == (send_responses is None):
            raise ValueError("Responses go one way: give either send_response or send_responses.")
        self._loop = GenerationLoop(
            scheduler,
            runner,
            Callbacks(get_requests, send_responses, send_response, poll_stop, return_stats, notify_state_changes),
            run_ahead=run_ahead,
            max_num_requests=max_num_requests,
            idle_seconds=idle_seconds,
            stats_interval=stats_interval,
            seed=seed,
        )
        self._thread = threading.Thread(target=self._loop.run, name="torchweave-batch-manager", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(
            self, self._loop.stop, drain=True
        )  # the thread knows the loop, not this object

    # -- from any thread -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look for new requests now rather than at the next look of an idle loop."""
        self._loop.wake()

    def join(self) -> None:
        """Wait until the loop has ended; `failure` then says whether it failed."""
        self._thread.join()

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the loop: after the active requests have been answered, or with an error to each of them now."""
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
    def failure(self) -> BaseException | None:
        """What ended the loop, if it did not end as it should."""
        return self._loop.failure

    @property
    def counts(self) -> dict[str, int]:
        """Steps by the way they ran: decode_graph, mixed_graph, piecewise_graph, plain."""
        return self._loop.counts

    @property
    def timings(self) -> deque[Timing]:
        """Host time of the last iterations."""
        return self._loop.timings

    @property
    def iterations(self) -> deque[Iteration]:
        """The last iterations. Who counts them takes them away (`popleft`), on any one thread."""
        return self._loop.iterations
