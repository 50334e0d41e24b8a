"""The answers to one HTTP request: converts engine outputs to text incrementally."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchweave.engine.detokenizer import CompletionBuilder
from torchweave.engine.request import InferenceRequest, Response, SamplingParams, TokenLogprobs
from torchweave.images import images_of
from torchweave.serving.engine_client.request_stream import Engines, RequestStream, StreamOutput
from torchweave.serving.tokenization import AsyncTokenizer


@dataclass(slots=True)  # not frozen, for speed: one is created per token of each stream
class Delta:
    """New text and tokens of one answer. `text` may also contain text of earlier tokens that was held back."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs]
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None


class AnswerBuilder(CompletionBuilder):
    """Builds one answer. `index` counts all answers of the request, those to the first prompt first."""

    reported = False  # completely

    def take(self) -> Delta:
        first = self._num_tokens_taken
        text, ids = self.new()
        self.reported = self.finish_reason is not None
        logprobs = self._logprobs[first : first + len(ids)]
        return Delta(self.index, text, ids, self.finish_reason, logprobs, self.stop_reason, self.matched_stop)

    def whole(self) -> Delta:
        """The whole answer."""
        logprobs = self._logprobs[: len(self.token_ids)]
        ids, reason = self.token_ids, self.finish_reason
        return Delta(self.index, self.text, ids, reason, logprobs, self.stop_reason, self.matched_stop)


