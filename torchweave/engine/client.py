"""Hands requests of any thread to the batch manager and its responses back, each to the one who waits for it."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from torchweave.engine.request import InferenceRequest, Output, SamplingParams


@dataclass(frozen=True)
class Message:
    """One response of the batch manager."""

    id: int
    output: Output
    final: bool
    error: str


Inbox = queue.SimpleQueue[Message]


class Client:
    """The batch manager's callbacks, and `submit` and `stop` for everyone else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._new: deque[InferenceRequest] = deque()
        self._inboxes: dict[int, Inbox] = {}
        self._stops: set[int] = set()

    def submit(self, prompt: np.ndarray, params: SamplingParams, inbox: Inbox, streaming: bool) -> int:
        """Queue a request; its responses go to `inbox`. Returns its id. The caller then wakes the batch manager."""
        with self._lock:
            request = InferenceRequest(next(self._ids), prompt, params, streaming)
            self._inboxes[request.id] = inbox
            self._new.append(request)
        return request.id

    def stop(self, request_id: int) -> None:
        """Ask that a request is stopped; its final response still comes."""
        with self._lock:
            if request_id in self._inboxes:
                self._stops.add(request_id)

    @property
    def num_queued(self) -> int:
        return len(self._new)

    # -- the batch manager's callbacks ---------------------------------------------------------------------------------

    def get_requests(self, max_num: int) -> list[InferenceRequest]:
        if not self._new:
            return []
        with self._lock:
            count = len(self._new) if max_num < 0 else min(max_num, len(self._new))
            return [self._new.popleft() for _ in range(count)]

    def send_response(self, request_id: int, output: Output, final: bool, error: str) -> None:
        inbox = self._inboxes.get(request_id)
        if final:
            with self._lock:
                self._inboxes.pop(request_id, None)
                self._stops.discard(request_id)
        if inbox is not None:
            inbox.put(Message(request_id, output, final, error))

    def poll_stop(self) -> set[int]:
        if not self._stops:
            return set()
        with self._lock:
            stops, self._stops = self._stops, set()
        return stops
