"""The engine in a process of its own: requests in by one socket, everything that it says out by another.

Three threads: this one builds the engine and then reads requests; the batch manager's runs the loop; the outbox's turns what
the loop says into messages, while the loop waits for the device. All of them wait for something that wakes them: an engine
without requests costs nothing.
"""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import multiprocessing
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

import msgspec
import numpy as np
import zmq

from torchweave.compile.dump import open_dump
from torchweave.compile.explanation.facts import as_json, explain
from torchweave.compile.explanation.page import keep_explanation
from torchweave.config import EngineConfig
from torchweave.engine.batch import Response
from torchweave.engine.batch_manager import BatchManager
from torchweave.engine.build import Engine, build
from torchweave.engine.request import InferenceRequest, Output
from torchweave.log import Report
from torchweave.serving import wire

STATS_SECONDS = 0.2
"""Between two statistics that are sent."""
_FLUSH_SECONDS = 2.0  # for what was said last to reach the other process


def main(config: EngineConfig, addresses: wire.Addresses) -> None:
    """Build the engine that `config` asks for and run it until the HTTP process ends it, or ends."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    for name in ("transformers", "torch"):  # their advice on start-up is not for whoever runs a server
        logging.getLogger(name).setLevel(logging.ERROR)
    outbox = Outbox(addresses.from_engine)
    report = Report(show=False)
    report.listen(lambda kind, facts: outbox.put(wire.Happened(report.seconds(), kind, facts)))
    try:
        open_dump(config.torch_compile_config, report)
        engine = build(config, report)
    except ValueError as error:
        outbox.put(wire.Failed(str(error), asked=True))
        outbox.close()
        return
    except Exception as error:
        traceback.print_exc()
        outbox.put(wire.Failed(f"The engine could not be built: {type(error).__name__}: {error}", asked=False))
        outbox.close()
        return
    _serve(engine, config, addresses, outbox)


def _follow_parent() -> None:
    """End at once when the HTTP process has ended, however it did."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _serve(engine: Engine, config: EngineConfig, addresses: wire.Addresses, outbox: Outbox) -> None:
    report = engine.report
    inbox = Inbox()
    manager = BatchManager(
        engine.batch,
        engine.runner,
        inbox.get_requests,
        outbox.send_response,
        inbox.poll_stop,
        outbox.return_stats,
        run_ahead=engine.plan.run_ahead,
        seed=config.seed,
    )
    outbox.look = lambda: _live(engine, inbox)
    threading.Thread(target=_follow_manager, args=(manager, outbox), daemon=True).start()
    report.event("ready")
    keep_explanation(engine.plan, report)
    outbox.put(wire.Ready(_card(engine), as_json(explain(engine.plan, report))))
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(addresses.to_engine)
    while True:
        message = wire.decode_to_engine(socket.recv())
        if isinstance(message, wire.Submit):
            _take(message, engine, inbox, outbox)
        elif isinstance(message, wire.Stop):
            for request_id in inbox.stop(message.ids):
                outbox.send_response(request_id, Output(np.empty(0, np.int32), "cancelled"), True, "")
        else:
            manager.shutdown(drain=False)
            outbox.close()
            return
        manager.wake()


def _take(message: wire.Submit, engine: Engine, inbox: Inbox, outbox: Outbox) -> None:
    """Queue a request, or say at once why it can never run."""
    try:
        request = wire.request_of(message)
        why = engine.batch.why_not(request)
    except ValueError as error:
        why = str(error)
        request = None
    if request is None or why:
        outbox.put(wire.Outputs([wire.Said(message.id, b"", "error", True, why, refused=True)]))
        return
    outbox.put(wire.Accepted(message.id))
    inbox.add(request)


def _follow_manager(manager: BatchManager, outbox: Outbox) -> None:
    """End the process when the loop has failed: the HTTP process sees it at once, and nothing of a broken device is left."""
    manager.join()
    if manager.failure is not None:
        outbox.put(wire.Failed(f"The engine failed: {manager.failure}", asked=False))
        outbox.close()
        os._exit(1)


def _card(engine: Engine) -> wire.ModelCard:
    plan, loaded = engine.plan, engine.loaded
    return wire.ModelCard(
        name=loaded.name,
        folder=None if loaded.tokenizer is None else str(loaded.tokenizer.folder),
        architecture=loaded.architecture,
        dtype=plan.dtype,
        device=plan.device,
        quantization=plan.quantization,
        num_parameters=loaded.num_parameters,
        max_model_len=plan.max_model_len,
        max_batch_size=plan.max_batch_size,
        vocab_size=engine.batch.limits.vocab_size,
        num_kv_blocks=engine.batch.kv.num_blocks,
        temperature=loaded.generation.temperature,
        top_k=loaded.generation.top_k,
        top_p=loaded.generation.top_p,
        min_p=loaded.generation.min_p,
    )


