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
from typing import Any, Literal

import msgspec
import numpy as np
import zmq

from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.engine.responses import Response, refusal
from torchweave.serving.engine_client.admission_pacer import Turns
from torchweave.serving.engine_client.request_metrics import Counts, Traffic
from torchweave.serving.engine_client.request_stream import EngineGone, Flight
from torchweave.serving.ipc import messages, socket_stream
from torchweave.serving.ipc.shared_load import Ledger

State = Literal["starting", "ready", "failed", "stopped"]
Listener = Callable[[str, dict[str, Any]], None]
_LAST_SECONDS = 1.0  # for what an engine said last to be heard; one that has ended closes what it spoke through


@dataclass
class Side:
    """What the engine clients of one HTTP process share.

    Attributes:
        frontend: the number of this HTTP process.
        ledger: what every HTTP process has in flight.
        changed: set whenever something about an engine's `state`, or about what this process has in flight, has changed.
        turns: of requests, which hear of tokens that were given out.
        announce: called with what other HTTP processes have to know, one of `frontends/messages.py`.
    """

    frontend: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    turns: Turns = field(default_factory=Turns)
    announce: Callable[[Any], None] = lambda _: None

    @property
    def waits(self) -> bool:
        """Whether somebody in this process waits for tokens of any of the engines."""
        return self.ledger.has_requests(self.frontend)


