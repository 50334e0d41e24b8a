"""Response bodies of completions and chat completions, full and in chunks (server-sent events)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from torchweave.serving.openai.generation import AnswerStream, Delta
from torchweave.serving.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs
from torchweave.serving.openai.protocol import ChatRequest, CompletionRequest, Generation, StreamOptions
from torchweave.serving.openai.tools import ArgumentsDelta, Call, ParserDelta, TextDelta, ToolCallParser, ToolUse

_encode = msgspec.json.encode
_MARK = "\0text\0"


def event(body: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


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
    """Builds the response bodies of one request.

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
        self._continuous_usage = (body.stream_options or StreamOptions()).continuous_usage_stats
        self._started: set[int] = set()
        self._texts = TextEventCache()

    @abstractmethod
    def events(self, delta: Delta) -> bytes:
        """Encode the stream events of a delta; may be empty."""

    @abstractmethod
    def full(self, answers: list[Delta]) -> dict[str, Any]:
        """The body of a response that is not streamed."""

    def last_chunk(self) -> dict[str, Any]:
        """The final event, with token counts."""
        return self._with_usage({**self._head, "choices": []})

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        body = {**self._head, "choices": [choice]}
        return self._with_usage(body) if self._continuous_usage else body

    def _full(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._with_usage({**self._head, "object": self._OBJECT, "choices": choices})

    def _with_usage(self, body: dict[str, Any]) -> dict[str, Any]:
        """Add `usage`; each prompt is counted once."""
        prompt, answers = self._answer_stream.num_prompt_tokens, self._answer_stream.num_answer_tokens
        body["usage"] = {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}
        return body

    def _prompt_logprobs(self, prompt: int) -> list[dict[str, Any] | None]:
        return prompt_logprobs(self._tokenizer, self._answer_stream.prompt_logprobs(prompt))


class CompletionResponseBuilder(ResponseBuilder):
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
        self._num_drawn, self._num_returned = (
            params.n,
            body.n or 1,
        )  # answers per prompt, of which the best are returned
        self._text_offsets: dict[int, TextOffsets] = {}  # by answer
        self._only_text = not (self._logprobs or echoes or self._with_prompt_logprobs or self._continuous_usage)

    def events(self, delta: Delta) -> bytes:
        if self._only_text and delta.finish_reason is None:
            return self._texts.of(delta.index, delta.text, self._text_chunk)
        return event(self._chunk(self._choice(delta, delta.index)))

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
        echo = before if delta.index not in self._started else ""
        self._started.add(delta.index)
        choice = {"index": index, "text": echo + delta.text, "logprobs": None, "finish_reason": delta.finish_reason}
        if self._logprobs:
            if delta.index not in self._text_offsets:
                prompt_ids = self._answer_stream.prompts[prompt]
                self._text_offsets[delta.index] = TextOffsets(
                    self._tokenizer, prompt_ids, len(before), self._skip_special
                )
            choice["logprobs"] = completion_logprobs(self._tokenizer, delta.logprobs, self._text_offsets[delta.index])
        if self._logprobs and echo:
            text_offsets = TextOffsets(self._tokenizer, [], 0, not self._echoes_special)
            entries, first = self._answer_stream.prompt_logprobs(prompt), self._answer_stream.prompts[prompt][0]
            of_prompt = completion_logprobs(self._tokenizer, entries, text_offsets, first)
            choice["logprobs"] = {name: values + choice["logprobs"][name] for name, values in of_prompt.items()}
        if self._with_prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt)
        return choice


def _mean_logprob(answer: Delta) -> float:
    values = [entry.logprob for entry in answer.logprobs]
    return sum(values) / len(values) if values else float("-inf")