class AnswerStream(RequestStream):
    """All answers of one HTTP request. `close` cancels the unfinished ones.

    Args:
        engines: see `RequestStream`.
        tokenizer: None for a model without one.
        finished: called when an engine request has finished.
        prompt_only: the answers are empty; sampled tokens are discarded.
        max_model_len: longest prompt and answer together; a prompt that is scored alone may be as long.
    """

    def __init__(
        self,
        engines: Engines,
        tokenizer: AsyncTokenizer | None,
        params: SamplingParams,
        finished: Callable[[], None],
        prompt_only: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__(engines)
        self._answer_builders: dict[int, list[AnswerBuilder]] = {}  # by request id; a beam search has several answers
        self._num_answers = 0
        self._first_requests: set[int] = set()  # of each prompt: of their tokens, `usage` counts the cached ones
        self._scored_last: set[int] = set()  # requests whose answer is the last token of their prompt
        self.num_cached_tokens = 0
        self.prompts: list[list[int]] = []
        self.tokenizer = tokenizer
        self.params = params
        self._finished = finished
        self._prompt_only, self._max_model_len = prompt_only, max_model_len

    def submit_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        stream: bool,
        priority: int,
        cache_salt: str,
        client: str = "",
        adapter: str = "",
    ) -> None:
        """Submit the requests of all answers; errors as those of `submit`."""
        params = self.params
        streamed = (stream or params.stops_in_text) and not self._prompt_only
        for prompt in prompts:
            ids = list(prompt)
            self.prompts.append(ids)
            images = images_of(prompt)
            others = stream, priority, cache_salt, images
            request = InferenceRequest(0, as_tokens(ids), params, *others, adapter=adapter, client=client)
            fills_context = self._prompt_only and len(ids) == self._max_model_len and len(ids) > 1
            request = _last_token_forced(request) if fills_context else request
            if params.beam_width > 1:
                answers = [self._answer(ids) for _ in range(params.n)]
                request_id = self.submit(request)
                self._answer_builders[request_id] = answers
                self._first_requests.add(request_id)
                continue
            for number, seeded in enumerate(request.sampling.each()):
                answer = self._answer(ids)
                request_id = self.submit(replace(request, sampling=seeded, streaming=streamed))
                self._answer_builders[request_id] = [answer]
                if fills_context and request.sampling.logprobs is not None:
                    self._scored_last.add(request_id)
                if number == 0:
                    self._first_requests.add(request_id)

    def _answer(self, prompt: list[int]) -> AnswerBuilder:
        with_text = self.tokenizer is not None and self.params.detokenize
        text = self.tokenizer.stream(prompt, self.params.skip_special_tokens) if with_text else None  # type: ignore[union-attr]
        self._num_answers += 1
        return AnswerBuilder(self.params, text, self._num_answers - 1)

    async def next(self) -> list[Delta]:
        """Wait for new deltas; empty once all answers have ended.

        Raises:
            EngineUnavailable: the engine ended.
            RequestFailed: a request failed.
        """
        while True:  # as `new_output`, without a call of it: that is two frames for each token
            while self._open and not self._pending_output:
                self._wakeup = asyncio.get_running_loop().create_future()
                await self._wakeup
            if self._failure is not None:
                raise self._failure
            new_output, self._pending_output = self._pending_output, []
            if not new_output:
                return []
            if deltas := self._read(new_output):
                return deltas

    def _read(self, new_output: Sequence[StreamOutput]) -> list[Delta]:
        reported: dict[int, AnswerBuilder] = {}
        for each in new_output:
            if isinstance(each, Response):
                self._read_response(each, reported)
            else:
                answer_builder = self._answer_builders[each[0]][0]
                if answer_builder.add(each[1:], None, ()):
                    self.stop(each[0])
                reported[answer_builder.index] = answer_builder
        deltas = []
        for answer_builder in reported.values():  # no comprehension: it is a frame in Python 3.11
            if not answer_builder.reported:
                deltas.append(answer_builder.take())
        return deltas

    def _read_response(self, response: Response, reported: dict[int, AnswerBuilder]) -> None:
        output, answers = response.output, self._answer_builders[response.id]
        if output.prompt_logprobs:
            answers[0].prompt_logprobs += output.prompt_logprobs
        for answer_builder, beam_output in zip(answers, output.beams or (output,), strict=False):
            if self._prompt_only:
                if response.id in self._scored_last:
                    answer_builder.prompt_logprobs += beam_output.logprobs
                answer_builder.add((), "length", ())
            elif answer_builder.add(beam_output.token_ids.tolist(), beam_output.finish_reason, beam_output.logprobs):
                self.stop(response.id)
            reported[answer_builder.index] = answer_builder
        if response.final:
            self._finished()
            if response.id in self._first_requests:
                self.num_cached_tokens += output.num_cached_tokens

    async def full(self) -> list[Delta]:
        """Wait for the end of all answers and return them in order."""
        while await self.next():
            pass
        return [answer_builder.whole() for answer_builder in self._all_answers]

    def prompt_logprobs(self, prompt: int) -> list[TokenLogprobs | None]:
        """Log-probabilities of a prompt's tokens, None for the first; available with the first response, if requested."""
        return [None, *self._all_answers[prompt * self.params.n].prompt_logprobs]

    @property
    def _all_answers(self) -> list[AnswerBuilder]:
        """In the order of their indices."""
        return [answer_builder for builders in self._answer_builders.values() for answer_builder in builders]

    @property
    def answer_ids(self) -> list[list[int]]:
        """Tokens of each answer so far."""
        return [answer_builder.token_ids for answer_builder in self._all_answers]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_answer_tokens(self) -> int:
        return sum(map(len, self.answer_ids))


def _last_token_forced(request: InferenceRequest) -> InferenceRequest:
    """A prompt as long as the context, for scoring: its last token is the answer, whose log-probability is the model's own."""
    ids, params = request.input_ids, request.sampling
    forced = replace(params, allowed_token_ids=[int(ids[-1])], logprobs=params.prompt_logprobs, min_tokens=0)
    return replace(request, input_ids=ids[:-1], sampling=forced)


def as_tokens(ids: Sequence[int]) -> np.ndarray:
    """Convert token ids to an int32 array.

    Raises:
        ValueError: an id is out of range.
    """
    tokens = np.array(ids) if ids else np.empty(0, np.int32)  # np.array([]) is float; the engine refuses empty prompts
    if tokens.dtype.kind not in "iu" or (tokens.size and not 0 <= tokens.min() <= tokens.max() < 2**31):
        raise ValueError("The prompt contains a token id outside 0..2**31 - 1; send ids of the model's vocabulary.")
    return tokens.astype(np.int32)
