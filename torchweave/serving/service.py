"""State shared by the routes: engine, tokenizer, model names and limits."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import Request

from torchweave.config.options import ServerConfig, read_text_file
from torchweave.config.validate import lora_modules
from torchweave.engine.request import POOLING_PARAMS, InferenceRequest, Response, SamplingParams, StructuredOutputs
from torchweave.engine.sampling.structured_output import rejection_reason
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.engine_client.request_stream import EngineUnavailable
from torchweave.serving.errors import ApiError
from torchweave.serving.ipc.messages import ModelCard
from torchweave.serving.media import MediaFetcher
from torchweave.serving.openai.generation import AnswerStream, as_tokens
from torchweave.serving.openai.responses.store import BackgroundResponses, ResponseStore
from torchweave.serving.tokenization import AsyncTokenizer
from torchweave.tokenizer import check_chat_template, import_without_torch
from torchweave.utils.fair_threads import FairThreads

CallFrontends = Callable[[str, dict[str, Any], Sequence[Any]], Awaitable[None]]
_MAX_RETRY_AFTER = 60  # seconds
_MAX_NAMES = 20  # in a message
_CHECK_THREADS = 2  # of a client's grammars, each of which takes a second at most
_RATE_WINDOW = 64  # answers over which the completion rate is measured


class Service:
    """State of one server. Used from the event loop only.

    Attributes:
        media: fetches images at addresses.
        names: of the served model; responses carry the first.
        adapters: folders of the low-rank adapters, which are models to clients, by name.
        tokenizer: None until the engine is ready, and for a model without a tokenizer.
        draining: new requests are refused; the server ends once the running ones have finished.
        startup_done: set when the start has succeeded or failed.
        startup_ok: the engines take requests and the tokenizer is loaded.
        startup_error: an invalid option or model that made the start fail.
        call_other_frontends: runs the handler of a control call in the other HTTP processes, see `FrontendGroup.call`.
    """

    def __init__(self, client: Replicas, settings: ServerConfig) -> None:
        self.client = client
        self.settings = settings
        self.tokenizer: AsyncTokenizer | None = None
        self.draining = False
        self.startup_done = asyncio.Event()
        self.startup_ok = False
        self.startup_error = ""
        self.call_other_frontends: CallFrontends = _no_other_frontends
        template = settings.chat_template
        is_template = template is not None and any(mark in template for mark in ("{{", "{%", "\n"))
        self._template = template if template is None or is_template else read_text_file("chat_template", template)
        if self._template is not None:
            check_chat_template(self._template, "chat_template" if is_template else f"chat_template {template}")
        self.media = MediaFetcher(
            settings.allowed_media_hosts,
            settings.max_body_bytes,
            settings.media_fetch_timeout,
            settings.allowed_local_media_path,
        )
        self.created = int(time.time())
        self.response_store = ResponseStore(settings.response_store_mib << 20)
        self.background_responses = BackgroundResponses()
        model = client.config.model
        self.names = settings.served_model_name or (public_name(model),)
        self._aliases = () if settings.served_model_name else (model,)
        self.adapters = lora_modules(client.config)
        if both := sorted(filter(self.is_model_name, self.adapters)):
            raise ValueError(
                f"lora_modules has an adapter {both[0]!r}, which is the model's own name; give it another one"
            )
        self._finish_times: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._grammar_checks = FairThreads(_CHECK_THREADS, "torchweave-check-grammar")

    async def open(self) -> None:
        """Wait for the engine, then load the tokenizer; sets `startup_done`."""
        try:
            await asyncio.to_thread(import_without_torch)  # takes a second, while the engine is built
            await self.client.wait_until_ready()
            card = self.model
            if card.folder is not None:
                self.tokenizer = await AsyncTokenizer.open(
                    card.folder, self._template, card.trust_remote_code, card.images
                )
            self.startup_ok = True
        except EngineUnavailable:
            pass  # `client.failure` says why
        except ValueError as error:
            self.startup_error = str(error)
        except Exception as error:
            self.startup_error = (
                f"The tokenizer of {self.client.config.model} could not be loaded: {type(error).__name__}: {error}"
            )
        finally:
            self.startup_done.set()

    @property
    def ready(self) -> bool:
        return self.client.state == "ready" and self.startup_ok and not self.draining

    @property
    def model(self) -> ModelCard:
        """The served model.

        Raises:
            ApiError: 503, the engine is not ready.
        """
        card = self.client.model
        if card is None or self.client.state != "ready":
            why = self.client.failure or "The model is being loaded; GET /ready shows the progress."
            raise ApiError(503, why, code="engine_unavailable", headers={"Retry-After": "2"})
        return card

    def check_model(self, name: str | None) -> str:
        """Return the model name for the response.

        Raises:
            ApiError: 404, no model is served under `name`.
        """
        if name is None or name in self._aliases:
            return self.names[0]
        if name in self.names or name in self.adapters:
            return name
        served = " or ".join(map(repr, (*self.names, *self.adapters)[:_MAX_NAMES]))
        raise ApiError(
            404,
            f"The model {name[:200]!r} is not served here; use {served}.",
            param="model",
            code="model_not_found",
        )

    def is_model_name(self, name: str) -> bool:
        """Whether clients may use a name for the model itself."""
        return name in self.names or name in self._aliases

    def adapter_of(self, name: str | None) -> str:
        """The adapter of a model's name; empty for the model itself."""
        return name if name is not None and name in self.adapters else ""

    def require_tokenizer(self) -> AsyncTokenizer:
        """Return the tokenizer.

        Raises:
            ApiError: 503 while it is loaded, 400 for a model without a tokenizer.
        """
        if self.tokenizer is not None:
            return self.tokenizer
        name = self.model.name
        if not self.startup_ok:
            raise ApiError(
                503, "The tokenizer is being loaded; GET /ready shows the progress.", headers={"Retry-After": "1"}
            )
        raise ApiError(400, f"{name} has no tokenizer; send the prompt as token ids.", param="prompt")

    def check_admission(self, prompts: Sequence[Sequence[int]], params: SamplingParams, model: ModelCard) -> None:
        """Check a request against the server's limits.

        Raises:
            ApiError: 400 for a request above the limits, 429 with Retry-After if too many requests wait, 503 while the
                server shuts down.
        """
        if self.draining:
            raise ApiError(
                503, "The server is shutting down; send the request to another server.", code="shutting_down"
            )
        settings = self.settings
        sequences = len(prompts) * params.n
        self.check_sequences(sequences, model)
        self._check_tokens(prompts, params, model)
        self._check_logprobs(prompts, params, model)
        waiting = self.client.num_waiting
        if waiting + sequences > settings.max_waiting_requests + self.client.num_free:
            raise ApiError(
                429,
                f"{waiting} requests are waiting, and this server queues at most {settings.max_waiting_requests}; retry later.",
                code="queue_full",
                headers={"Retry-After": str(self._retry_after(waiting))},
            )

    def check_sequences(self, count: int, model: ModelCard) -> None:
        """Check the number of answers to a request.

        Raises:
            ApiError: 400, the server allows fewer.
        """
        settings = self.settings
        # Capacity of an idle server: a larger request would get 429 forever.
        capacity = settings.max_waiting_requests + model.max_batch_size * len(self.client.engines)
        limit = min(settings.max_request_sequences, capacity)
        if count > limit:
            raise ApiError(
                400,
                f"The request asks for {count} answers (prompts times n), but this server allows at most {limit} to one "
                "request; split it.",
                param="n",
            )

    def _check_tokens(self, prompts: Sequence[Sequence[int]], params: SamplingParams, model: ModelCard) -> None:
        limit = self.settings.max_request_tokens
        if limit is None:
            return
        answers = (model.max_model_len if params.max_tokens is None else params.max_tokens) * params.n
        total = sum(len(prompt) + min(answers, (model.max_model_len - len(prompt)) * params.n) for prompt in prompts)
        if total > limit:
            raise ApiError(
                400,
                f"The request may take {total} tokens, prompts and answers together, but this server allows {limit} for one "
                "request; shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )

    def _check_logprobs(self, prompts: Sequence[Sequence[int]], params: SamplingParams, model: ModelCard) -> None:
        """Raise ApiError 400 if the answers may hold more log-probabilities than this server returns for a request."""
        each, each_of_prompt = (
            1 + count if (count := numbers(model.vocab_size)) >= 0 else 0
            for numbers in (params.num_logprobs, params.num_prompt_logprobs)
        )
        if not (each or each_of_prompt):
            return
        limit, longest = self.settings.max_request_logprobs, model.max_model_len
        most = longest if params.max_tokens is None else params.max_tokens
        answers = sum(max(min(most, longest - len(prompt)), 0) for prompt in prompts) * params.n
        total = answers * each + sum(map(len, prompts)) * each_of_prompt
        if total > limit:
            raise ApiError(
                400,
                f"The request asks for {total} log-probabilities ({len(prompts) * params.n} answers, of at most {answers} tokens "
                f"in all with {each} each, and {each_of_prompt} for each token of the prompts), but this server returns at most "
                f"{limit} to one request (max_request_logprobs); lower max_tokens, logprobs, prompt_logprobs or n, or split it.",
                param="logprobs" if each else "prompt_logprobs",
            )

    def _retry_after(self, waiting: int) -> int:
        """Estimate in how many seconds the waiting requests of all HTTP processes will have been answered.

        The completion rate of this process is multiplied by their number: the kernel spreads connections evenly.
        """
        if len(self._finish_times) < 2:
            return 1
        rate = (len(self._finish_times) - 1) / max(time.monotonic() - self._finish_times[0], 1e-3)
        rate *= self.client.engines[0].replica_info.frontends
        return min(max(round(waiting / rate), 1), _MAX_RETRY_AFTER)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        model: ModelCard,
        *,
        stream: bool,
        priority: int,
        cache_salt: str | None,
        client: str = "",
        prompt_only: bool = False,
        adapter: str = "",
    ) -> AnswerStream:
        """Submit prompts to the engine; returns when it has accepted them.

        Args:
            adapter: see `InferenceRequest`.
            client: who asks; the grammars of several are checked and compiled in turn.
            prompt_only: the answers are empty; sampled tokens are discarded.

        Raises:
            ApiError: see `check_admission`.
            ValueError: the engine refused a request; the message says why.
            EngineUnavailable: no engine is ready.
        """
        self.check_admission(prompts, params, model)
        if any(isinstance(word, str) for word in params.bad_words or ()):
            params = await self.require_tokenizer().encode_bad_words(params)
        if params.structured_outputs is not None and (
            why := await self._grammar_error(params.structured_outputs, client)
        ):
            raise ApiError(400, why)
        longest = model.max_model_len
        answer_stream = AnswerStream(self.client, self.tokenizer, params, self._finish, prompt_only, longest)
        try:
            answer_stream.submit_prompts(prompts, stream, priority, cache_salt or "", client, adapter)
            await answer_stream.wait_until_accepted()
        except BaseException as error:
            answer_stream.close()
            if isinstance(error, ValueError):
                _check_length(prompts, model)
            raise
        return answer_stream

    async def _grammar_error(self, structured: StructuredOutputs, client: str) -> str:
        return await asyncio.wrap_future(self._grammar_checks.submit(client, lambda: rejection_reason(structured)))

    async def pool(self, prompts: Sequence[Sequence[int]], priority: int, cache_salt: str | None) -> list[np.ndarray]:
        """The pooled row of each prompt, float32 `[size]`.

        Raises:
            ApiError, ValueError, EngineUnavailable: see `generate`.
        """
        model = self.model
        self.check_admission(prompts, POOLING_PARAMS, model)
        rows: dict[int, np.ndarray] = {}
        with self.client.request_stream() as stream:
            ids = [
                stream.submit(
                    InferenceRequest(0, as_tokens(ids), POOLING_PARAMS, False, priority, cache_salt or "", pooling=True)
                )
                for ids in prompts
            ]
            try:
                await stream.wait_until_accepted()
            except ValueError as error:
                if max(map(len, prompts)) > model.max_model_len:
                    raise ApiError(400, str(error), code="context_length_exceeded") from None
                raise
            while new_output := await stream.new_output():
                for each in new_output:
                    assert isinstance(each, Response), "a request that pools has no tokens"
                    rows[each.id] = np.frombuffer(each.output.pooled, np.float32)
                    self._finish()
        return [rows[request_id] for request_id in ids]

    def _finish(self) -> None:
        self._finish_times.append(time.monotonic())

    def close(self) -> None:
        self.background_responses.close()
        if self.tokenizer is not None:
            self.tokenizer.close()


async def _no_other_frontends(name: str, arguments: dict[str, Any], results: Sequence[Any]) -> None:
    pass


def public_name(model: str) -> str:
    """Name of a model for clients; of a folder only the last part of its path, since the path is private."""
    is_path = Path(model).is_absolute() or model.startswith((".", "~")) or Path(model).is_dir()
    return (Path(model).expanduser().resolve().name or model) if is_path else model


def service_of(request: Request) -> Service:
    """The state of the server that received a request."""
    return request.app.state.service


def _check_length(prompts: Sequence[Sequence[int]], model: ModelCard) -> None:
    """Raise OpenAI's error if a refused prompt is too long: clients match its code or wording to shorten the conversation."""
    longest = max(map(len, prompts))
    if longest >= model.max_model_len:
        raise ApiError(
            400,
            f"This model's maximum context length is {model.max_model_len} tokens (max_model_len), but the prompt has {longest} "
            "and the answer needs at least 1; shorten the prompt.",
            code="context_length_exceeded",
        )