def _live(engine: Engine, inbox: Inbox) -> dict[str, int]:
    """What holds now, of that which an iteration's record says of its own moment."""
    batch = engine.batch
    found = {"numQueuedRequests": batch.num_waiting + len(inbox)}
    if batch.num_active == 0:  # the last iteration counted those who left in it
        idle = ("Active Request Count", "Scheduled Requests", "Context Requests", "Generation Requests")
        found |= dict.fromkeys((*idle, "Total Context Tokens", "numActiveRequests"), 0)
        found |= {"Free KV cache blocks": batch.kv.num_free, "Used KV cache blocks": batch.kv.num_used}
    return found


class Inbox:
    """Requests that the batch manager has not taken yet, the highest priority first, and ids to stop. Of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, InferenceRequest]] = []
        self._stops: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: InferenceRequest) -> None:
        with self._lock:
            heapq.heappush(self._waiting, (-request.priority, next(self._arrivals), request))

    def stop(self, ids: Sequence[int]) -> list[int]:
        """Stop requests; returns those that the batch manager never heard of."""
        wanted = set(ids)
        with self._lock:
            here = {entry[2].id for entry in self._waiting} & wanted
            if here:
                self._waiting = [entry for entry in self._waiting if entry[2].id not in here]
                heapq.heapify(self._waiting)
            self._stops |= wanted - here
        return sorted(here)

    def get_requests(self, max_num: int) -> list[InferenceRequest]:
        if not self._waiting:
            return []
        with self._lock:
            count = len(self._waiting) if max_num < 0 else min(max_num, len(self._waiting))
            return [heapq.heappop(self._waiting)[2] for _ in range(count)]

    def poll_stop(self) -> set[int]:
        if not self._stops:
            return set()
        with self._lock:
            stops, self._stops = self._stops, set()
        return stops


class Outbox:
    """Sends what other threads put in, in order, several responses in one message; statistics at most every `STATS_SECONDS`.

    Attributes:
        look: what is laid over an iteration's record when it is sent.
    """

    def __init__(self, address: str) -> None:
        self.look: Callable[[], dict[str, Any]] = dict
        self._queue: queue.SimpleQueue[Response | msgspec.Struct | None] = queue.SimpleQueue()
        self._stats: str | None = None
        self._stats_sent = 0.0
        self._closed = False
        self._address = address
        self._thread = threading.Thread(target=self._main, name="torchweave-outbox", daemon=True)
        self._thread.start()

    def put(self, message: msgspec.Struct) -> None:
        self._queue.put(message)

    def send_response(self, request_id: int, output: Output, final: bool, error: str) -> None:
        self._queue.put(Response(request_id, output, final, error))

    def return_stats(self, record: str) -> None:
        is_first, self._stats = self._stats is None, record
        if is_first:
            self._queue.put(None)

    def close(self) -> None:
        """Send what is left, and end."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(_FLUSH_SECONDS)

    def _main(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, int(_FLUSH_SECONDS * 1000))
        socket.connect(self._address)
        while True:
            ends = self._closed
            for message in self._next():
                socket.send(wire.encode(message))
            if self._stats is not None and time.monotonic() - self._stats_sent >= STATS_SECONDS:
                record, self._stats = self._stats, None
                socket.send(wire.encode(wire.Stats(json.dumps(json.loads(record) | self.look()))))
                self._stats_sent = time.monotonic()
            if ends and self._queue.empty():
                socket.close()
                context.term()  # returns when all was sent
                return

    def _next(self) -> list[msgspec.Struct]:
        """Wait for something to send, or for the time of the statistics that wait; all there is, in order."""
        wait = None
        if self._stats is not None:
            wait = max(self._stats_sent + STATS_SECONDS - time.monotonic(), 0.0)
        try:
            items = [self._queue.get(timeout=wait)]
        except queue.Empty:
            return []
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        found: list[msgspec.Struct] = []
        for are_responses, group in itertools.groupby(items, lambda item: isinstance(item, Response)):
            if are_responses:
                found.append(wire.Outputs(wire.said(group)))  # type: ignore[arg-type]
            else:
                found += [item for item in group if item is not None]  # type: ignore[misc]
        return found
