"""One engine as an HTTP process sees it, for one event loop: what is asked of it, and what it says.

`own_engine.py` adds the engine's process, for the HTTP process that starts it; `replicas.py` makes one of several.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.engine.responses import Response, refusal
from torchweave.serving.engine_client.admission_pacer import AdmissionPacer
from torchweave.serving.engine_client.request_metrics import RequestMetrics, RequestMetricsData, ServingCounters
from torchweave.serving.engine_client.request_stream import EngineUnavailable, RequestStream
from torchweave.serving.ipc import messages, socket_stream
from torchweave.serving.ipc.shared_load import SharedLoad

Listener = Callable[[str, dict[str, Any]], None]
_DRAIN_SECONDS = 1.0  # for what an engine said last to be heard; one that has ended closes what it spoke through


@dataclass
class FrontendContext:
    """What the engine clients of one HTTP process share.

    Attributes:
        frontend: the number of this HTTP process.
        shared_load: what every HTTP process has in flight.
        changed: set whenever something about an engine's `state`, or about what this process has in flight, has changed.
        admission_pacer: of requests, which hear of tokens that were given out.
        announce: called with what other HTTP processes have to know, one of `frontends/messages.py`.
    """

    frontend: int = 0
    shared_load: SharedLoad = field(default_factory=SharedLoad)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    admission_pacer: AdmissionPacer = field(default_factory=AdmissionPacer)
    announce: Callable[[Any], None] = lambda _: None

    @property
    def has_requests(self) -> bool:
        """Whether somebody in this process waits for tokens of any of the engines."""
        return self.shared_load.has_requests(self.frontend)


class EngineClient(ABC):
    """Hands requests to an engine, and gives its outputs to those who wait for them.

    Args:
        replica_info: which of the engines behind the server it is.
        frontend_context: this HTTP process.

    Attributes:
        state: `starting`, `ready`, `failed` or `stopped`.
        failure: why it failed, in one sentence.
        is_config_error: the failure is that of what was asked: an option or the model cannot be.
        model: what is served, once ready.
        explanation: passes, graphs, plan, as `torchweave explain --json` shows them, once ready.
        restarts: how often the engine was started again.
        request_metrics: requests of this HTTP process and iterations of the engine, as they were seen here.
        remote_request_metrics: requests of the other HTTP processes, as far as they have told.
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
        self._ids = replica_info.ids(frontend_context.frontend)
        self._request_streams: dict[int, RequestStream] = {}
        self._events: list[tuple[float, str, dict[str, Any]]] = []
        self._progress_bars: dict[str, dict[str, Any]] = {}
        self._listeners: list[Listener] = []
        self._stats: dict[str, Any] = {}
        self._prior_cache_tokens = (0, 0)  # in earlier lives of the engine, which counts from its own beginning
        self._to_engine: socket_stream.Sender | None = None

    # -- its life ------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def start(self) -> None:
        """See to it that the engine will be there; returns at once."""

    @abstractmethod
    async def stop(self, at_once: bool = False) -> None:
        """Have done with the engine; requests in flight are answered with an error."""

    @property
    def alive(self) -> bool:
        """Whether the engine process is there, ready or starting."""
        return self.state in ("starting", "ready")

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        request_stream: RequestStream,
        prompt: np.ndarray,
        params: SamplingParams,
        streaming: bool,
        priority: int = 0,
        cache_salt: str = "",
        num_cached_tokens: int = 0,
    ) -> int:
        """Hand in a request whose responses go to `request_stream`; returns its id.

        Args:
            num_cached_tokens: tokens of the prompt that the engine has read before, as far as is known here.

        Raises:
            EngineUnavailable: the engine is not ready.
            ValueError: the request holds what cannot be sent.
        """
        if self.state != "ready":
            raise EngineUnavailable(self.failure or "The engine is starting; see /ready.")
        request = InferenceRequest(next(self._ids), prompt, params, streaming, priority, cache_salt)
        try:
            message = messages.encode(messages.submit(request))
        except (UnicodeEncodeError, OverflowError):
            sentence = "A text of the request holds half of a surrogate pair, or a number needs more than 64 bits; send others."
            raise ValueError(sentence) from None
        self._send_bytes(message)
        self._request_streams[request.id] = request_stream
        self.request_metrics.submitted(request.id, len(prompt), streaming, num_cached_tokens)
        self._publish_load()
        return request.id

    def cancel(self, ids: Sequence[int], by_stop_string: bool = False) -> None:
        """Ask that requests are stopped; those that are in flight still get their final response.

        Args:
            by_stop_string: their answers are: a stop string ended them.
        """
        known = [request_id for request_id in ids if request_id in self._request_streams]
        if by_stop_string:
            self.request_metrics.stopped_by_string(known)
        if known:
            self._send(messages.Stop(known))

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Requests that were handed in and not yet answered for the last time, of all HTTP processes."""
        return self._frontend_context.shared_load.requests(self.replica_info.index)

    @property
    def num_waiting(self) -> int:
        """Requests in flight beyond those that a step can hold; negative: so many more it could hold."""
        return self.num_in_flight - (self.model.max_batch_size if self.model else 0)

    @property
    def pending_prefill_tokens(self) -> int:
        """Tokens of prompts that the engine was given and has not read."""
        return self._frontend_context.shared_load.pending_prefill_tokens(self.replica_info.index)

    @property
    def all_request_metrics(self) -> list[RequestMetricsData]:
        """Of this HTTP process, and of the others."""
        return [self.request_metrics, *self.remote_request_metrics]

    @property
    def counts(self) -> ServingCounters:
        """What was counted, over all HTTP processes."""
        return ServingCounters.merge([request_metrics.counts for request_metrics in self.all_request_metrics])

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the last iteration, with the batch manager's keys; empty before the first."""
        return self._stats

    @property
    def prefix_cache_tokens(self) -> tuple[int, int]:
        """Tokens of whole prompt blocks that were looked up among kept ones, and found, over all lives of the engine."""
        cache = self._stats.get("kvCacheStats", {})
        found, missed = (
            cache.get(name, 0) * cache.get("tokensPerBlock", 0) for name in ("reusedBlocks", "missedBlocks")
        )
        queries, hits = self._prior_cache_tokens
        return queries + found + missed, hits + found

    @property
    def progress(self) -> list[dict[str, Any]]:
        """The latest of each long task of this start, oldest first: `title`, `done`, `total`, `note`, `at`."""
        return list(self._progress_bars.values())

    @property
    def events(self) -> list[dict[str, Any]]:
        """All that was decided in this start: `at`, `event`, facts. Of `progress` events only the latest is kept."""
        return [{"at": at, "event": kind, **facts} for at, kind, facts in self._events]

    def listen(self, listener: Listener) -> None:
        """Call `listener(kind, facts)` for every later event of the engine, and for `engine_ended`: it has failed as it served."""
        self._listeners.append(listener)

    # -- what is said --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _open_sockets(self, addresses: messages.Addresses) -> Iterator[socket.socket]:
        """While inside, requests reach a life of the engine; what it says comes to what is yielded."""
        with socket_stream.listen(addresses.from_engine(self._frontend_context.frontend)) as from_engine:
            self._to_engine = to_engine = socket_stream.Sender(addresses.to_engine)
            try:
                yield from_engine
            finally:
                self._to_engine = None
                to_engine.close(0)

    async def _read_messages_until(self, process_exit: asyncio.Future[None], from_engine: socket.socket) -> None:
        """Hear the engine until it has ended, and what it said last."""
        reading = asyncio.create_task(
            socket_stream.read(from_engine, lambda said: self._on_message(messages.decode_from_engine(said)))
        )
        try:
            await asyncio.wait([process_exit, reading], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait([reading], timeout=_DRAIN_SECONDS)
            if not reading.done():
                return
            if (error := reading.exception()) is not None:
                self.failure = f"The engine process cannot be understood: {error}"
            else:
                await process_exit
        finally:
            reading.cancel()

    def _on_message(self, message: msgspec.Struct) -> None:
        if isinstance(message, messages.Outputs):
            engine_failing = message.failing or self.state != "ready"
            self._deliver_tokens(message.new_tokens())
            for response in message.responses():
                self._deliver(response, engine_failing)
        elif isinstance(message, messages.Accepted):
            self._on_accepted(message.id, message.refusal)
        elif isinstance(message, messages.RequestStateChanges):
            self.request_metrics.state_changed(message.moves)
        elif isinstance(message, messages.Stats):
            self._stats = json.loads(message.record)
            self.request_metrics.iterations_finished(message.iterations)
        elif isinstance(message, messages.EngineEvent):
            self._record_event(message.at, message.kind, message.facts)
        elif isinstance(message, messages.Ready):
            self._on_ready(message)
        elif isinstance(message, messages.Failed):
            self.failure, self.is_config_error = message.why, message.is_config_error
        self._publish_load()
        if isinstance(message, messages.Outputs):  # and who was answered is not among those who wait
            self._frontend_context.admission_pacer.on_step_tokens(more=self._frontend_context.has_requests)

    def _on_ready(self, message: messages.Ready) -> None:
        self.model, self.explanation = message.model, json.loads(message.explanation)
        if self.state == "starting":
            self.state = "ready"
        self._changed.set()

    def _publish_load(self) -> None:
        """For the other HTTP processes."""
        self._frontend_context.shared_load.write(
            self.replica_info.index,
            self._frontend_context.frontend,
            len(self._request_streams),
            self.request_metrics.pending_prefill_tokens,
        )

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
        self.request_metrics.response_received(response.id, len(response.output.token_ids), reason)
        request_stream.on_output(response, engine_failing)

    def _on_accepted(self, request_id: int, refusal: str) -> None:
        """The engine has said whether it can run a request."""
        request_stream = (
            self._request_streams.pop(request_id, None) if refusal else self._request_streams.get(request_id)
        )
        if refusal:
            self.request_metrics.refused(request_id)
            self._changed.set()
        if request_stream is not None:
            request_stream.on_accepted(request_id, refusal)

    def _record_event(self, at: float, kind: str, facts: dict[str, Any]) -> None:
        if kind == "progress":
            self._progress_bars[str(facts.get("title"))] = {**facts, "at": at}
        else:
            self._events.append((at, kind, facts))
        self.request_metrics.event(kind)
        self._notify_listeners(kind, facts)

    def _notify_listeners(self, kind: str, facts: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(kind, facts)

    def _fail_all(self, why: str) -> None:
        request_streams, self._request_streams = self._request_streams, {}
        for request_id, request_stream in request_streams.items():
            self.request_metrics.response_received(request_id, 0, "error")
            request_stream.on_output(refusal(request_id, why), engine_failing=True)
        self._publish_load()
        self._changed.set()

    def _send(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(EngineUnavailable):  # it runs nothing that could be stopped
            self._send_bytes(messages.encode(message))

    def _send_bytes(self, message: bytes) -> None:
        if self._to_engine is None:
            raise EngineUnavailable(self.failure or "The engine is gone.")
        self._to_engine.send(message)