class EngineClient(ABC):
    """Hands requests to an engine, and gives its outputs to those who wait for them.

    Args:
        place: which of the engines behind the server it is.
        side: this HTTP process.

    Attributes:
        state: `starting`, `ready`, `failed` or `stopped`.
        failure: why it failed, in one sentence.
        asked_too_much: the failure is that of what was asked: an option or the model cannot be.
        model: what is served, once ready.
        explanation: passes, graphs, plan, as `torchweave explain --json` shows them, once ready.
        restarts: how often the engine was started again.
        traffic: requests of this HTTP process and iterations of the engine, as they were seen here.
        traffic_elsewhere: requests of the other HTTP processes, as far as they have told.
    """

    def __init__(self, place: messages.Place, side: Side) -> None:
        self.place = place
        self.state: State = "stopped"
        self.failure = ""
        self.asked_too_much = False
        self.model: messages.ModelCard | None = None
        self.explanation: dict[str, Any] = {}
        self.restarts = 0
        self.traffic = Traffic()
        self.traffic_elsewhere: Sequence[Traffic] = ()
        self._side = side
        self._changed = side.changed
        self._ids = place.ids(side.frontend)
        self._flights: dict[int, Flight] = {}
        self._events: list[tuple[float, str, dict[str, Any]]] = []
        self._bars: dict[str, dict[str, Any]] = {}
        self._listeners: list[Listener] = []
        self._stats: dict[str, Any] = {}
        self._looked_up_before = (0, 0)  # in earlier lives of the engine, which counts from its own beginning
        self._to_engine: zmq.Socket[bytes] | None = None

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
        flight: Flight,
        prompt: np.ndarray,
        params: SamplingParams,
        streaming: bool,
        priority: int = 0,
        cache_salt: str = "",
        num_known: int = 0,
    ) -> int:
        """Hand in a request whose responses go to `flight`; returns its id.

        Args:
            num_known: tokens of the prompt that the engine has read before, as far as is known here.

        Raises:
            EngineGone: the engine is not ready.
            ValueError: the request holds what cannot be sent.
        """
        if self.state != "ready":
            raise EngineGone(self.failure or "The engine is starting; see /ready.")
        request = InferenceRequest(next(self._ids), prompt, params, streaming, priority, cache_salt)
        try:
            message = messages.encode(messages.submit(request))
        except (UnicodeEncodeError, OverflowError):
            sentence = "A text of the request holds half of a surrogate pair, or a number needs more than 64 bits; send others."
            raise ValueError(sentence) from None
        self._send_bytes(message)
        self._flights[request.id] = flight
        self.traffic.submitted(request.id, len(prompt), streaming, num_known)
        self._write_down()
        return request.id

    def cancel(self, ids: Sequence[int], whole: bool = False) -> None:
        """Ask that requests are stopped; those that are in flight still get their final response.

        Args:
            whole: their answers are: a stop string ended them.
        """
        known = [request_id for request_id in ids if request_id in self._flights]
        if whole:
            self.traffic.completed(known)
        if known:
            self._send(messages.Stop(known))

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Requests that were handed in and not yet answered for the last time, of all HTTP processes."""
        return self._side.ledger.requests(self.place.index)

    @property
    def num_waiting(self) -> int:
        """Requests in flight beyond those that a step can hold; negative: so many more it could hold."""
        return self.num_in_flight - (self.model.max_batch_size if self.model else 0)

    @property
    def unread(self) -> int:
        """Tokens of prompts that the engine was given and has not read."""
        return self._side.ledger.unread(self.place.index)

    @property
    def traffics(self) -> list[Traffic]:
        """Of this HTTP process, and of the others."""
        return [self.traffic, *self.traffic_elsewhere]

    @property
    def counts(self) -> Counts:
        """What was counted, over all HTTP processes."""
        return Counts.together([traffic.counts for traffic in self.traffics])

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the last iteration, with the batch manager's keys; empty before the first."""
        return self._stats

    @property
    def looked_up(self) -> tuple[int, int]:
        """Tokens of whole prompt blocks that were looked up among kept ones, and found, over all lives of the engine."""
        cache = self._stats.get("kvCacheStats", {})
        found, missed = (
            cache.get(name, 0) * cache.get("tokensPerBlock", 0) for name in ("reusedBlocks", "missedBlocks")
        )
        queries, hits = self._looked_up_before
        return queries + found + missed, hits + found

    @property
    def progress(self) -> list[dict[str, Any]]:
        """The latest of each long task of this start, oldest first: `title`, `done`, `total`, `note`, `at`."""
        return list(self._bars.values())

    @property
    def events(self) -> list[dict[str, Any]]:
        """All that was decided in this start: `at`, `event`, facts. Of `progress` events only the latest is kept."""
        return [{"at": at, "event": kind, **facts} for at, kind, facts in self._events]

    def listen(self, listener: Listener) -> None:
        """Call `listener(kind, facts)` for every later event of the engine, and for `engine_ended`: it has failed as it served."""
        self._listeners.append(listener)

    # -- what is said --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _sockets(self, addresses: messages.Addresses) -> Iterator[socket.socket]:
        """While inside, requests reach a life of the engine; what it says comes to what is yielded."""
        context = zmq.Context()
        self._to_engine = to_engine = context.socket(zmq.PUSH)
        from_engine = socket_stream.listen(addresses.from_engine(self._side.frontend))
        try:
            to_engine.setsockopt(zmq.SNDHWM, 0)
            to_engine.connect(addresses.to_engine)  # what is sent waits until the engine listens
            yield from_engine
        finally:
            self._to_engine = None
            to_engine.close(linger=0)
            from_engine.close()
            context.term()  # would wait for a socket that is open

    async def _hear_until(self, ended: asyncio.Future[None], from_engine: socket.socket) -> None:
        """Hear the engine until it has ended, and what it said last."""
        reading = asyncio.create_task(
            socket_stream.read(from_engine, lambda said: self._hear(messages.decode_from_engine(said)))
        )
        try:
            await asyncio.wait([ended, reading], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait([reading], timeout=_LAST_SECONDS)
            if not reading.done():
                return
            if (error := reading.exception()) is not None:
                self.failure = f"The engine process cannot be understood: {error}"
            else:
                await ended
        finally:
            reading.cancel()

    def _hear(self, message: msgspec.Struct) -> None:
        if isinstance(message, messages.Outputs):
            gone = message.failing or self.state != "ready"
            self._deliver_tokens(message.new_tokens())
            for response in message.responses():
                self._deliver(response, gone)
        elif isinstance(message, messages.Accepted):
            self._settle(message.id, message.refusal)
        elif isinstance(message, messages.Moved):
            self.traffic.moved(message.moves)
        elif isinstance(message, messages.Stats):
            self._stats = json.loads(message.record)
            self.traffic.iterated(message.iterations)
        elif isinstance(message, messages.Happened):
            self._note(message.at, message.kind, message.facts)
        elif isinstance(message, messages.Ready):
            self._open(message)
        elif isinstance(message, messages.Failed):
            self.failure, self.asked_too_much = message.why, message.asked
        self._write_down()
        if isinstance(message, messages.Outputs):  # and who was answered is not among those who wait
            self._side.turns.tokens_passed(more=self._side.waits)

    def _open(self, message: messages.Ready) -> None:
        self.model, self.explanation = message.model, json.loads(message.explanation)
        if self.state == "starting":
            self.state = "ready"
        self._changed.set()

    def _write_down(self) -> None:
        """For the other HTTP processes."""
        self._side.ledger.write(self.place.index, self._side.frontend, len(self._flights), self.traffic.unread)

    def _deliver_tokens(self, tokens: Iterable[tuple[int, int]]) -> None:
        flights, answered = self._flights, self.traffic.answered
        for token in tokens:
            flight = flights.get(token[0])
            if flight is not None:
                answered(token[0], 1, None)
                flight.hear(token)

    def _deliver(self, response: Response, gone: bool) -> None:
        flight = self._flights.get(response.id)
        if flight is None:
            return
        if response.final:
            del self._flights[response.id]
            self._changed.set()
        reason = (response.output.finish_reason or "error") if response.final else None
        self.traffic.answered(response.id, len(response.output.token_ids), reason)
        flight.hear(response, gone)

    def _settle(self, request_id: int, refusal: str) -> None:
        """The engine has said whether it can run a request."""
        flight = self._flights.pop(request_id, None) if refusal else self._flights.get(request_id)
        if refusal:
            self.traffic.refused(request_id)
            self._changed.set()
        if flight is not None:
            flight.accept(request_id, refusal)

    def _note(self, at: float, kind: str, facts: dict[str, Any]) -> None:
        if kind == "progress":
            self._bars[str(facts.get("title"))] = {**facts, "at": at}
        else:
            self._events.append((at, kind, facts))
        self.traffic.event(kind)
        self._tell(kind, facts)

    def _tell(self, kind: str, facts: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(kind, facts)

    def _refuse_all(self, why: str) -> None:
        flights, self._flights = self._flights, {}
        for request_id, flight in flights.items():
            self.traffic.answered(request_id, 0, "error")
            flight.hear(refusal(request_id, why), gone=True)
        self._write_down()
        self._changed.set()

    def _send(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(EngineGone):  # it runs nothing that could be stopped
            self._send_bytes(messages.encode(message))

    def _send_bytes(self, message: bytes) -> None:
        if self._to_engine is None:
            raise EngineGone(self.failure or "The engine is gone.")
        self._to_engine.send(message, zmq.NOBLOCK)
