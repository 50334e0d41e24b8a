"""One engine process as the HTTP process sees it, for one event loop; `replicas.py` makes one of several."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from torchweave import collector
from torchweave.config import EngineConfig
from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.engine.responses import Response, refusal
from torchweave.engine.waiting import waiting_ranks
from torchweave.serving import wire
from torchweave.serving.flight import EngineGone, Flight
from torchweave.serving.traffic import Traffic
from torchweave.serving.turns import Turns

State = Literal["starting", "ready", "failed", "stopped"]
Listener = Callable[[str, dict[str, Any]], None]

_END_SECONDS = 5.0  # for the engine process to end by itself


class EngineClient:
    """Starts the engine process, hands it requests, and gives its outputs to those who wait for them.

    Args:
        config: of the engine.
        restart: start the engine again when it fails after it was ready.
        place: which of the engines behind the server it is. Its requests have the numbers `index`, `index + count`, ...
        changed: set whenever something about `state` or `num_in_flight` has changed.
        turns: of requests, which hear of tokens that were given out.

    Attributes:
        state: `starting`, `ready`, `failed` or `stopped`.
        failure: why it failed, in one sentence.
        asked_too_much: the failure is that of what was asked: an option or the model cannot be.
        model: what is served, once ready.
        explanation: passes, graphs, plan, as `torchweave explain --json` shows them, once ready.
        restarts: how often the engine was started again.
        traffic: every request and iteration, as they were seen here.
    """

    def __init__(
        self,
        config: EngineConfig,
        restart: bool = False,
        place: wire.Place = wire.Place(),  # noqa: B008
        changed: asyncio.Event | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.config = config
        self.place = place
        self.state: State = "stopped"
        self.failure = ""
        self.asked_too_much = False
        self.model: wire.ModelCard | None = None
        self.explanation: dict[str, Any] = {}
        self.restarts = 0
        self.traffic = Traffic()
        self._restart = restart
        self._ids = itertools.count(place.index, place.count)
        self._flights: dict[int, Flight] = {}
        self._events: list[tuple[float, str, dict[str, Any]]] = []
        self._bars: dict[str, dict[str, Any]] = {}
        self._listeners: list[Listener] = []
        self._stats: dict[str, Any] = {}
        self._changed = asyncio.Event() if changed is None else changed
        self._turns = Turns() if turns is None else turns
        self._task: asyncio.Task[None] | None = None
        self._process: SpawnProcess | None = None
        self._to_engine: zmq.Socket[bytes] | None = None

    # -- its life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine process; returns at once."""
        assert self._task is None, "a client is started once"
        self.state = "starting"
        self._task = asyncio.create_task(self._live())

    async def stop(self) -> None:
        """End the engine process; requests in flight are answered with an error."""
        if self._task is None or self._task.done():
            return
        if self.state in ("starting", "ready"):
            self.state, self.failure = "stopped", "The server is shutting down."
        if self._process is not None and self._process.is_alive():
            if self.model is not None:
                self._send(wire.End())
            else:
                self._process.kill()
        done, _ = await asyncio.wait([self._task], timeout=_END_SECONDS)
        if not done and self._process is not None:
            self._process.kill()
        await self._task

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
            message = wire.encode(wire.submit(request))
        except (UnicodeEncodeError, OverflowError):
            sentence = "A text of the request holds half of a surrogate pair, or a number needs more than 64 bits; send others."
            raise ValueError(sentence) from None
        self._flights[request.id] = flight
        self.traffic.submitted(request.id, len(prompt), streaming, num_known)
        self._send_bytes(message)
        return request.id

    def cancel(self, ids: Sequence[int]) -> None:
        """Ask that requests are stopped; those that are in flight still get their final response."""
        known = [request_id for request_id in ids if request_id in self._flights]
        if known:
            self._send(wire.Stop(known))

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Requests that were handed in and not yet answered for the last time."""
        return len(self._flights)

    @property
    def num_waiting(self) -> int:
        """Requests in flight beyond those that a step can hold; negative: so many more it could hold."""
        return self.num_in_flight - (self.model.max_batch_size if self.model else 0)

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the last iteration, with the batch manager's keys; empty before the first."""
        return self._stats

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

    # -- the other process ---------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """From start to end, once or (with `restart`) again and again."""
        while self.state == "starting":
            async with contextlib.AsyncExitStack() as things:
                try:
                    await self._one_life(things)
                except Exception as error:
                    self.failure = f"The engine process could not be run: {type(error).__name__}: {error}"
                self._end_life()

    async def _one_life(self, things: contextlib.AsyncExitStack) -> None:
        """Until the engine process has ended; `things` closes what it was heard by."""
        folder = Path(tempfile.mkdtemp(prefix="torchweave-"))  # nobody else can enter it
        things.callback(shutil.rmtree, folder, ignore_errors=True)
        addresses = wire.Addresses(f"ipc://{folder}/to_engine", f"ipc://{folder}/from_engine")
        context = zmq.asyncio.Context()
        things.callback(context.term)  # would wait for a socket that is open
        self._to_engine = to_engine = zmq.Context.shadow(context).socket(zmq.PUSH)
        things.callback(to_engine.close, linger=0)
        to_engine.setsockopt(zmq.SNDHWM, 0)
        to_engine.bind(addresses.to_engine)
        from_engine = context.socket(zmq.PULL)
        things.callback(from_engine.close, linger=0)
        from_engine.setsockopt(zmq.RCVHWM, 0)
        from_engine.bind(addresses.from_engine)
        self._events.clear()
        self._bars.clear()
        self._stats = {}
        self._note(0.0, "progress", wire.PROCESS_BAR)
        self._process = _spawn(self.config, addresses, self.place)
        things.push_async_callback(asyncio.to_thread, _bury, self._process)
        ended = _ended(self._process)
        reading = asyncio.create_task(self._read(from_engine))
        await asyncio.wait([ended, reading], return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            self.failure = f"The engine process cannot be understood: {reading.exception()}"
        reading.cancel()
        while await from_engine.poll(0):  # what it said last
            self._hear(wire.decode_from_engine(await from_engine.recv()))

    def _end_life(self) -> None:
        """Who waits for the engine hears that it is gone, before its memory is; then `state` says whether there is another life."""
        self.model, self._to_engine = None, None
        why, was_ready = self.failure or "The engine process ended unexpectedly.", self.state == "ready"
        self._refuse_all(why)
        if was_ready and self._restart:
            self.restarts += 1
            self.state, self.failure = "starting", ""
        elif self.state != "stopped":
            self.state, self.failure = "failed", why
        if was_ready:
            self._tell("engine_ended", {"why": why, "restarts": self.state == "starting"})
        self._changed.set()

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._hear(wire.decode_from_engine(await socket.recv()))

    def _hear(self, message: msgspec.Struct) -> None:
        if isinstance(message, wire.Outputs):
            gone = message.failing or self.state != "ready"
            self._deliver_tokens(message.new_tokens())
            for response in message.responses():
                self._deliver(response, gone)
            self._turns.tokens_passed()
        elif isinstance(message, wire.Accepted):
            self._settle(message.id, message.refusal)
        elif isinstance(message, wire.Moved):
            self.traffic.moved(message.moves)
        elif isinstance(message, wire.Stats):
            self._stats = json.loads(message.record)
            self.traffic.iterated(message.iterations)
        elif isinstance(message, wire.Happened):
            self._note(message.at, message.kind, message.facts)
        elif isinstance(message, wire.Ready):
            self.model, self.explanation = message.model, json.loads(message.explanation)
            if self.state == "starting":
                self.state = "ready"
            self._changed.set()
        elif isinstance(message, wire.Failed):
            self.failure, self.asked_too_much = message.why, message.asked

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
        self._changed.set()

    def _send(self, message: msgspec.Struct) -> None:
        self._send_bytes(wire.encode(message))

    def _send_bytes(self, message: bytes) -> None:
        if self._to_engine is not None:
            with contextlib.suppress(zmq.Again):  # nobody is at the other end any more
                self._to_engine.send(message, zmq.NOBLOCK)


def _spawn(config: EngineConfig, addresses: wire.Addresses, place: wire.Place) -> SpawnProcess:
    """Start the engine process. It never sees Ctrl-C or a SIGTERM to the whole group: this process tells it when to end."""
    process = multiprocessing.get_context("spawn").Process(
        target=_run_engine, args=(config, addresses, place), name=f"torchweave-engine-{place.index}"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _run_engine(config: EngineConfig, addresses: wire.Addresses, place: wire.Place) -> None:
    with waiting_ranks(config, place.index) as waiting:
        with collector.for_good():
            from torchweave.serving.engine_process import main  # torch is imported in that process
        main(config, addresses, place, waiting)


def _bury(process: SpawnProcess) -> None:
    """Wait until all of a process is gone; the driver of a GPU takes its time."""
    process.kill()
    process.join()


def _ended(process: SpawnProcess) -> asyncio.Future[None]:
    """Done when the process has ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        loop.remove_reader(process.sentinel)
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(process.sentinel, tell)
    return ended
