"""The engines behind one server, one or several replicas of a model, with one interface.

replicas = create_replicas(config, count=2)
await replicas.start()
with replicas.request_stream() as request_stream: ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from torchweave.config.options import EngineConfig
from torchweave.engine.control.errors import fault_of, joined
from torchweave.engine.request import InferenceRequest
from torchweave.serving.engine_client.client import EngineClient, FrontendContext, Listener
from torchweave.serving.engine_client.load_balancer import Load, LoadBalancer
from torchweave.serving.engine_client.request_stream import EngineUnavailable, RequestStream
from torchweave.serving.ipc.messages import EngineStarted, EngineStateChanged, ModelCard, PromptRouted, State


class Replicas:
    """Routes each request to one of several engines, and serves as long as one of them does.

    Args:
        config: of each engine.
        engines: by number.
        frontend_context: the engines' context.
        opened: all engines have been ready before, in an earlier HTTP process: one that has failed is no failure of the start.
    """

    def __init__(
        self,
        config: EngineConfig,
        engines: Sequence[EngineClient],
        frontend_context: FrontendContext,
        opened: bool = False,
    ) -> None:
        self.config = config
        self.engines = tuple(engines)
        self.admission_pacer = frontend_context.admission_pacer
        self._changed = frontend_context.changed
        self._load_balancer = LoadBalancer(
            config.enable_prefix_caching, lambda routed: frontend_context.announce(routed), frontend_context.shared_load
        )
        self._opened = opened

    # -- life cycle ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all engines; returns at once, see `wait_until_ready`."""
        for engine in self.engines:
            await engine.start()

    async def wait_until_ready(self) -> None:
        """Wait until all engines take requests.

        Raises:
            ValueError: an option or the model is invalid; the message says why and what to do.
            EngineUnavailable: an engine failed or was stopped.
        """
        await self.wait_for(lambda: self.state != "starting")
        if self.state != "ready":
            config_errors = [engine.failure for engine in self.engines if engine.is_config_error]
            raise ValueError(config_errors[0]) if config_errors else EngineUnavailable(self.failure)
        self._opened = True

    async def wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition on `state` or `num_in_flight` holds."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def stop(self, at_once: bool = False) -> None:
        """End all engines (`at_once`: kill them); requests in flight get an error."""
        await asyncio.gather(*(engine.stop(at_once) for engine in self.engines))

    @property
    def state(self) -> State:
        """Worst state of the engines until all were ready; then the best."""
        states = {engine.state for engine in self.engines}
        order: tuple[State, ...] = ("failed", "stopped", "starting", "ready")
        if self._opened:
            order = ("ready", "starting", "stopped", "failed")
        return next(state for state in order if state in states)

    @property
    def alive(self) -> bool:
        """Whether an engine is ready or starting."""
        return self.state in ("starting", "ready")

    @property
    def failure(self) -> str:
        """Why engines failed or were stopped; empty while all run."""
        failed = [engine for engine in self.engines if engine.state == "failed"] or self.engines
        reasons = {engine.failure for engine in failed}
        if len(reasons) == 1 and len(failed) == len(self.engines):
            return reasons.pop()
        return " ".join(f"Replica {engine.replica_info.index}: {engine.failure}" for engine in failed if engine.failure)

    # -- requests ------------------------------------------------------------------------------------------------------

    def request_stream(self) -> RequestStream:
        return RequestStream(self)

    def submit(self, request_stream: RequestStream, request: InferenceRequest) -> int:
        """Submit a request whose responses go to `request_stream`; returns its id.

        Raises:
            EngineUnavailable: no engine is ready.
            ValueError: the request cannot be encoded.
        """
        engine, num_cached_tokens = self.engines[0], 0
        if len(self.engines) > 1:
            if not (loads := [_load(each) for each in self._ready]):
                raise EngineUnavailable(self.failure or "The engines are starting; see /ready.")
            number, num_cached_tokens = self._load_balancer.choose(
                request.input_ids, request.adapter + request.cache_salt, loads
            )
            engine = self.engines[number]
        return engine.submit(request_stream, request, num_cached_tokens)

    def clear_prefixes(self, replicas: Sequence[int]) -> None:
        """Count no prefix as cached by these engines."""
        self._load_balancer.clear_histories(replicas)

    def replace_frontend(self, frontend: int, life: int) -> list[EngineStarted | EngineStateChanged]:
        """Stop the requests of an HTTP process that has ended; returns what the next one of its number has to know."""
        return [message for engine in self.engines for message in engine.replace_frontend(frontend, life)]

    def on_prompt_routed(self, routed: PromptRouted) -> None:
        """Record that another HTTP process sent a prompt to an engine."""
        self._load_balancer.on_prompt_routed(routed)

    def cancel(self, ids: Sequence[int], by_stop_string: bool = False) -> None:
        """Cancel requests; those in flight still get their final response.

        Args:
            by_stop_string: a stop string completed their answers.
        """
        for engine in self.engines:
            engine.cancel(ids, by_stop_string)

    async def call(self, name: str, arguments: dict[str, Any]) -> list[Any]:
        """Run a control call in all engines; returns the results by replica.

        Raises:
            ControlError: the call failed in an engine, which the message names if there are several; all have answered.
            EngineUnavailable: the only engine is not ready, or ended meanwhile.
        """
        calls = (engine.call(name, arguments) for engine in self.engines)
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = {number: result for number, result in enumerate(results) if isinstance(result, BaseException)}
        if errors and (len(results) == 1 or not all(isinstance(error, Exception) for error in errors.values())):
            raise next(iter(errors.values()))
        if errors:
            faults = {f"Replica {number}": fault_of(error) for number, error in errors.items()}  # type: ignore[arg-type]
            raise joined(faults)
        return list(results)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelCard | None:
        """The served model, with the smallest `max_model_len` of the ready engines; None while none is ready."""
        cards = [engine.model for engine in self.engines if engine.model is not None]
        return min(cards, key=lambda card: card.max_model_len, default=None)

    @property
    def num_in_flight(self) -> int:
        """Unfinished requests of all engines."""
        return sum(engine.num_in_flight for engine in self.engines)

    @property
    def num_waiting(self) -> int:
        """Requests in flight beyond the batch size of their engine."""
        return sum(max(engine.num_waiting, 0) for engine in self._ready)

    @property
    def num_free(self) -> int:
        """Free places in the batches of the ready engines."""
        return sum(max(-engine.num_waiting, 0) for engine in self._ready)

    @property
    def progress(self) -> list[dict[str, Any]]:
        """Latest progress event of each task of the engines' starts, see `EngineClient.progress`; with several, `replica`."""
        return [self._numbered(engine, bar) for engine in self.engines for bar in engine.progress]

    def listen(self, listener: Listener) -> None:
        """Call `listener(kind, facts)` for every later event of the engines; with several, `facts` has `replica`."""
        for engine in self.engines:
            engine.listen(lambda kind, facts, engine=engine: listener(kind, self._numbered(engine, facts)))

    def _numbered(self, engine: EngineClient, facts: dict[str, Any]) -> dict[str, Any]:
        return facts if len(self.engines) == 1 else {"replica": engine.replica_info.index, **facts}

    @property
    def _ready(self) -> list[EngineClient]:
        return [engine for engine in self.engines if engine.state == "ready"]


def _load(engine: EngineClient) -> Load:
    card = engine.model
    cache = card.num_kv_blocks * card.block_size if card is not None else 0
    return Load(
        replica=engine.replica_info.index,
        num_restarts=engine.restarts,
        num_requests=engine.num_in_flight,
        pending_prefill_tokens=engine.pending_prefill_tokens,
        is_full=engine.num_waiting >= 0,
        cache_tokens=cache,
    )
