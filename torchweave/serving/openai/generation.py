"""The answers to one HTTP request: converts engine outputs to text incrementally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from torchweave.engine.detokenizer import CompletionBuilder
from torchweave.engine.request import SamplingParams, TokenLogprobs
from torchweave.engine.responses import Response
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


class AnswerBuilder:
    """Builds one answer. `index` counts all answers of the request, those to the first prompt first."""

    def __init__(self, index: int, answer: CompletionBuilder) -> None:
        self.index = index
        self.answer = answer
        self.reported = False  # completely
        self._logprobs: list[TokenLogprobs] = []

    def add(self, token_ids: Sequence[int], reason: str | None, logprobs: Sequence[TokenLogprobs]) -> bool:
        """Add an output; returns whether a stop string ended the answer."""
        self._logprobs += logprobs
        return self.answer.add(token_ids, reason, logprobs)  # type: ignore[arg-type]

    def take(self) -> Delta:
        answer = self.answer
        text, ids = answer.new()
        self.reported = answer.finish_reason is not None
        logprobs: list[TokenLogprobs] = []
        if self._logprobs:
            logprobs, self._logprobs = self._logprobs[: len(ids)], self._logprobs[len(ids) :]
        return Delta(self.index, text, ids, answer.finish_reason, logprobs)


class AnswerStream:
    """All answers of one HTTP request. `close` cancels the unfinished ones.

    Args:
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
        self.prompts: list[list[int]] = []
        self._tokenizer = tokenizer
        self._params = params
        self._finished = finished
        self._prompt_only = prompt_only

    def submit(self, prompts: Sequence[Sequence[int]], stream: bool, priority: int, cache_salt: str) -> None:
        params = self._params
        streamed = (stream or bool(params.stop_strings)) and not self._prompt_only
        for prompt in prompts:
            ids = list(prompt)
            self.prompts.append(ids)
            tokens = _as_tokens(ids)
            if params.beam_width > 1:
                answers = [self._answer(ids, index) for index in range(params.n)]
                request_id = self.request_stream.submit(tokens, params, stream, priority, cache_salt)
                self._answer_builders[request_id] = answers
                continue
            for index, seeded in enumerate(params.each()):
                answer = self._answer(ids, index)
                request_id = self.request_stream.submit(tokens, seeded, streamed, priority, cache_salt)
                self._answer_builders[request_id] = [answer]

    def _answer(self, prompt: list[int], index: int) -> AnswerBuilder:
        text = None if self._tokenizer is None else self._tokenizer.stream(prompt, self._params.skip_special_tokens)
        self._num_answers += 1
        return AnswerBuilder(self._num_answers - 1, CompletionBuilder(self._params, text, index))

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
            answers[0].answer.prompt_logprobs += output.prompt_logprobs
        for answer_builder, beam_output in zip(answers, output.beams or (output,), strict=False):
            if self._prompt_only:
                answer_builder.add((), "length", ())
            elif answer_builder.add(beam_output.token_ids.tolist(), beam_output.finish_reason, beam_output.logprobs):
                self.request_stream.stop(response.id)
            reported[answer_builder.index] = answer_builder
        if response.final:
            self._finished()

    async def full(self) -> list[Delta]:
        """Wait for the end of all answers and return them in order."""
        parts: list[list[Delta]] = [[] for _ in range(self._num_answers)]
        while deltas := await self.next():
            for delta in deltas:
                parts[delta.index].append(delta)
        return [_joined(index, deltas) for index, deltas in enumerate(parts)]

    def prompt_logprobs(self, prompt: int) -> list[TokenLogprobs | None]:
        """Log-probabilities of a prompt's tokens, None for the first; available with the first response, if requested."""
        answers = [answer_builder for builders in self._answer_builders.values() for answer_builder in builders]
        return [None, *answers[prompt * self._params.n].answer.prompt_logprobs]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_answer_tokens(self) -> int:
        return sum(
            len(answer_builder.answer.token_ids)
            for builders in self._answer_builders.values()
            for answer_builder in builders
        )

    def close(self) -> None:
        self.request_stream.close()


def _joined(index: int, deltas: Sequence[Delta]) -> Delta:
    return Delta(
        index,
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        deltas[-1].finish_reason if deltas else None,
        [entry for delta in deltas for entry in delta.logprobs],
    )


def _as_tokens(ids: Sequence[int]) -> np.ndarray:
    """Convert token ids to an int32 array.

    Raises:
        ValueError: an id is out of range.
    """
    tokens = np.array(ids) if ids else np.empty(0, np.int32)  # np.array([]) is float; the engine refuses empty prompts
    if tokens.dtype.kind not in "iu" or (tokens.size and not 0 <= tokens.min() <= tokens.max() < 2**31):
        raise ValueError("The prompt contains a token id outside 0..2**31 - 1; send ids of the model's vocabulary.")
    return tokens.astype(np.int32)
