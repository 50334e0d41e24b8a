"""Client of the batch manager: queues requests of any thread and routes responses to their inboxes."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from torchweave.engine.request import InferenceRequest, Output, SamplingParams
from torchweave.engine.responses import NO_TOKENS, Response, Responses, refusal

Inbox = queue.SimpleQueue[Sequence[Response]]


class Client:
    """The batch manager's callbacks, and `submit`, `stop` and `close` for other threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a finalizer may call `stop` anywhere
        self._ids = itertools.count()
        self._queue: OrderedDict[int, InferenceRequest] = OrderedDict()  # not yet fetched by the batch manager
        self._inboxes: dict[int, Inbox] = {}
        self._stops: set[int] = set()
        self._closed = False
        self._all_answered = threading.Condition(self._lock)

    def submit(self, prompt: np.ndarray, params: SamplingParams, inbox: Inbox, streaming: bool) -> int:
        """Queue a request whose responses go to `inbox` and return its id; the caller then wakes the batch manager.

        Raises:
            RuntimeError: after `close`.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("The engine was shut down; make a new one.")
            request = InferenceRequest(next(self._ids), prompt, params, streaming)
            self._inboxes[request.id] = inbox
            self._queue[request.id] = request
        return request.id

    def stop(self, request_id: int) -> None:
        """Request that a request is stopped; its final response still arrives."""
        with self._lock:
            pending = self._queue.pop(request_id, None)
            if pending is None and request_id in self._inboxes:
                self._stops.add(request_id)
        if pending is not None:  # never fetched by the batch manager
            self.send_responses(Responses([Response(request_id, Output(NO_TOKENS, "cancelled"), final=True)]))

    def close(self) -> None:
        """Refuse further requests."""
        with self._lock:
            self._closed = True

    def fail_all(self, message: str) -> None:
        """Answer all unfinished requests with an error, after the batch manager has ended."""
        with self._lock:
            self._queue.clear()
            pending = list(self._inboxes)
        self.send_responses(Responses(refusal(request_id, message) for request_id in pending))

    def wait_until_answered(self, timeout: float) -> bool:
        """Wait until every request has its final response; return False after `timeout` seconds."""
        with self._all_answered:
            return self._all_answered.wait_for(lambda: not self._inboxes, timeout)

    # -- the batch manager's callbacks ---------------------------------------------------------------------------------

    def get_requests(self, max_num: int) -> list[InferenceRequest]:
        if not self._queue:
            return []
        with self._lock:
            requests = []
            while self._queue and (max_num < 0 or len(requests) < max_num):
                requests.append(self._queue.popitem(last=False)[1])
            return requests

    def send_responses(self, responses: Sequence[Response]) -> None:
        """Put responses into the inboxes of their requests, one message an inbox."""
        batch = responses if isinstance(responses, Responses) else Responses(responses)
        inboxes = {id(inbox): inbox for inbox in map(self._inboxes.get, batch.request_ids()) if inbox is not None}
        if len(inboxes) == 1:
            next(iter(inboxes.values())).put(batch)
        elif inboxes:
            parts: dict[int, list[Response]] = {key: [] for key in inboxes}
            for response in batch:
                if (inbox := self._inboxes.get(response.id)) is not None:
                    parts[id(inbox)].append(response)
            for key, part in parts.items():
                inboxes[key].put(part)
        if ended := [response.id for response in batch.others if response.final]:
            self._forget(ended)

    def _forget(self, request_ids: Sequence[int]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._inboxes.pop(request_id, None)
                self._stops.discard(request_id)
            if not self._inboxes:
                self._all_answered.notify_all()

    def poll_stop(self) -> set[int]:
        if not self._stops:
            return set()
        with self._lock:
            stops, self._stops = self._stops, set()
        return stops