class ChatResponseBuilder(ResponseBuilder):
    """Builds the bodies of `/v1/chat/completions`."""

    _ID_PREFIX = "chatcmpl"
    _OBJECT = "chat.completion"
    _CHUNK_OBJECT = "chat.completion.chunk"

    def __init__(
        self, answer_stream: AnswerStream, body: ChatRequest, request_id: str, model: str, tools: ToolUse
    ) -> None:
        super().__init__(answer_stream, body, request_id, model)
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        self._tools = tools
        self._first_call_only = body.parallel_tool_calls is False
        self._calls_end = body.named_function is None  # answers with calls have the finish reason `tool_calls`
        self._parsers: dict[int, ToolCallParser] = {}
        self._called: set[int] = set()  # answers with calls

    def events(self, delta: Delta) -> bytes:
        only_text = self._tools.parser is None and self._num_top is None and not self._continuous_usage
        if only_text and delta.text and delta.finish_reason is None and delta.index in self._started:
            return self._texts.of(delta.index, delta.text, self._text_chunk)
        return b"".join(map(event, self._chunks(delta)))

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(_choice(index, {"content": text}))

    def _chunks(self, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.index not in self._started:
            self._started.add(delta.index)
            chunks.append(self._chunk(_choice(delta.index, {"role": "assistant", "content": ""})))
        pieces = self._pieces(delta)
        logprobs = self._logprobs_of(delta)
        changes = [self._delta_of(piece) for piece in pieces]
        if delta.finish_reason or (logprobs and not changes):
            changes = changes or [{}]
        for number, change in enumerate(changes):
            choice = _choice(delta.index, change)
            if number == 0:
                choice["logprobs"] = logprobs
            if number == len(changes) - 1:
                choice["finish_reason"] = self._finish_reason(delta)
            chunks.append(self._chunk(choice))
        return chunks

    def full(self, answers: list[Delta]) -> dict[str, Any]:
        body = self._full([self._answer(answer) for answer in answers])
        if self._with_prompt_logprobs:
            body["prompt_logprobs"] = self._prompt_logprobs(0)
        return body

    def _answer(self, answer: Delta) -> dict[str, Any]:
        pieces = self._pieces(answer)
        text = "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))
        calls = [
            {
                "id": self._tools.new_id(),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": "".join(
                        p.text for p in pieces if isinstance(p, ArgumentsDelta) and p.index == call.index
                    ),
                },
            }
            for call in pieces
            if isinstance(call, Call)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs_of(answer),
            "finish_reason": self._finish_reason(answer),
        }

    def _pieces(self, delta: Delta) -> list[ParserDelta]:
        """Parse the new text into text and calls."""
        if self._tools.parser is None:
            return [TextDelta(delta.text)] if delta.text else []
        parser = self._parsers.setdefault(delta.index, self._tools.parser())
        pieces = parser.feed(delta.text)
        if delta.finish_reason:
            pieces = [*pieces, *parser.finish()]
        if self._first_call_only:
            pieces = [piece for piece in pieces if isinstance(piece, TextDelta) or piece.index == 0]
        if any(isinstance(piece, Call) for piece in pieces):
            self._called.add(delta.index)
        return pieces

    def _logprobs_of(self, delta: Delta) -> dict[str, Any] | None:
        if self._num_top is None or not delta.logprobs:
            return None
        return chat_logprobs(self._tokenizer, delta.logprobs, self._num_top)

    def _finish_reason(self, delta: Delta) -> str | None:
        called = self._calls_end and delta.index in self._called
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason

    def _delta_of(self, piece: ParserDelta) -> dict[str, Any]:
        if isinstance(piece, TextDelta):
            return {"content": piece.text}
        if isinstance(piece, Call):
            function = {"name": piece.name, "arguments": ""}
            return {
                "tool_calls": [
                    {"index": piece.index, "id": self._tools.new_id(), "type": "function", "function": function}
                ]
            }
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _choice(index: int, change: dict[str, Any]) -> dict[str, Any]:
    """A choice of a chat chunk."""
    return {"index": index, "delta": change, "logprobs": None, "finish_reason": None}
