"""Response bodies of completions and chat completions, full and in chunks (server-sent events)."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from torchweave.serving.errors import ApiError
from torchweave.serving.openai.answer_parser import AnswerFormat, AnswerParser, CustomInputs, WholeAnswer
from torchweave.serving.openai.generation import AnswerStream, Delta
from torchweave.serving.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs
from torchweave.serving.openai.protocol import ChatRequest, CompletionRequest, Generation, StreamOptions
from torchweave.serving.openai.tools import Call, ParserDelta, ReasoningDelta, TextDelta

_encode = msgspec.json.Encoder(enc_hook=list).encode  # iterators, see `logprobs`
_MARK = "\0text\0"
_DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


def named_event(kind: str, **fields: Any) -> bytes:
    """Encode a server-sent event with a name, which is also the type in its body."""
    return f"event: {kind}\n".encode() + event({"type": kind, **fields})


class TextEventCache:
    """Events that differ only in the text: the JSON around the text is encoded once per answer."""

    def __init__(self) -> None:
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by answer: the bytes before and after its text

    def of(self, index: int, text: str, body: Callable[[int, str], dict[str, Any]]) -> bytes:
        """Encode the event of answer `index` with `text`; `body(index, text)` builds its JSON."""
        around = self._around.get(index)
        if around is None:
            before, _, after = event(body(index, _MARK)).partition(_encode(_MARK))
            around = self._around[index] = before, after
        return around[0] + _encode(text) + around[1]


class ResponseBuilder(ABC):
    """Builds the response of one request, whole or as server-sent events."""

    def begin(self) -> bytes:
        """Encode the events before the first delta."""
        return b""

    @abstractmethod
    def events(self, delta: Delta) -> bytes:
        """Encode the stream events of a delta; may be empty."""

    @abstractmethod
    def end(self) -> bytes:
        """Encode the events after the last delta."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Encode the last events of a stream that failed."""

    @abstractmethod
    def full(self, answers: list[Delta]) -> dict[str, Any]:
        """The body of a response that is not streamed; long lists in it are iterators."""


class OpenAIResponseBuilder(ResponseBuilder):
    """Builds the response bodies of completions and chat completions.

    Args:
        body: the request.
        request_id: part of the response's `id`.
        model: name in the response.
    """

    _ID_PREFIX: str
    _OBJECT: str
    _CHUNK_OBJECT: str

    def __init__(self, answer_stream: AnswerStream, body: Generation, request_id: str, model: str) -> None:
        self._head = {
            "id": f"{self._ID_PREFIX}-{request_id}",
            "object": self._CHUNK_OBJECT,
            "created": int(time.time()),
            "model": model,
        }
        self._answer_stream, self._tokenizer = answer_stream, answer_stream.tokenizer
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        options = body.stream_options or StreamOptions()
        self._with_usage_event = options.include_usage
        self._with_token_ids = body.return_token_ids or body.detokenize is False
        self._shown = None if body.return_tokens_as_token_ids else self._tokenizer  # writes tokens of log-probabilities
        self._continuous_usage = options.include_usage and options.continuous_usage_stats
        self._started: set[int] = set()
        self._texts = TextEventCache()

    def end(self) -> bytes:
        usage = event(self._with_usage({**self._head, "choices": []})) if self._with_usage_event else b""
        return usage + _DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body) + _DONE

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        body = {**self._head, "choices": [choice]}
        if self._continuous_usage:
            return self._with_usage(body, with_details=False)
        return {**body, "usage": None} if self._with_usage_event else body

    def _full(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._with_usage({**self._head, "object": self._OBJECT, "choices": choices})

    def _with_usage(self, body: dict[str, Any], with_details: bool = True) -> dict[str, Any]:
        """Add `usage`; each prompt is counted once. The details are known at the end only."""
        prompt, answers = self._answer_stream.num_prompt_tokens, self._answer_stream.num_answer_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
        }
        if with_details:
            usage["prompt_tokens_details"] = {"cached_tokens": self._answer_stream.num_cached_tokens}
            usage |= self._answer_details()
        body["usage"] = usage
        return body

    def _answer_details(self) -> dict[str, Any]:
        """Further counts for `usage`."""
        return {}

    def _prompt_logprobs(self, prompt: int) -> Iterator[dict[str, Any] | None]:
        return prompt_logprobs(self._tokenizer, self._answer_stream.prompt_logprobs(prompt))


