"""The answers to one HTTP request: converts engine outputs to text incrementally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchweave.engine.detokenizer import CompletionBuilder
from torchweave.engine.request import InferenceRequest, Response, SamplingParams, TokenLogprobs
from torchweave.images import images_of
from torchweave.serving.engine_client.request_stream import RequestStream, StreamOutput
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
        self.reported = self.finished
        logprobs = self._logprobs[first : first + len(ids)]
        return self._delta(text, ids, logprobs)

    def whole(self) -> Delta:
        """The whole answer."""
        return self._delta(self.text, self.token_ids, self._logprobs[: len(self.token_ids)])

    def _delta(self, text: str, ids: list[int], logprobs: list[TokenLogprobs]) -> Delta:
        return Delta(self.index, text, ids, self.finish_reason, logprobs, self.stop_reason, self.matched_stop)


class AnswerStream:
    """All answers of one HTTP request. `close` cancels the unfinished ones.

    Args:
        tokenizer: None for a model without one.
        finished: called when an engine request has finished.
        prompt_only: the answers are empty; sampled tokens are discarded.
    """

    def __init__(
        self,
        request_stream: RequestStream,
        tokenizer: AsyncTokenizer | None,
        params: SamplingParams,
        finished: Callable[[], None],
        prompt_only: bool = False,
    ) -> None:
        self.request_stream = request_stream
        self._answer_builders: dict[int, list[AnswerBuilder]] = {}  # by request id; a beam search has several answers
        self._num_answers = 0
        self._first_requests: set[int] = set()  # of each prompt: of their tokens, `usage` counts the cached ones
        self.num_cached_tokens = 0
        self.prompts: list[list[int]] = []
        self.tokenizer = tokenizer
        self.params = params
        self._finished = finished
        self._prompt_only = prompt_only

    def submit(self, prompts: Sequence[Sequence[int]], stream: bool, priority: int, cache_salt: str) -> None:
        params = self.params
        streamed = (stream or params.stops_in_text) and not self._prompt_only
        for prompt in prompts:
            ids = list(prompt)
            self.prompts.append(ids)
            images = images_of(prompt)
            request = InferenceRequest(0, as_tokens(ids), params, stream, priority, cache_salt, images)
            if params.beam_width > 1:
                answers = [self._answer(ids) for _ in range(params.n)]
                request_id = self.request_stream.submit(request)
                self._answer_builders[request_id] = answers
                self._first_requests.add(request_id)
                continue
            for number, seeded in enumerate(params.each()):
                answer = self._answer(ids)
                request_id = self.request_stream.submit(replace(request, sampling=seeded, streaming=streamed))
                self._answer_builders[request_id] = [answer]
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
        while new_output := await self.request_stream.new_output():
            if deltas := self._read(new_output):
                return deltas
        return []

    def _read(self, new_output: Sequence[StreamOutput]) -> list[Delta]:
        reported: dict[int, AnswerBuilder] = {}
        for each in new_output:
            if isinstance(each, Response):
                self._read_response(each, reported)
            else:
                answer_builder = self._answer_builders[each[0]][0]
                if answer_builder.add(each[1:], None, ()):
                    self.request_stream.stop(each[0])
                reported[answer_builder.index] = answer_builder
        return [answer_builder.take() for answer_builder in reported.values() if not answer_builder.reported]

    def _read_response(self, response: Response, reported: dict[int, AnswerBuilder]) -> None:
        output, answers = response.output, self._answer_builders[response.id]
        if output.prompt_logprobs:
            answers[0].prompt_logprobs += output.prompt_logprobs
        for answer_builder, beam_output in zip(answers, output.beams or (output,), strict=False):
            if self._prompt_only:
                answer_builder.add((), "length", ())
            elif answer_builder.add(beam_output.token_ids.tolist(), beam_output.finish_reason, beam_output.logprobs):
                self.request_stream.stop(response.id)
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

    def close(self) -> None:
        self.request_stream.close()


def as_tokens(ids: Sequence[int]) -> np.ndarray:
    """Convert token ids to an int32 array.

    Raises:
        ValueError: an id is out of range.
    """
    tokens = np.array(ids) if ids else np.empty(0, np.int32)  # np.array([]) is float; the engine refuses empty prompts
    if tokens.dtype.kind not in "iu" or (tokens.size and not 0 <= tokens.min() <= tokens.max() < 2**31):
        raise ValueError("The prompt contains a token id outside 0..2**31 - 1; send ids of the model's vocabulary.")
    return tokens.astype(np.int32)
