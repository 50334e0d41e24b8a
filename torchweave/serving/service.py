"""What the routes share: the engine, the tokenizer, the names of the model, and the limits."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from torchweave.config.options import ServerConfig, read_text_file
from torchweave.engine.request import SamplingParams
from torchweave.engine.sampling.structured_output import rejection_reason
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.engine_client.request_stream import EngineUnavailable
from torchweave.serving.errors import ApiError
from torchweave.serving.ipc.messages import ModelCard
from torchweave.serving.openai.generation import AnswerStream
from torchweave.serving.openai.tools import detect_tool_format
from torchweave.serving.tokenization import AsyncTokenizer, prepare

_MAX_RETRY_AFTER = 60  # seconds that a client is told to wait at the most
_RATE_WINDOW = 64  # answers over which the rate of answering is taken


class Service:
    """The state of one server. Belongs to the event loop.

    Attributes:
        tokenizer: None until the engine is ready, and for a model without tokenizer.
        draining: the server ends once what runs has finished; new requests are refused.
        startup_done: set once it is known whether the server became ready.
        startup_ok: it did: the engines took requests, and the tokenizer is read.
        startup_error: it did not, and this fault in what was asked is the reason.
    """

    def __init__(self, client: Replicas, settings: ServerConfig) -> None:
        self.client = client
        self.settings = settings
        self.tokenizer: AsyncTokenizer | None = None
        self.draining = False
        self.startup_done = asyncio.Event()
        self.startup_ok = False
        self.startup_error = ""
        self._template = read_template(settings)
        self.created = int(time.time())
        self._finish_times: deque[float] = deque(maxlen=_RATE_WINDOW)

    async def open(self) -> None:
        """Wait for the engine, then read the tokenizer's files; sets `startup_done`."""
        try:
            await prepare()
            await self.client.wait_until_ready()
            folder = self.model.folder
            if folder is not None:
                self.tokenizer = await AsyncTokenizer.open(folder, self._template, self.model.trust_remote_code)
            self.startup_ok = True
        except EngineUnavailable:
            pass  # the client knows why
        except ValueError as error:
            self.startup_error = str(error)
        except Exception as error:
            self.startup_error = (
                f"The tokenizer of {self.client.config.model} cannot be used: {type(error).__name__}: {error}"
            )
        finally:
            self.startup_done.set()

    @property
    def ready(self) -> bool:
        return self.client.state == "ready" and self.startup_ok and not self.draining

    @property
    def model(self) -> ModelCard:
        """What is served.

        Raises:
            ApiError: 503, the engine is not ready.
        """
        card = self.client.model
        if card is None or self.client.state != "ready":
            why = self.client.failure or "The model is being loaded; GET /ready shows how far it is."
            raise ApiError(503, why, code="engine_unavailable", headers={"Retry-After": "2"})
        return card

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the model is served."""
        return self.settings.served_model_name or (self.client.config.model,)

    def check_model(self, name: str | None) -> str:
        """The name that the answer says; a name that is not served is refused with those that are."""
        if name is None or name in self.names:
            return name or self.names[0]
        raise ApiError(
            404,
            f"The model {name[:200]!r} is not served here; {' or '.join(map(repr, self.names))} is.",
            param="model",
            code="model_not_found",
        )

    def require_tokenizer(self) -> AsyncTokenizer:
        """The tokenizer.

        Raises:
            ApiError: 503 while it is read, 400 for a model without one.
        """
        name = self.model.name
        if self.tokenizer is None and not self.startup_ok:
            raise ApiError(503, "The tokenizer is being read; GET /ready says when.", headers={"Retry-After": "1"})
        if self.tokenizer is None:
            raise ApiError(400, f"{name} has no tokenizer; give the prompt as token ids.", param="prompt")
        return self.tokenizer

    def chat_template(self) -> str:
        """What turns conversations into text; empty for a model without one."""
        return self.require_tokenizer().chat_template

    def tool_format(self, template: str) -> str | None:
        """The form in which the model calls tools; None when it is not known."""
        configured = self.settings.tool_call_parser
        return detect_tool_format(template) if configured == "auto" else configured

    def check_admission(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Refuse what is beyond the server's limits, before the engine hears of it.

        Raises:
            ApiError: 400 for a request that is too large by itself, 429 with Retry-After where too many wait, 503 while
                the server ends.
        """
        if self.draining:
            raise ApiError(503, "The server is shutting down; ask another one.", code="shutting_down")
        model, settings = self.model, self.settings
        sequences = len(prompts) * params.n
        # Of an idle server: who needs more would be told for ever that others wait, and to come again.
        room = settings.max_waiting_requests + model.max_batch_size * len(self.client.engines)
        most = min(settings.max_request_sequences, room)
        if sequences > most:
            raise ApiError(
                400,
                f"The request asks for {sequences} answers (prompts times n), but this server gives at most "
                f"{most} to one request; split it.",
                param="n",
            )
        self._check_tokens(prompts, params, model)
        waiting = self.client.num_waiting
        if waiting + sequences > settings.max_waiting_requests + self.client.num_free:
            raise ApiError(
                429,
                f"{waiting} requests are waiting, and this server lets {settings.max_waiting_requests} wait; try again later.",
                code="queue_full",
                headers={"Retry-After": str(self._retry_after(waiting))},
            )

    def _check_tokens(self, prompts: Sequence[Sequence[int]], params: SamplingParams, model: ModelCard) -> None:
        most = self.settings.max_request_tokens
        if most is None:
            return
        answers = (model.max_model_len if params.max_tokens is None else params.max_tokens) * params.n
        total = sum(len(prompt) + min(answers, (model.max_model_len - len(prompt)) * params.n) for prompt in prompts)
        if total > most:
            raise ApiError(
                400,
                f"The request may take {total} tokens, prompts and answers together, but this server allows {most} to one "
                "request; shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )

    def _retry_after(self, waiting: int) -> int:
        """Seconds in which those who wait, with whichever HTTP process, will have been answered, at the rate of the last answers.

        Only this process's are known here; the kernel gives the others as many.
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
        *,
        stream: bool,
        priority: int,
        cache_salt: str | None,
        prompt_only: bool = False,
    ) -> AnswerStream:
        """Hand prompts to the engine; returns when it has said that it can run them.

        Args:
            prompt_only: the answers are empty: what is drawn is not told.

        Raises:
            ApiError: see `check_admission`.
            ValueError: the engine cannot run one; the sentence says why.
            EngineUnavailable: it is not there.
        """
        self.check_admission(prompts, params)
        if any(isinstance(word, str) for word in params.bad_words or ()):
            params = await self.require_tokenizer().encode_bad_words(params)
        if params.structured_outputs is not None and (
            why := await asyncio.to_thread(rejection_reason, params.structured_outputs)
        ):
            raise ApiError(400, why)
        run = AnswerStream(self.client.request_stream(), self.tokenizer, params, self._finish, prompt_only)
        try:
            run.submit(prompts, stream, priority, cache_salt or "")
            await run.request_stream.wait_until_accepted()
        except BaseException as error:
            run.close()
            if isinstance(error, ValueError):
                _check_length(prompts, self.model)
            raise
        return run

    def _finish(self) -> None:
        self._finish_times.append(time.monotonic())

    def close(self) -> None:
        if self.tokenizer is not None:
            self.tokenizer.close()


def _check_length(prompts: Sequence[Sequence[int]], model: ModelCard) -> None:
    """Say of prompts that the engine has refused whether one is too long: clients that shorten a conversation and ask again know it
    by the code, or by these words of OpenAI's sentence."""
    longest = max(map(len, prompts))
    if longest >= model.max_model_len:
        raise ApiError(
            400,
            f"This model's maximum context length is {model.max_model_len} tokens (max_model_len), but the prompt has {longest}, "
            "and the answer needs at least one; shorten the prompt.",
            code="context_length_exceeded",
        )


def read_template(settings: ServerConfig) -> str | None:
    """The chat template that was asked for.

    Raises:
        ValueError: the file cannot be read.
    """
    if settings.chat_template is None:
        return None
    return read_text_file("chat_template", settings.chat_template)