class CompletionResponseBuilder(OpenAIResponseBuilder):
    """Builds the bodies of `/v1/completions`.

    Args:
        echoes: the prompts' texts to prepend to the answers; None: no echo.
        echoes_special: these texts contain special tokens.
    """

    _ID_PREFIX = "cmpl"
    _OBJECT = _CHUNK_OBJECT = "text_completion"

    def __init__(
        self,
        answer_stream: AnswerStream,
        body: CompletionRequest,
        request_id: str,
        model: str,
        echoes: list[str] | None = None,
        echoes_special: bool = False,
    ) -> None:
        super().__init__(answer_stream, body, request_id, model)
        params = answer_stream.params
        self._logprobs, self._skip_special = body.logprobs is not None, params.skip_special_tokens
        self._echoes, self._echoes_special = echoes, echoes_special
        # Answers per prompt, of which the best are returned.
        self._num_drawn, self._num_returned = params.n, body.n or 1
        self._text_offsets: dict[int, TextOffsets] = {}  # by answer
        self._held: dict[int, list[Delta]] = {}  # by prompt: deltas that came before the prompt's log-probabilities
        self._only_text = not (self._logprobs or echoes or self._with_prompt_logprobs or self._continuous_usage)
        self._only_text = self._only_text and not self._with_token_ids

    def events(self, delta: Delta) -> bytes:
        if self._only_text and delta.finish_reason is None:
            return self._texts.of(delta.index, delta.text, self._text_chunk)
        return b"".join(event(self._chunk(self._choice(each, each.index))) for each in self._after_prompt(delta))

    def _after_prompt(self, delta: Delta) -> list[Delta]:
        """`delta` and those held back. Of `n` answers the first one brings the log-probabilities that all echo."""
        if not (self._logprobs and self._echoes and self._num_drawn > 1):
            return [delta]
        prompt = delta.index // self._num_drawn
        deltas = [*self._held.pop(prompt, ()), delta]
        if len(self._answer_stream.prompt_logprobs(prompt)) < len(self._answer_stream.prompts[prompt]):
            self._held[prompt] = deltas
            return []
        return deltas

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(self._choice(Delta(index, text, [], None, []), index))

    def full(self, answers: list[Delta]) -> dict[str, Any]:
        return self._full([self._choice(answer, index) for index, answer in enumerate(self._best(answers))])

    def _best(self, answers: list[Delta]) -> list[Delta]:
        """Select the answers to each prompt with the highest mean log-probability, best first."""
        if self._num_returned == self._num_drawn:
            return answers
        groups = [answers[at : at + self._num_drawn] for at in range(0, len(answers), self._num_drawn)]
        return [
            each for group in groups for each in sorted(group, key=_mean_logprob, reverse=True)[: self._num_returned]
        ]

    def _choice(self, delta: Delta, index: int) -> dict[str, Any]:
        prompt = delta.index // self._num_drawn
        before = self._echoes[prompt] if self._echoes is not None else ""
        is_first = delta.index not in self._started
        echo = before if is_first else ""
        self._started.add(delta.index)
        choice = {"index": index, "text": echo + delta.text, "logprobs": None, "finish_reason": delta.finish_reason}
        if self._logprobs:
            if delta.index not in self._text_offsets:
                prompt_ids = self._answer_stream.prompts[prompt]
                self._text_offsets[delta.index] = TextOffsets(
                    self._tokenizer, prompt_ids, len(before), self._skip_special
                )
            choice["logprobs"] = completion_logprobs(self._shown, delta.logprobs, self._text_offsets[delta.index])
        if self._logprobs and echo:
            text_offsets = TextOffsets(self._tokenizer, [], 0, not self._echoes_special)
            entries, first = self._answer_stream.prompt_logprobs(prompt), self._answer_stream.prompts[prompt][0]
            of_prompt = completion_logprobs(self._shown, entries, text_offsets, first)
            choice["logprobs"] = {
                name: itertools.chain(values, choice["logprobs"][name]) for name, values in of_prompt.items()
            }
        if self._with_prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt)
        if delta.finish_reason is not None:
            choice |= {"stop_reason": delta.stop_reason, "matched_stop": delta.matched_stop}
        if self._with_token_ids:
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = self._answer_stream.prompts[prompt]
        return choice


def _mean_logprob(answer: Delta) -> float:
    values = [entry.logprob for entry in answer.logprobs]
    return sum(values) / len(values) if values else float("-inf")


