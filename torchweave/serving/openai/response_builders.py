"""Response bodies of completions and chat completions, full and in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torchweave.serving.openai.generation import AnswerStream, Delta
from torchweave.serving.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs
from torchweave.serving.openai.sse import TextEventCache, event
from torchweave.serving.openai.tools import ArgumentsDelta, Call, ParserDelta, TextDelta, ToolCallParser
from torchweave.serving.tokenization import AsyncTokenizer


def usage(answer_stream: AnswerStream) -> dict[str, int]:
    """Build `usage`; each prompt is counted once."""
    prompt, answers = answer_stream.num_prompt_tokens, answer_stream.num_answer_tokens
    return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}


class CompletionResponseBuilder:
    """Builds the bodies of `/v1/completions`.

    Args:
        request_id: part of the response's `id`.
        logprobs: return log-probabilities of the tokens.
        echoes: the prompts' texts to prepend to the answers; None: no echo.
        echoes_special: these texts contain special tokens.
        skip_special_tokens: the answers exclude special tokens.
        with_prompt_logprobs: return the prompts' log-probabilities in vLLM's format.
        num_drawn: generated answers per prompt.
        num_kept: returned answers per prompt, the best.
        continuous_usage: include `usage` in each chunk.
    """

    def __init__(
        self,
        answer_stream: AnswerStream,
        request_id: str,
        model: str,
        tokenizer: AsyncTokenizer | None,
        *,
        logprobs: bool,
        echoes: list[str] | None,
        echoes_special: bool,
        skip_special_tokens: bool,
        with_prompt_logprobs: bool,
        num_drawn: int,
        num_kept: int,
        continuous_usage: bool,
    ) -> None:
        created = int(time.time())
        self._head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": created, "model": model}
        self._answer_stream, self._tokenizer = answer_stream, tokenizer
        self._logprobs, self._with_prompt_logprobs = logprobs, with_prompt_logprobs
        self._echoes, self._echoes_special, self._skip_special = echoes, echoes_special, skip_special_tokens
        self._num_drawn, self._num_kept = num_drawn, num_kept
        self._started: set[int] = set()
        self._text_offsets: dict[int, TextOffsets] = {}  # by answer
        self._continuous_usage = continuous_usage
        self._only_text = not logprobs and echoes is None and not with_prompt_logprobs and not continuous_usage
        self._texts = TextEventCache()

    def events(self, delta: Delta) -> bytes:
        if self._only_text and delta.finish_reason is None:
            return self._texts.of(delta.index, delta.text, self._text_chunk)
        return event(self._chunk(delta))

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(Delta(index, text, [], None, []))

    def _chunk(self, delta: Delta) -> dict[str, Any]:
        body = {**self._head, "choices": [self._choice(delta, delta.index)]}
        return body | {"usage": usage(self._answer_stream)} if self._continuous_usage else body

    def last_chunk(self) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage(self._answer_stream)}

    def full(self, answers: list[Delta]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(answer, index) for index, answer in enumerate(self._best(answers))],
            "usage": usage(self._answer_stream),
        }

    def _best(self, answers: list[Delta]) -> list[Delta]:
        """Select the answers to each prompt with the highest mean log-probability, best first."""
        if self._num_kept == self._num_drawn:
            return answers
        groups = [answers[at : at + self._num_drawn] for at in range(0, len(answers), self._num_drawn)]
        return [each for group in groups for each in sorted(group, key=_mean_logprob, reverse=True)[: self._num_kept]]

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
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._answer_stream.prompt_logprobs(prompt))
        return choice


def _mean_logprob(answer: Delta) -> float:
    values = [entry.logprob for entry in answer.logprobs]
    return sum(values) / len(values) if values else float("-inf")


class ChatResponseBuilder:
    """Builds the bodies of `/v1/chat/completions`.

    Args:
        request_id: part of the response's `id`.
        num_top: top log-probabilities per token; None: no log-probabilities.
        with_prompt_logprobs: return the prompt's log-probabilities in vLLM's format.
        parser: creates a tool-call parser for one answer; None: answers are not parsed.
        first_call_only: return only the first call of an answer.
        calls_end: answers with calls have the finish reason `tool_calls`.
        new_id: creates the id of a call.
        continuous_usage: include `usage` in each chunk.
    """

    def __init__(
        self,
        answer_stream: AnswerStream,
        request_id: str,
        model: str,
        tokenizer: AsyncTokenizer | None,
        *,
        num_top: int | None,
        with_prompt_logprobs: bool,
        parser: Callable[[], ToolCallParser] | None,
        first_call_only: bool,
        calls_end: bool,
        new_id: Callable[[], str],
        continuous_usage: bool,
    ) -> None:
        self._head = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}
        self._answer_stream, self._tokenizer = answer_stream, tokenizer
        self._num_top, self._with_prompt_logprobs = num_top, with_prompt_logprobs
        self._parser, self._first_call_only = parser, first_call_only
        self._calls_end, self._new_id, self._continuous_usage = calls_end, new_id, continuous_usage
        self._parsers: dict[int, ToolCallParser] = {}
        self._called: set[int] = set()  # answers with calls
        self._started: set[int] = set()
        self._texts = TextEventCache()

    def events(self, delta: Delta) -> bytes:
        only_text = self._parser is None and self._num_top is None and not self._continuous_usage
        if only_text and delta.text and delta.finish_reason is None and delta.index in self._started:
            return self._texts.of(delta.index, delta.text, self._text_chunk)
        return b"".join(map(event, self._chunks(delta)))

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(index, {"content": text})

    def _chunks(self, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.index not in self._started:
            self._started.add(delta.index)
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        pieces = self._pieces(delta)
        logprobs = self._logprobs_of(delta)
        changes = [self._delta_of(piece) for piece in pieces]
        if delta.finish_reason or (logprobs and not changes):
            changes = changes or [{}]
        for number, change in enumerate(changes):
            chunk = self._chunk(delta.index, change)
            if number == 0:
                chunk["choices"][0]["logprobs"] = logprobs
            if number == len(changes) - 1:
                chunk["choices"][0]["finish_reason"] = self._finish_reason(delta)
            chunks.append(chunk)
        return chunks

    def last_chunk(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage(self._answer_stream)}

    def full(self, answers: list[Delta]) -> dict[str, Any]:
        choices = [self._choice(answer) for answer in answers]
        body = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(self._answer_stream)}
        if self._with_prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._answer_stream.prompt_logprobs(0))
        return body

    def _choice(self, answer: Delta) -> dict[str, Any]:
        pieces = self._pieces(answer)
        text = "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))
        calls = [
            {
                "id": self._new_id(),
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
        if self._parser is None:
            return [TextDelta(delta.text)] if delta.text else []
        parser = self._parsers.setdefault(delta.index, self._parser())
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
                "tool_calls": [{"index": piece.index, "id": self._new_id(), "type": "function", "function": function}]
            }
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _chunk(self, index: int, change: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": change, "logprobs": None, "finish_reason": None}
        body = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return body | {"usage": usage(self._answer_stream)} if self._continuous_usage else body
