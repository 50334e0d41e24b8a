"""What the routes share: the engine, the tokenizer, the names of the model, and the limits."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from torchweave.config.options import ServerConfig, file_text
from torchweave.engine.request import SamplingParams
from torchweave.engine.sampling.structured_output import why_not
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.engine_client.request_stream import EngineGone
from torchweave.serving.http.errors import ApiError
from torchweave.serving.ipc.messages import ModelCard
from torchweave.serving.openai.generation import Run
from torchweave.serving.openai.tools import format_of
from torchweave.serving.tokenization import Codec, prepare

_LONGEST_RETRY = 60  # seconds that a client is told to wait at the most
_RATE_WINDOW = 64  # answers over which the rate of answering is taken


class Service:
    """The state of one server. Belongs to the event loop.

    Attributes:
        codec: None until the engine is ready, and for a model without tokenizer.
        draining: the server ends once what runs has finished; new requests are refused.
        opened: set once it is known whether the server became ready.
        begun: it did: the engines took requests, and the tokenizer is read.
        fault: it did not, and this fault in what was asked is the reason.
    """

    def __init__(self, client: Replicas, settings: ServerConfig) -> None:
        self.client = client
        self.settings = settings
        self.codec: Codec | None = None
        self.draining = False
        self.opened = asyncio.Event()
        self.begun = False
        self.fault = ""
        self._template = read_template(settings)
        self.created = int(time.time())
        self._finished: deque[float] = deque(maxlen=_RATE_WINDOW)

    async def open(self) -> None:
        """Wait for the engine, then read the tokenizer's files; sets `opened`."""
        try:
            await prepare()
            await self.client.wait_until_ready()
            folder = self.model.folder
            if folder is not None:
                self.codec = await Codec.open(folder, self._template, self.model.trust_remote_code)
            self.begun = True
        except EngineGone:
            pass  # the client knows why
        except ValueError as error:
            self.fault = str(error)
        except Exception as error:
            self.fault = f"The tokenizer of {self.client.config.model} cannot be used: {type(error).__name__}: {error}"
        finally:
            self.opened.set()

    @property
    def ready(self) -> bool:
        return self.client.state == "ready" and self.begun and not self.draining

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

    def need_codec(self) -> Codec:
        """The tokenizer.

        Raises:
            ApiError: 503 while it is read, 400 for a model without one.
        """
        name = self.model.name
        if self.codec is None and not self.begun:
            raise ApiError(503, "The tokenizer is being read; GET /ready says when.", headers={"Retry-After": "1"})
        if self.codec is None:
            raise ApiError(400, f"{name} has no tokenizer; give the prompt as token ids.", param="prompt")
        return self.codec

    def chat_template(self) -> str:
        """What turns conversations into text; empty for a model without one."""
        return self.need_codec().chat_template

    def tool_format(self, template: str) -> str | None:
        """The form in which the model calls tools; None when it is not known."""
        asked = self.settings.tool_call_parser
        return format_of(template) if asked == "auto" else asked

    def admit(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
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
        if len(self._finished) < 2:
            return 1
        rate = (len(self._finished) - 1) / max(time.monotonic() - self._finished[0], 1e-3)
        rate *= self.client.engines[0].place.frontends
        return min(max(round(waiting / rate), 1), _LONGEST_RETRY)

    async def ask(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        stream: bool,
        priority: int,
        cache_salt: str | None,
        prompt_alone: bool = False,
    ) -> Run:
        """Hand prompts to the engine; returns when it has said that it can run them.

        Args:
            prompt_alone: the answers are empty: what is drawn is not told.

        Raises:
            ApiError: see `admit`.
            ValueError: the engine cannot run one; the sentence says why.
            EngineGone: it is not there.
        """
        self.admit(prompts, params)
        if any(isinstance(word, str) for word in params.bad_words or ()):
            params = await self.need_codec().in_tokens(params)
        if params.structured_outputs is not None and (
            why := await asyncio.to_thread(why_not, params.structured_outputs)
        ):
            raise ApiError(400, why)
        run = Run(self.client.flight(), self.codec, params, self._finish, prompt_alone)
        try:
            run.submit(prompts, stream, priority, cache_salt or "")
            await run.flight.accepted()
        except BaseException as error:
            run.close()
            if isinstance(error, ValueError):
                _check_length(prompts, self.model)
            raise
        return run

    def _finish(self) -> None:
        self._finished.append(time.monotonic())

    def close(self) -> None:
        if self.codec is not None:
            self.codec.close()


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
    return file_text("chat_template", settings.chat_template)
