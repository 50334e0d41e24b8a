"""The engine process: builds the engine, reads requests from one socket, and sends outputs to the HTTP processes' sockets.

The main thread builds the engine and then reads requests; the batch manager's thread runs the loop and sends outputs. Both block
while idle, so an engine without requests uses no CPU.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torchweave.compiler.dump import open_dump
from torchweave.compiler.explain.facts import as_json, explain
from torchweave.compiler.explain.page import save_explanation
from torchweave.config.options import EngineConfig
from torchweave.distributed.launchers.local import WorkerPool
from torchweave.engine.batch_manager import BatchManager
from torchweave.engine.control.errors import fault_of
from torchweave.engine.control.host import Host
from torchweave.engine.request import NO_TOKENS, InferenceRequest, Output, Response
from torchweave.engine.startup.build import Engine
from torchweave.engine.startup.open import open_engine, replica_config
from torchweave.report import Report
from torchweave.serving.ipc import messages as wire
from torchweave.serving.ipc.socket_stream import Sender, listen, receive

STATS_SECONDS = 0.2
"""Between two `Stats` messages."""
_FLUSH_SECONDS = 2.0  # for the last messages to be sent


def main(
    config: EngineConfig, addresses: wire.Addresses, replica_info: wire.ReplicaInfo, worker_pool: WorkerPool
) -> None:
    """Build the engine of `config` and run it until the HTTP process ends it.

    Args:
        worker_pool: the other ranks, see `open_engine`.
    """
    for name in ("transformers", "torch"):  # their start-up advice addresses developers, not operators
        logging.getLogger(name).setLevel(logging.ERROR)
    listening = listen(addresses.to_engine)
    outbox = Outbox(addresses, replica_info)
    report = Report(show=False)
    report.listen(lambda kind, facts: outbox.put(wire.EngineEvent(report.seconds(), kind, facts)))
    report.event("progress", **(wire.PROCESS_START_PROGRESS | {"done": 1, "note": ""}))
    try:
        if replica_info.count > 1:
            config = replica_config(config, replica_info.index, replica_info.count)
        open_dump(config.torch_compile_config, report)
        engine = open_engine(config, report, worker_pool=worker_pool)
    except Exception as error:
        is_config_error = isinstance(error, ValueError)
        if not is_config_error:
            traceback.print_exc()
        why = str(error) if is_config_error else f"The engine could not be built: {type(error).__name__}: {error}"
        outbox.put(wire.Failed(why, is_config_error))
        outbox.close()
        return
    _serve(engine, config, listening, outbox, replica_info)


def _serve(
    engine: Engine,
    config: EngineConfig,
    listening: socket.socket,
    outbox: Outbox,
    replica_info: wire.ReplicaInfo,
) -> None:
    report = engine.report
    inbox = Inbox()
    manager = BatchManager(
        engine.scheduler,
        engine.steps,
        inbox.get_requests,
        poll_stop=inbox.poll_stop,
        return_stats=lambda record: outbox.put(_stats(record, engine, manager)),
        send_responses=outbox.put,
        notify_state_changes=lambda moves: outbox.put(wire.RequestStateChanges(list(moves))),
        run_ahead=engine.plan.run_ahead,
        idle_seconds=None,
        stats_interval=STATS_SECONDS,
        seed=config.seed,
        call_ranks=engine.call_ranks,
    )
    outbox.is_failing = lambda: manager.failure is not None
    threading.Thread(target=_watch_manager, args=(manager, outbox), daemon=True).start()
    if engine.executor is not None:
        engine.executor.worker_group.on_failure(lambda failure: _report_failure_and_exit(outbox, failure))
    report.event("ready")
    save_explanation(engine.plan, report)
    outbox.put(wire.Ready(_model_card(engine), as_json(explain(engine.plan, report))))
    for message in map(wire.decode_to_engine, receive(listening)):
        if isinstance(message, wire.Submit):
            _accept_request(message, engine, inbox, outbox)
        elif isinstance(message, wire.Stop):
            for request_id in inbox.stop(message.ids):
                outbox.put([Response(request_id, Output(NO_TOKENS, "cancelled"), True)])
        elif isinstance(message, wire.Call):
            _call(message, manager, outbox)
            continue
        elif isinstance(message, wire.FrontendEnded):
            _stop_requests(message, manager, inbox, outbox, replica_info)
        elif isinstance(message, wire.Ping):
            outbox.put(wire.Pong())
            continue
        else:
            manager.shutdown(drain=False)
            engine.close()
            outbox.close()
            return
        manager.wake()


def _accept_request(message: wire.Submit, engine: Engine, inbox: Inbox, outbox: Outbox) -> None:
    """Queue a request, or reject it if it can never run."""
    try:
        request = wire.decode_request(message)
        why = engine.scheduler.rejection_reason(request)
    except ValueError as error:
        request, why = None, str(error)
    outbox.put(wire.Accepted(message.id, why))
    if request is not None and not why:
        inbox.add(request)


def _stop_requests(
    ended: wire.FrontendEnded, manager: BatchManager, inbox: Inbox, outbox: Outbox, replica_info: wire.ReplicaInfo
) -> None:
    """Stop the requests of an HTTP process that has ended, and send to the one that follows it."""

    def stop(host: Host) -> None:
        ids = (each for each in host.scheduler.request_ids if replica_info.frontend_of(each) == ended.frontend)
        inbox.stop([each for each in ids if each < ended.before])

    outbox.connect(ended.frontend)
    manager.run_on_loop(stop)


def _call(message: wire.Call, manager: BatchManager, outbox: Outbox) -> None:
    """Queue a control call, whose answer is sent when it has ended."""

    def send(future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, Exception):
            answer = wire.Answer(message.id, fault=fault_of(error))
        else:
            answer = wire.Answer(message.id, future.result())
        outbox.put(answer)

    manager.call(message.name, **message.arguments).add_done_callback(send)


def _watch_manager(manager: BatchManager, outbox: Outbox) -> None:
    """End the process when the loop has failed: the HTTP process notices at once, and no broken device state remains."""
    manager.join()
    if manager.failure is not None:
        _report_failure_and_exit(outbox, manager.failure)


def _report_failure_and_exit(outbox: Outbox, failure: BaseException) -> None:
    """Report a failure and end the process; the loop may hang in a step that never ends."""
    outbox.put(wire.Failed(f"The engine failed: {failure}", is_config_error=False))
    outbox.close()
    os._exit(1)


def _model_card(engine: Engine) -> wire.ModelCard:
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
        vocab_size=engine.scheduler.limits.vocab_size,
        num_kv_blocks=engine.scheduler.kv.num_blocks,
        block_size=plan.block_size,
        trust_remote_code=plan.config.trust_remote_code,
        images=engine.scheduler.image_limits,
        pooling=engine.scheduler.limits.pooling,
        max_new_tokens=loaded.generation.max_new_tokens,
        **{name: getattr(loaded.generation, name) for name in wire.GENERATION_DEFAULTS},
    )


def _stats(record: str, engine: Engine, manager: BatchManager) -> wire.Stats:
    """An iteration's record with the running requests after it: the record itself includes those that finished in it."""
    scheduler, iterations = engine.scheduler, manager.iterations
    now = json.loads(record) | {"numRunningRequests": scheduler.num_active - scheduler.num_waiting}
    return wire.Stats(json.dumps(now), [iterations.popleft() for _ in range(len(iterations))])


