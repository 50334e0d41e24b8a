"""`AsyncLLM`: inference from an event loop, and `LLMEngine`: step by step, with the essential methods of vLLM's classes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from torchweave.config.engine_args import EngineArgs
from torchweave.config.options import EngineConfig
from torchweave.engine import pooling_methods
from torchweave.engine.client import AsyncInbox, CompletionStream, RequestLoop
from torchweave.engine.control.methods import adapter_arguments, as_user_error
from torchweave.engine.llm import LLM
from torchweave.engine.lora_request import LoRARequest
from torchweave.engine.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from torchweave.engine.prompts import Prompt
from torchweave.engine.request import RequestOutputKind, SamplingParams
from torchweave.report import Report

if TYPE_CHECKING:
    from torchweave.config.plan import Plan


class AsyncLLM:
    """An engine for coroutines, ready when the constructor returns. Leaving its `with` or `async with` block shuts it down.

    Args:
        model, report, disable_log_stats, options: see `LLM`.

    Raises:
        ValueError: the model or an option is not supported; the message says why and what to do.
    """

    def __init__(
        self, model: str, *, report: Report | None = None, disable_log_stats: bool = False, **options: Any
    ) -> None:
        self._init(LLM(model, report=report, disable_log_stats=disable_log_stats, **options))

    @classmethod
    def from_config(cls, config: EngineConfig, report: Report | None = None) -> AsyncLLM:
        """Create an engine from a config."""
        engine = cls.__new__(cls)
        engine._init(LLM.from_config(config, report))
        return engine

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """Create an engine from an object of options."""
        return cls(**engine_args.given())

    def _init(self, llm: LLM) -> None:
        self._llm = llm
        self._streams: dict[str, CompletionStream] = {}  # of the requests in flight, by their ids
        self._ids = itertools.count()

    def __repr__(self) -> str:
        return f"Async{self._llm!r}"

    @property
    def plan(self) -> Plan:
        """Every option as asked and as effective."""
        return self._llm.plan

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generate completions of a prompt; yields all of their text and tokens so far, whenever there are more.

        The `output_kind` of the parameters asks for new text and tokens only, or for one output at the end. The last output has
        `finished` set. Leaving the iterator early stops the request.

        Args:
            prompt, sampling_params: see `LLM.generate`.
            request_id: of the outputs, and for `abort`. None: one that no other request has.
            priority: requests with a higher priority start earlier; see `scheduling_policy`.
            lora_request: see `LLM.generate`.

        Raises:
            ValueError: the prompt, its parameters or its adapter are not supported, or a request in flight has the same id.
            RuntimeError: the engine failed or was shut down.
        """
        llm = self._llm
        adapters = [""] if lora_request is None else await asyncio.to_thread(llm.load_requested, lora_request, 1)
        (encoded,), (params,) = llm._prepare([prompt], [sampling_params or llm.default_sampling_params()], adapters)
        with self._open_stream(request_id) as (name, stream):
            ids = stream.submit(encoded, params, params.beam_width == 1, priority, adapters[0])
            stream.wake_engine()
            while stream.is_active:
                await stream.next_responses()
                if stream.is_active and params.output_kind == RequestOutputKind.FINAL_ONLY:
                    continue
                output = llm._request_output(
                    stream, prompt, encoded, ids, delta=params.output_kind == RequestOutputKind.DELTA
                )
                output.request_id, output.finished = name, not stream.is_active
                yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_task: Literal["embed", "classify"] | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """Yield once what a prompt pools to, by a model with runner=pooling; see `LLM.encode`.

        Args:
            pooling_task: None: that of the model.

        Raises:
            ValueError: the model does not pool this way, the prompt is not supported, or a request in flight has the same id.
            RuntimeError: the request was aborted, or the engine failed or was shut down.
        """
        llm = self._llm
        numbers_of, (encoded,) = pooling_methods.prepare(llm, [prompt], pooling_task)
        with self._open_stream(request_id) as (name, stream):
            number = stream.submit_pooling(encoded, priority)
            stream.wake_engine()
            while stream.is_active:
                await stream.next_responses()
            if number not in stream.pooled:
                raise RuntimeError(f"The request {name} was aborted.")
            row = number, encoded, stream.pooled[number], stream.num_cached_tokens[number]
            output = pooling_methods.tensor_output(row, numbers_of)
            output.request_id = name
            yield output

    @contextmanager
    def _open_stream(self, request_id: str | None) -> Iterator[tuple[str, CompletionStream]]:
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        if name in self._streams:
            raise ValueError(f"A request with the id {name!r} is in flight; use another id, or none.")
        with self._llm._open_stream(AsyncInbox()) as stream:
            self._streams[name] = stream
            try:
                yield name, stream
            finally:
                del self._streams[name]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests with the finish reason `abort` and the tokens that they have; ids that are not in flight are ignored."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            if (stream := self._streams.get(name)) is not None:
                stream.abort()
        self._llm.manager.wake()

    # -- control -------------------------------------------------------------------------------------------------------

    async def call(self, name: str, **arguments: Any) -> Any:
        """Run a control call; see `LLM.call`."""
        try:
            return await asyncio.wrap_future(self._llm.manager.call(name, **arguments))
        except RuntimeError as error:
            raise as_user_error(error) from None

    async def pause(self, mode: Literal["wait", "abort", "keep"] = "abort", clear_cache: bool = True) -> None:
        """Start no new request until `resume`; see `LLM.pause`."""
        await self.call("pause", mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """Continue after `pause`; without one, nothing changes."""
        await self.call("resume")

    pause_generation, resume_generation = pause, resume  # vLLM's names

    async def is_paused(self) -> bool:
        """Whether new requests wait, from the beginning of `pause` on."""
        return await self.call("is_paused")

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget the KV cache of earlier requests; see `LLM.reset_prefix_cache`."""
        return await self.call("reset_prefix_cache", reset_running_requests=reset_running_requests)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> None:
        """Load a low-rank adapter; see `LLM.load_lora_adapter`."""
        await self.call("load_adapter", **adapter_arguments(self.plan, lora_name, lora_path, load_inplace))

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Take an adapter from later requests; see `LLM.unload_lora_adapter`."""
        await self.call("unload_adapter", adapter=lora_name)

    async def list_lora_adapters(self) -> dict[str, str]:
        """The folders of the loaded adapters, by name."""
        return await self.call("list_adapters")

    async def start_profile(self, num_steps: int | None = None) -> None:
        """Record what every rank runs; see `LLM.start_profile`."""
        await self.call("start_profile", folder=self.plan.config.profile_dir, num_steps=num_steps)

    async def stop_profile(self) -> list[str]:
        """End the profile; see `LLM.stop_profile`."""
        return await self.call("stop_profile")

    # -- the engine ----------------------------------------------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """Whether the engine has failed."""
        return self._llm.manager.failure is not None

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine has failed or was shut down."""
        if not self._llm.manager.alive:
            raise RuntimeError(f"The engine has ended: {self._llm.manager.end_reason}") from self._llm.manager.failure

    async def get_tokenizer(self) -> Any:
        """The model's tokenizer from transformers; see `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    def shutdown(self, drain: bool = False) -> None:
        """End the engine: now, failing unfinished requests, or (`drain`) after them, which blocks the calling thread."""
        self._llm.shutdown(drain)

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)


class LLMEngine(RequestLoop):
    """An engine with `add_request`, `step`, `abort_request` and `has_unfinished_requests`. `shutdown` ends it.

    Args:
        llm: the engine that runs the requests.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.llm = llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> LLMEngine:
        """Create an engine from an object of options.

        Raises:
            ValueError: see `LLM`.
        """
        return cls(LLM(**engine_args.given()))

    def shutdown(self) -> None:
        """End the engine, and requests that are unfinished."""
        self.llm.shutdown(drain=False)


AsyncLLMEngine = AsyncLLM
"""Its other name in vLLM."""
