"""Text in, text out: the engine as one object, with vLLM's names."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torchweave.config import EngineConfig
from torchweave.engine.batch_manager import BatchManager
from torchweave.engine.build import Engine, build
from torchweave.engine.client import Client, Inbox, Message
from torchweave.engine.request import CompletionOutput, RequestOutput, SamplingParams
from torchweave.engine.text import Answer
from torchweave.log import Report
from torchweave.models.load import LoadedModel
from torchweave.models.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]
_LOOK_SECONDS = 1.0  # between two looks at whether the engine is still alive, while waiting for it


class LLM:
    """An engine that is ready when the constructor returns.

    Args:
        model: a folder in Hugging Face's layout, a hub id, or a built-in name (`demo`).
        report: gets every decision; one is made when none is given.
        options: fields of `EngineConfig`.

    Raises:
        ValueError: the model or an option cannot be; the message says why and what to do.
    """

    def __init__(self, model: str, *, report: Report | None = None, **options: Any) -> None:
        self._open(EngineConfig(model=model, **options), report, None)

    @classmethod
    def from_config(cls, config: EngineConfig, report: Report | None = None) -> LLM:
        llm = cls.__new__(cls)
        llm._open(config, report, None)
        return llm

    @classmethod
    def from_loaded(cls, loaded: LoadedModel, config: EngineConfig, report: Report | None = None) -> LLM:
        """An engine over a model that is in memory already; `config.model` is its name only."""
        llm = cls.__new__(cls)
        llm._open(config, report, loaded)
        return llm

    def _open(self, config: EngineConfig, report: Report | None, loaded: LoadedModel | None) -> None:
        self.report = report if report is not None else Report()
        self.engine: Engine = build(config, self.report, loaded)
        self.plan = self.engine.plan
        self.tokenizer: Tokenizer | None = self.engine.loaded.tokenizer
        self._client = Client()
        self.manager = BatchManager(
            self.engine.batch,
            self.engine.runner,
            self._client.get_requests,
            self._client.send_response,
            self._client.poll_stop,
            run_ahead=self.plan.run_ahead,
            seed=config.seed,
        )
        self._finalizer = weakref.finalize(self, self.manager.shutdown, drain=False)
        self.report.event("ready")

    # -- whole answers -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts, all in flight together.

        Args:
            prompts: texts, or lists of token ids.
            sampling_params: one for all, or one for each; None takes `default_sampling_params()`.
            use_tqdm: show a progress bar on a terminal.

        Returns:
            One output a prompt, in their order.

        Raises:
            ValueError: a prompt that can never run; nothing is started then.
            RuntimeError: the engine failed or was shut down.
        """
        texts, params = _listed(prompts, sampling_params or self.default_sampling_params())
        ids = self._encode_all(texts)
        self._check_all(ids, params)
        inbox: Inbox = queue.SimpleQueue()
        answers: dict[int, Answer] = {}
        outputs: list[tuple[int, list[Answer]]] = []
        for prompt, settings in zip(ids, params, strict=True):
            mine = self._submit(prompt, settings, inbox, streaming=bool(settings.stop_strings))
            answers |= mine
            outputs.append((next(iter(mine)), list(mine.values())))
        self.manager.wake()
        report = self.report if use_tqdm else Report(show=False)
        with report.progress("generating", len(answers)) as advance:
            for _ in self._consume(inbox, answers):
                advance()
        return [
            RequestOutput(
                request_id=number,
                prompt=text if isinstance(text, str) else None,
                prompt_token_ids=prompt.tolist(),
                outputs=[answer.result() for answer in mine],
            )
            for text, prompt, (number, mine) in zip(texts, ids, outputs, strict=True)
        ]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = False,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, `{"role": ..., "content": ...}` each message, through the model's chat template."""
        several = messages if messages and not isinstance(messages[0], dict) else [messages]
        prompts = [self.encode_chat(conversation, **variables) for conversation in several]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm)

    # -- answers as they come ------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[CompletionOutput]:
        """Answer one prompt; yields what is new as it comes, `finish_reason` set in the last of each answer.

        Leaving the iterator early stops the request.
        """
        return (output for _, output in self.stream_all([prompt], sampling_params))

    def stream_all(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> Iterator[tuple[int, CompletionOutput]]:
        """Answer prompts in flight together; yields (number of the prompt, what is new)."""
        texts, params = _listed(list(prompts), sampling_params or self.default_sampling_params())
        ids = self._encode_all(texts)
        self._check_all(ids, params)
        inbox: Inbox = queue.SimpleQueue()
        answers: dict[int, Answer] = {}
        prompt_of: dict[int, int] = {}
        for number, (prompt, settings) in enumerate(zip(ids, params, strict=True)):
            mine = self._submit(prompt, settings, inbox, streaming=True)
            answers |= mine
            prompt_of |= dict.fromkeys(mine, number)
        self.manager.wake()
        return self._stream(inbox, answers, prompt_of)

    def _stream(
        self, inbox: Inbox, answers: dict[int, Answer], prompt_of: dict[int, int]
    ) -> Iterator[tuple[int, CompletionOutput]]:
        told: set[int] = set()
        for request_id in self._consume(inbox, answers, each=True):
            answer = answers[request_id]
            delta = answer.take()
            if request_id not in told and (delta.text or delta.token_ids or delta.finish_reason):
                yield prompt_of[request_id], delta
            if answer.finished:
                told.add(request_id)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation config asks for; greedy where it asks for nothing."""
        defaults = self.engine.loaded.generation
        return SamplingParams(
            temperature=0.0 if defaults.temperature is None else defaults.temperature,
            top_k=defaults.top_k or 0,
            top_p=1.0 if defaults.top_p is None else defaults.top_p,
            min_p=defaults.min_p or 0.0,
            max_tokens=256,
        )

    def encode(self, text: str) -> list[int]:
        return self._need_tokenizer().encode(text)

    def encode_chat(self, messages: Messages, **variables: Any) -> list[int]:
        return self._need_tokenizer().chat(messages, **variables)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.engine.loaded.name} has no tokenizer; give the prompt as token ids.")
        return self.tokenizer

    def _encode_all(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        return [
            np.asarray(self.encode(prompt) if isinstance(prompt, str) else list(prompt), dtype=np.int64)
            for prompt in prompts
        ]

    def _check_all(self, prompts: Sequence[np.ndarray], params: Sequence[SamplingParams]) -> None:
        from torchweave.engine.request import InferenceRequest

        for number, (prompt, settings) in enumerate(zip(prompts, params, strict=True)):
            why = self.engine.batch.why_not(InferenceRequest(0, prompt, settings))
            if why:
                raise ValueError(why if len(prompts) == 1 else f"Prompt {number}: {why}")

    def _submit(self, prompt: np.ndarray, params: SamplingParams, inbox: Inbox, streaming: bool) -> dict[int, Answer]:
        """Queue the `n` answers of a prompt; returns them by request id."""
        answers = {}
        for index in range(params.n):
            seeded = params if params.seed is None else replace(params, seed=(params.seed + index) % 2**64)
            request_id = self._client.submit(prompt, seeded, inbox, streaming)
            stream = None
            if self.tokenizer is not None:
                stream = self.tokenizer.stream(prompt.tolist(), params.skip_special_tokens)
            answers[request_id] = Answer(params, stream, index)
        return answers

    def _consume(self, inbox: Inbox, answers: dict[int, Answer], each: bool = False) -> Iterator[int]:
        """Feed responses to their answers; yields ids of answers that are done, or with `each` those that grew."""
        open_ids = set(answers)
        try:
            while open_ids:
                message = self._next(inbox)
                if message.error:
                    raise RuntimeError(message.error)
                answer = answers[message.id]
                if answer.add(message.output.token_ids, message.output.finish_reason, message.output.logprobs):
                    self._client.stop(message.id)
                if message.final:
                    open_ids.discard(message.id)
                if each or message.final:
                    yield message.id
        finally:
            for request_id in open_ids:  # an error, an interrupt, or a caller who has heard enough
                self._client.stop(request_id)

    def _next(self, inbox: Inbox) -> Message:
        while True:
            try:
                return inbox.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if not self.manager.alive and inbox.empty():
                    cause = self.manager.failure
                    raise RuntimeError(f"The engine has ended: {cause or 'it was shut down'}") from cause

    def shutdown(self, drain: bool = True) -> None:
        """End the engine, after the requests in flight, or with an error to each of them."""
        self.manager.shutdown(drain=drain)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown(drain=exc[0] is None)


def _listed(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> tuple[list[Prompt], list[SamplingParams]]:
    """Prompts as a list, and as many sampling parameters."""
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
    listed: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]
    several = [params] * len(listed) if isinstance(params, SamplingParams) else list(params)
    if len(several) != len(listed):
        raise ValueError(
            f"There are {len(listed)} prompts but {len(several)} sampling_params; give one for each, or one for all."
        )
    return listed, several
