"""Answers and errors in the format of Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from torchweave.serving.errors import ApiError
from torchweave.serving.openai.answer_parser import AnswerFormat, AnswerParser
from torchweave.serving.openai.generation import AnswerStream, Delta
from torchweave.serving.openai.response_builders import ResponseBuilder, event, named_event
from torchweave.serving.openai.tools import ArgumentsDelta, Call, ParserDelta, ReasoningDelta

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """An error in Anthropic's format."""
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def anthropic_error(body: bytes, status: int, request_id: str) -> bytes:
    """Rewrite an error response from OpenAI's format."""
    try:
        error = msgspec.json.decode(body)
        if error.get("type") == "error":  # rewritten by the first HTTP process
            return body
        message = error["error"]["message"]
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return msgspec.json.encode(error_body(status, message, request_id))


class MessagesBuilder(ResponseBuilder):
    """Builds a message, whole or as events.

    Args:
        request_id: part of the message's id.
        model: name in the message.
    """

    def __init__(self, answer_stream: AnswerStream, answer_format: AnswerFormat, request_id: str, model: str) -> None:
        self._answer_stream, self._request_id = answer_stream, request_id
        self._parser, self._new_call_id = AnswerParser(answer_format), answer_format.tools.new_id
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the open block, the last one
        self._is_open = False
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}

    def begin(self) -> bytes:
        # How many tokens of the prompt are cached is known at the end.
        usage = {"input_tokens": self._answer_stream.num_prompt_tokens, "output_tokens": 0}
        message = {**self._head, "content": [], **self._stop, "usage": usage}
        return named_event("message_start", message=message)

    def events(self, delta: Delta) -> bytes:
        pieces = self._parser.feed(delta.text, delta.finish_reason is not None, is_cut=delta.finish_reason != "stop")
        parts = [self._add(piece) for piece in pieces]
        if delta.finish_reason is not None:
            parts.append(self._close())
            self._stop = self._stop_fields(delta)
        return b"".join(parts)

    def end(self) -> bytes:
        return named_event("message_delta", delta=self._stop, usage=self._usage) + named_event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\n" + event(error_body(error.status, error.message, self._request_id))

    def full(self, answers: list[Delta]) -> dict[str, Any]:
        self.events(answers[0])
        return {**self._head, "content": self._blocks, **self._stop, "usage": self._usage}

    @property
    def _usage(self) -> dict[str, int]:
        """Token counts; Anthropic counts cached tokens of the prompt apart."""
        answers = self._answer_stream
        return {
            "input_tokens": answers.num_prompt_tokens - answers.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answers.num_cached_tokens,
            "output_tokens": answers.num_answer_tokens,
        }

    def _stop_fields(self, delta: Delta) -> dict[str, Any]:
        sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        reason = {"length": "max_tokens", "abort": "pause_turn"}.get(delta.finish_reason or "", "end_turn")
        if reason == "end_turn" and sequence is not None:
            reason = "stop_sequence"
        elif reason == "end_turn" and self._parser.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _add(self, piece: ParserDelta) -> bytes:
        """Add a part of the answer to the open block, or to a new one."""
        if isinstance(piece, Call):
            return self._begin_block(
                {"type": "tool_use", "id": self._new_call_id(piece.name, piece.index), "name": piece.name, "input": {}}
            )
        if isinstance(piece, ArgumentsDelta):
            return self._extend("input_json_delta", "partial_json", piece.text)
        if isinstance(piece, ReasoningDelta):
            begun = self._continue_block("thinking", {"thinking": "", "signature": ""})
            return begun + self._extend("thinking_delta", "thinking", piece.text)
        return self._continue_block("text", {"text": ""}) + self._extend("text_delta", "text", piece.text)

    def _continue_block(self, kind: str, fields: dict[str, Any]) -> bytes:
        if self._is_open and self._blocks[-1]["type"] == kind:
            return b""
        return self._begin_block({"type": kind, **fields})

    def _begin_block(self, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._blocks.append(block)
        self._texts, self._is_open = [], True
        return closed + named_event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _extend(self, kind: str, name: str, text: str) -> bytes:
        self._texts.append(text)
        return named_event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, name: text})

    def _close(self) -> bytes:
        """End the open block."""
        if not self._is_open:
            return b""
        block, text = self._blocks[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        self._is_open = False
        return named_event("content_block_stop", index=len(self._blocks) - 1)


def _arguments(text: str) -> dict[str, Any]:
    """Arguments of a call; empty if they were cut off, which `stop_reason` reports, or nested too deeply to be sent."""
    try:
        arguments = json.loads(text or "{}")
        msgspec.json.encode(arguments)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}