class ChatResponseBuilder(OpenAIResponseBuilder):
    """Builds the bodies of `/v1/chat/completions`."""

    _ID_PREFIX = "chatcmpl"
    _OBJECT = "chat.completion"
    _CHUNK_OBJECT = "chat.completion.chunk"

    def __init__(
        self,
        answer_stream: AnswerStream,
        body: ChatRequest,
        request_id: str,
        model: str,
        answer_format: AnswerFormat,
    ) -> None:
        super().__init__(answer_stream, body, request_id, model)
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        self._echo = body.echoed
        self._format = answer_format
        self._calls_end = body.named_function is None  # answers with calls have the finish reason `tool_calls`
        self._parsers: dict[int, AnswerParser] = {}
        self._custom = CustomInputs([tool.function.name for tool in body.tools or () if tool.type == "custom"])
        self._only_text = answer_format.is_plain and self._num_top is None
        self._only_text = self._only_text and not (self._continuous_usage or self._with_token_ids)

    def events(self, delta: Delta) -> bytes:
        if self._only_text and delta.text and delta.finish_reason is None and delta.index in self._started:
            return self._texts.of(delta.index, delta.text, self._text_chunk)
        return b"".join(map(event, self._chunks(delta)))

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(_choice(index, {"content": text}))

    def _chunks(self, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.index not in self._started:
            self._started.add(delta.index)
            begun = self._chunk(_choice(delta.index, {"role": "assistant", "content": ""}))
            if self._with_token_ids:
                begun["prompt_token_ids"] = self._answer_stream.prompts[0]
            chunks.append(begun)
            if self._echo:
                chunks.append(self._chunk(_choice(delta.index, {"content": self._echo})))
        pieces = self._pieces(delta)
        logprobs = self._logprobs_of(delta)
        changes = [self._delta_of(piece, delta.index) for piece in pieces]
        if delta.finish_reason or ((logprobs or self._with_token_ids) and not changes):
            changes = changes or [{}]
        for number, change in enumerate(changes):
            choice = _choice(delta.index, change)
            if number == 0:
                choice["logprobs"] = logprobs
                if self._with_token_ids:
                    choice["token_ids"] = delta.token_ids
            if number == len(changes) - 1:
                choice["finish_reason"] = self._finish_reason(delta)
                if delta.finish_reason is not None:
                    choice |= {"stop_reason": delta.stop_reason, "matched_stop": delta.matched_stop}
            chunks.append(self._chunk(choice))
        return chunks

    def full(self, answers: list[Delta]) -> dict[str, Any]:
        body = self._full([self._answer(answer) for answer in answers])
        if self._with_prompt_logprobs:
            body["prompt_logprobs"] = self._prompt_logprobs(0)
        if self._with_token_ids:
            body["prompt_token_ids"] = self._answer_stream.prompts[0]
        return body

    def _answer(self, answer: Delta) -> dict[str, Any]:
        whole = WholeAnswer.of(self._pieces(answer))
        calls = [
            {"id": self._format.tools.new_id(name, index), **self._called(answer.index, index, name, arguments)}
            for index, (name, arguments) in enumerate(whole.calls)
        ]
        text = self._echo + whole.text
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if whole.reasoning:
            message |= _reasoning(whole.reasoning)
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs_of(answer),
            "finish_reason": self._finish_reason(answer),
            "stop_reason": answer.stop_reason,
            "matched_stop": answer.matched_stop,
        }
        return choice | ({"token_ids": answer.token_ids} if self._with_token_ids else {})

    def _pieces(self, delta: Delta) -> Sequence[ParserDelta]:
        """Parse the new text into reasoning, text and calls."""
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = AnswerParser(self._format)
        is_ended = delta.finish_reason is not None
        pieces = parser.feed(delta.text, is_ended, is_cut=delta.finish_reason != "stop")
        return self._custom.gather(delta.index, pieces, is_ended)

    def _called(self, choice: int, index: int, name: str | None, arguments: str) -> dict[str, Any]:
        """A call's type and content; without the name, a further part of it."""
        named = {} if name is None else {"name": name}
        if self._custom.is_custom(choice, index):
            return {**({"type": "custom"} if named else {}), "custom": {**named, "input": arguments}}
        return {**({"type": "function"} if named else {}), "function": {**named, "arguments": arguments}}

    def _answer_details(self) -> dict[str, Any]:
        num_reasoning_tokens = sum(
            self._parsers[index].num_reasoning_tokens(ids, self._tokenizer)
            for index, ids in enumerate(self._answer_stream.answer_ids)
            if index in self._parsers
        )
        return {"completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens}}

    def _logprobs_of(self, delta: Delta) -> dict[str, Any] | None:
        if self._num_top is None or not delta.logprobs:
            return None
        return chat_logprobs(self._shown, delta.logprobs, self._num_top)

    def _finish_reason(self, delta: Delta) -> str | None:
        called = self._calls_end and delta.index in self._parsers and self._parsers[delta.index].has_calls
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason

    def _delta_of(self, piece: ParserDelta, choice: int) -> dict[str, Any]:
        if isinstance(piece, TextDelta):
            return {"content": piece.text}
        if isinstance(piece, ReasoningDelta):
            return _reasoning(piece.text)
        call: dict[str, Any] = {"index": piece.index}
        if isinstance(piece, Call):
            call["id"] = self._format.tools.new_id(piece.name, piece.index)
            return {"tool_calls": [{**call, **self._called(choice, piece.index, piece.name, "")}]}
        return {"tool_calls": [{**call, **self._called(choice, piece.index, None, piece.text)}]}


def _reasoning(text: str) -> dict[str, Any]:
    """The reasoning under both names that clients read: DeepSeek's and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _choice(index: int, change: dict[str, Any]) -> dict[str, Any]:
    """A choice of a chat chunk."""
    return {"index": index, "delta": change, "logprobs": None, "finish_reason": None}