class Inbox:
    """Requests and cancellations that the batch manager has not taken yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[int, InferenceRequest] = {}
        self._stops: set[int] = set()

    def add(self, request: InferenceRequest) -> None:
        with self._lock:
            self._requests[request.id] = request

    def stop(self, ids: Sequence[int]) -> list[int]:
        """Cancel requests; returns those that the batch manager had not taken."""
        with self._lock:
            queued = [request_id for request_id in ids if self._requests.pop(request_id, None) is not None]
            self._stops |= set(ids) - set(queued)
        return queued

    def get_requests(self, _: int) -> list[InferenceRequest]:
        """Return all requests: the scheduler's waiting queue orders them by priority."""
        if not self._requests:
            return []
        with self._lock:
            requests, self._requests = list(self._requests.values()), {}
        return requests

    def poll_stop(self) -> set[int]:
        if not self._stops:
            return set()
        with self._lock:
            stops, self._stops = self._stops, set()
        return stops


class Outbox:
    """Sends messages and responses to the HTTP processes of their requests. Thread-safe.

    The calling thread sends: a sender thread would wait for the interpreter lock for 0.1 to 1 ms, which would delay every
    stream (decision 0101).

    Attributes:
        is_failing: whether errors in responses are those of the engine, which ends.
    """

    def __init__(self, addresses: wire.Addresses, replica_info: wire.ReplicaInfo) -> None:
        self.is_failing: Callable[[], bool] = bool
        self._addresses, self._replica_info = addresses, replica_info
        self._lock = threading.Lock()
        self._senders = [Sender(addresses.from_engine(frontend)) for frontend in range(replica_info.frontends)]

    def put(self, item: Sequence[Response] | wire.FromEngine) -> None:
        """Send an item without waiting for the readers; dropped after `close`."""
        with self._lock:
            for frontend, message in wire.messages(item, self._replica_info, self.is_failing()):
                self._senders[frontend].send(message)

    def connect(self, frontend: int) -> None:
        """Send what follows to a new HTTP process of this number."""
        with self._lock:
            self._senders[frontend].close(0)
            self._senders[frontend] = Sender(self._addresses.from_engine(frontend))

    def close(self) -> None:
        """Send the remaining messages, within `_FLUSH_SECONDS`."""
        until = time.monotonic() + _FLUSH_SECONDS
        with self._lock:
            for sender in self._senders:
                sender.close(max(until - time.monotonic(), 0.0))
