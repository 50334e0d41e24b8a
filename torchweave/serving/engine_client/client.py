"""Client of one engine, for one event loop of an HTTP process: sends requests and delivers outputs.

`engine_supervisor.py` adds the engine's process, in the HTTP process that starts it; `replicas.py` joins several clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from torchweave.engine.control.errors import ControlError
from torchweave.engine.request import INVALID_LOGITS, InferenceRequest, Response, refusal
from torchweave.serving.engine_client.admission_pacer import AdmissionPacer
from torchweave.serving.engine_client.request_metrics import RequestMetrics, RequestMetricsData, ServingCounters
from torchweave.serving.engine_client.request_stream import EngineUnavailable, RequestStream
from torchweave.serving.ipc import messages, socket_stream
from torchweave.serving.ipc.shared_load import SharedLoad

Listener = Callable[[str, dict[str, Any]], None]
_DRAIN_SECONDS = 1.0  # to read the last messages of an engine that has ended


@dataclass
class FrontendContext:
    """State that the engine clients of one HTTP process share.

    Attributes:
        frontend: number of this HTTP process.
        life: of the HTTP process: how many had its number before.
        shared_load: requests in flight of every HTTP process.
        changed: set whenever an engine's `state` or the requests in flight of this process have changed.
        admission_pacer: notified of each step's tokens.
        announce: sends a message (see `frontends/messages.py`) to the other HTTP processes.
    """

    frontend: int = 0
    life: int = 0
    shared_load: SharedLoad = field(default_factory=SharedLoad)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    admission_pacer: AdmissionPacer = field(default_factory=AdmissionPacer)
    announce: Callable[[Any], None] = lambda _: None


class EngineClient(ABC):
    """Sends requests to an engine and delivers its outputs to their `RequestStream`s.

    Attributes:
        state: `starting`, `ready`, `failed` or `stopped`.
        failure: why it failed, in one sentence.
        is_config_error: an option or the model is invalid.
        model: set while the engine is ready.
        explanation: the data of `torchweave explain --json`, once ready.
        restarts: number of restarts of the engine.
        stats: statistics of the last iteration, with the batch manager's keys; empty before the first.
        request_metrics: requests of this HTTP process and iterations of the engine.
        remote_request_metrics: requests of the other HTTP processes, as of the last poll.
    """

    def __init__(self, replica_info: messages.ReplicaInfo, frontend_context: FrontendContext) -> None:
        self.replica_info = replica_info
        self.state: messages.State = "stopped"
        self.failure = ""
        self.is_config_error = False
        self.model: messages.ModelCard | None = None
        self.explanation: dict[str, Any] = {}
        self.restarts = 0
        self.request_metrics = RequestMetrics()
        self.remote_request_metrics: Sequence[RequestMetricsData] = ()
        self._frontend_context = frontend_context
        self._changed = frontend_context.changed
        self._ids = replica_info.ids(frontend_context.frontend, frontend_context.life)
        self._request_streams: dict[int, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_load = (0, 0)  # requests, prompt tokens to prefill
        self._silent_seconds = 0.0  # since the last message of the engine
        self._events: list[tuple[float, str, dict[str, Any]]] = []
        self._progress_bars: dict[str, dict[str, Any]] = {}
        self._listeners: list[Listener] = []
        self.stats: dict[str, Any] = {}
        self._prior_cache_tokens = (0, 0)  # of earlier processes of the engine, each of which counts from 0
        self._to_engine: socket_stream.Sender | None = None
        self._addresses: messages.Addresses | None = None  # of the process that runs

    # -- life cycle ----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def start(self) -> None:
        """Start the engine or the connection to it; returns at once."""

    @abstractmethod
    async def stop(self, at_once: bool = False) -> None:
        """End the engine or the connection to it; requests in flight get an error."""

    @property
    def alive(self) -> bool:
        """Whether the engine process runs, ready or starting."""
        return self.state in ("starting", "ready")

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, request_stream: RequestStream, request: InferenceRequest, num_cached_tokens: int = 0) -> int:
        """Submit a request under a new id, which is returned; its responses go to `request_stream`.

        Args:
            num_cached_tokens: prompt tokens that the engine's prefix cache probably holds.

        Raises:
            EngineUnavailable: the engine is not ready.
            ValueError: the request cannot be encoded.
        """
        if self.state != "ready":
            raise EngineUnavailable(self.failure or "The engine is starting; see /ready.")
        request = replace(request, id=next(self._ids))
        try:
            message = messages.encode(messages.submit(request))
        except (UnicodeEncodeError, OverflowError):
            raise ValueError(
                "The request contains half of a surrogate pair, or a number of more than 64 bits; send valid Unicode and "
                "smaller numbers."
            ) from None
        self._send_bytes(message)
        self._request_streams[request.id] = request_stream
        self.request_metrics.submitted(request.id, len(request.input_ids), request.streaming, num_cached_tokens)
        self._publish_load()
        return request.id

    def cancel(self, ids: Sequence[int], by_stop_string: bool = False) -> None:
        """Cancel requests; those in flight still get their final response.

        Args:
            by_stop_string: a stop string completed their answers.
        """
        in_flight = [request_id for request_id in ids if request_id in self._request_streams]
        if by_stop_string:
            self.request_metrics.stopped_by_string(in_flight)
        if in_flight:
            self._send(messages.Stop(in_flight))

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Run a control call in the engine; returns its result.

        Raises:
            ControlError: the call failed.
            EngineUnavailable: the engine is not ready, or ended meanwhile.
        """
        if self.state != "ready":
            raise EngineUnavailable(self.failure or "The engine is starting; see /ready.")
        call_id = next(self._ids)
        self._calls[call_id] = future = asyncio.get_running_loop().create_future()
        try:
            self._send_bytes(messages.encode(messages.Call(call_id, name, arguments)))
            return await future
        finally:
            del self._calls[call_id]

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Unfinished requests of all HTTP processes."""
        return self._frontend_context.shared_load.requests(self.replica_info.index)

    @property
    def num_waiting(self) -> int:
        """Requests in flight minus the batch size; if negative, that many more requests fit in a step."""
        return self.num_in_flight - (self.model.max_batch_size if self.model else 0)

    @property
    def pending_prefill_tokens(self) -> int:
        """Prompt tokens of submitted requests that the engine has not prefilled."""
        return self._frontend_context.shared_load.pending_prefill_tokens(self.replica_info.index)

    @property
    def all_request_metrics(self) -> list[RequestMetricsData]:
        """Request metrics of all HTTP processes."""
        return [self.request_metrics, *self.remote_request_metrics]

    @property
    def counts(self) -> ServingCounters:
        """Counters summed over all HTTP processes."""
        return ServingCounters.merge([request_metrics.counts for request_metrics in self.all_request_metrics])

    @property
    def prefix_cache_tokens(self) -> tuple[int, int]:
        """Tokens of full prompt blocks that were looked up in the prefix cache, and hits, over all restarts."""
        cache = self.stats.get("kvCacheStats", {})
        hits, misses = (
            cache.get(name, 0) * cache.get("tokensPerBlock", 0) for name in ("reusedBlocks", "missedBlocks")
        )
        prior_queries, prior_hits = self._prior_cache_tokens
        return prior_queries + hits + misses, prior_hits + hits

    @property
    def progress(self) -> list[dict[str, Any]]:
        """Latest progress event of each long task of this start, oldest first: `title`, `done`, `total`, `note`, `at`."""
        return list(self._progress_bars.values())

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events of this start without `progress`: `at`, `event` and their fields."""
        return [{"at": at, "event": kind, **facts} for at, kind, facts in self._events]

    def listen(self, listener: Listener) -> None:
        """Call `listener(kind, facts)` for every later event of the engine, and for `engine_ended`, its failure while ready."""
        self._listeners.append(listener)

    @property
    def state_message(self) -> messages.EngineStateChanged:
        """The state, for the other HTTP processes."""
        return messages.EngineStateChanged(self.replica_info.index, self.state, self.failure, self.restarts, self.model)

    def replace_frontend(self, frontend: int, life: int) -> list[messages.EngineStarted | messages.EngineStateChanged]:
        """Stop the requests of an HTTP process that has ended; returns what the next one of its number has to know."""
        index = self.replica_info.index
        self._frontend_context.shared_load.write(index, frontend, 0, 0)
        self._send(messages.FrontendEnded(frontend, next(self.replica_info.ids(frontend, life))))
        started = [] if self._addresses is None else [messages.EngineStarted(index, self._addresses)]
        return [*started, self.state_message]

    # -- messages ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _open_sockets(self, addresses: messages.Addresses) -> Iterator[socket.socket]:
        """Connect to an engine process for the duration of the context; yields the socket for its messages."""
        with socket_stream.listen(addresses.from_engine(self._frontend_context.frontend)) as from_engine:
            self._to_engine = to_engine = socket_stream.Sender(addresses.to_engine)
            self._addresses = addresses
            try:
                yield from_engine
            finally:
                self._to_engine = self._addresses = None
                to_engine.close(0)

    async def _read_messages_until(self, process_exit: asyncio.Future[None], from_engine: socket.socket) -> None:
        """Read the engine's messages until the process has ended, including the last ones."""
        reading = asyncio.create_task(
            socket_stream.read(from_engine, lambda message: self._on_message(messages.decode_from_engine(message)))
        )
        try:
            await asyncio.wait([process_exit, reading], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait([reading], timeout=_DRAIN_SECONDS)
            if not reading.done():
                return
            if (error := reading.exception()) is not None:
                self.failure = f"A message of the engine process could not be handled: {error}"
            else:
                await process_exit
        finally:
            reading.cancel()

    def _on_message(self, message: msgspec.Struct) -> None:
        self._silent_seconds = 0.0
        if isinstance(message, messages.Outputs):
            engine_failing = message.failing or self.state != "ready"
            self._deliver_tokens(message.new_tokens())
            for response in message.others:
                self._deliver(response, engine_failing)
        elif isinstance(message, messages.Accepted):
            self._on_accepted(message.id, message.refusal)
        elif isinstance(message, messages.RequestStateChanges):
            self.request_metrics.state_changed(message.moves)
        elif isinstance(message, messages.Stats):
            self.stats = json.loads(message.record)
            self.request_metrics.iterations_finished(message.iterations)
        elif isinstance(message, messages.EngineEvent):
            self._record_event(message.at, message.kind, message.facts)
        elif isinstance(message, messages.Ready):
            self._on_ready(message)
        elif isinstance(message, messages.Answer):
            self._on_answer(message)
        elif isinstance(message, messages.Failed):
            self.failure, self.is_config_error = message.why, message.is_config_error
        load = len(self._request_streams), self.request_metrics.pending_prefill_tokens
        if load != self._last_load:
            self._publish_load()
        if isinstance(message, messages.Outputs):  # after finished requests have left the counters
            context = self._frontend_context
            more = bool(self._request_streams) or context.shared_load.has_requests(context.frontend)
            context.admission_pacer.on_step_tokens(more)

    def _on_ready(self, message: messages.Ready) -> None:
        self.model, self.explanation = message.model, json.loads(message.explanation)
        if self.state == "starting":
            self.state = "ready"
        self._changed.set()

    def _publish_load(self) -> None:
        """Update the counters that the other HTTP processes read."""
        context = self._frontend_context
        self._last_load = len(self._request_streams), self.request_metrics.pending_prefill_tokens
        context.shared_load.write(self.replica_info.index, context.frontend, *self._last_load)

    def _deliver_tokens(self, tokens: Iterable[tuple[int, int]]) -> None:
        request_streams, response_received = self._request_streams, self.request_metrics.response_received
        for token in tokens:
            request_stream = request_streams.get(token[0])
            if request_stream is not None:
                response_received(token[0], 1, None)
                request_stream.on_output(token)

    def _deliver(self, response: Response, engine_failing: bool) -> None:
        request_stream = self._request_streams.get(response.id)
        if request_stream is None:
            return
        if response.final:
            del self._request_streams[response.id]
            self._changed.set()
        reason = (response.output.finish_reason or "error") if response.final else None
        self.request_metrics.counts.invalid_logits += response.error == INVALID_LOGITS
        self.request_metrics.response_received(response.id, len(response.output.token_ids), reason)
        request_stream.on_output(response, engine_failing)

    def _on_accepted(self, request_id: int, refusal: str) -> None:
        """Deliver the engine's acceptance or refusal of a request."""
        request_stream = (
            self._request_streams.pop(request_id, None) if refusal else self._request_streams.get(request_id)
        )
        if refusal:
            self.request_metrics.refused(request_id)
            self._changed.set()
        if request_stream is not None:
            request_stream.on_accepted(request_id, refusal)

    def _on_answer(self, answer: messages.Answer) -> None:
        call = self._calls.get(answer.id)
        if call is None or call.done():  # nobody waits for it any more
            return
        if answer.fault is None:
            call.set_result(answer.result)
        else:
            call.set_exception(ControlError(*answer.fault))

    def _record_event(self, at: float, kind: str, facts: dict[str, Any]) -> None:
        if kind == "progress":
            self._progress_bars[str(facts.get("title"))] = {**facts, "at": at}
        else:
            self._events.append((at, kind, facts))
        self.request_metrics.counts.compiles_after_ready += kind == "compile_after_ready"
        self._notify_listeners(kind, facts)

    def _notify_listeners(self, kind: str, facts: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(kind, facts)

    def _fail_all(self, why: str) -> None:
        request_streams, self._request_streams = self._request_streams, {}
        for request_id, request_stream in request_streams.items():
            self.request_metrics.response_received(request_id, 0, "error")
            request_stream.on_output(refusal(request_id, why), engine_failing=True)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineUnavailable(why))
        self._publish_load()
        self._changed.set()

    def _send(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(EngineUnavailable):  # it runs no requests that could be cancelled
            self._send_bytes(messages.encode(message))

    def _send_bytes(self, message: bytes) -> None:
        if self._to_engine is None:
            raise EngineUnavailable(self.failure or "The engine has ended.")
        self._to_engine.send(message)
