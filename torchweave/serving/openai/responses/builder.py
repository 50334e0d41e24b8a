"""The response to one request of the Responses API, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from torchweave.serving.errors import ApiError
from torchweave.serving.openai.answer_parser import AnswerFormat, AnswerParser
from torchweave.serving.openai.custom_tools import custom_input
from torchweave.serving.openai.generation import AnswerStream, Delta
from torchweave.serving.openai.logprobs import chat_logprobs
from torchweave.serving.openai.response_builders import ResponseBuilder, named_event
from torchweave.serving.openai.responses.protocol import ResponsesRequest
from torchweave.serving.openai.responses.tools import Origin, ResponseTools
from torchweave.serving.openai.tools import ArgumentsDelta, Call, ParserDelta, ReasoningDelta, TextDelta

_ECHOED = (
    "background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id",
    "prompt_cache_key", "safety_identifier", "store", "top_logprobs", "user",
)  # fmt: skip

_NO_TOOL = Origin("")


def new_response(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """A response in progress. Its id is random: whoever knows it can read the response."""
    echoed = {name: getattr(body, name) for name in _ECHOED}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "temperature": None,
        "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": None,
        "truncation": body.truncation or "disabled",
        "usage": None,
        **echoed,
        "metadata": body.metadata or {},
        "top_logprobs": body.top_logprobs or 0,
    }


class ResponsesBuilder(ResponseBuilder):
    """Builds a response.

    Args:
        tools: of the request.
        response: the response in progress, which is completed in place.
        finished: called once with the response when it has completed or failed.
    """

    def __init__(
        self,
        answer_stream: AnswerStream,
        answer_format: AnswerFormat,
        body: ResponsesRequest,
        tools: ResponseTools,
        response: dict[str, Any],
        finished: Callable[[dict[str, Any]], None],
    ) -> None:
        self._answer_stream, self._tokenizer = answer_stream, answer_stream.tokenizer
        self._parser, self._new_call_id = AnswerParser(answer_format), answer_format.tools.new_id
        self._num_top = (body.top_logprobs or 0) if body.with_logprobs else None
        self._response, self._finished, self._tools = response, finished, tools
        self._logprobs: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._num_events = 0
        self._finish_reason: str | None = None
        response["temperature"], response["top_p"] = answer_stream.params.temperature, answer_stream.params.top_p

    # -- events --------------------------------------------------------------------------------------------------------

    def begin(self) -> bytes:
        created = self._event("response.created", response=self._response)
        return created + self._event("response.in_progress", response=self._response)

    def events(self, delta: Delta) -> bytes:
        self._finish_reason = delta.finish_reason
        pieces = self._parser.feed(delta.text, delta.finish_reason is not None, is_cut=delta.finish_reason != "stop")
        logprobs = self._new_logprobs(delta) if any(isinstance(piece, TextDelta) for piece in pieces) else []
        parts: list[bytes] = []
        for piece in pieces:
            parts.append(self._add(piece, logprobs))
            if isinstance(piece, TextDelta):
                logprobs = []
        if delta.finish_reason is not None:
            parts.append(self._close())
        return b"".join(parts)

    def end(self) -> bytes:
        self._complete()
        return self._event(f"response.{self._response['status']}", response=self._response)

    def failure(self, error: ApiError) -> bytes:
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        self._response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        self._finished(self._response)
        return self._event("response.failed", response=self._response)

    def full(self, answers: list[Delta]) -> dict[str, Any]:
        self.events(answers[0])
        self._complete()
        return self._response

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return named_event(kind, sequence_number=self._num_events - 1, **fields)

    def _complete(self) -> None:
        """Set what is known at the end."""
        ids, response, answers = self._answer_stream.answer_ids[0], self._response, self._answer_stream
        if self._finish_reason == "length":
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        elif self._finish_reason == "abort":
            response |= {"status": "incomplete", "incomplete_details": {"reason": "abort"}}
        else:
            response |= {"status": "completed", "completed_at": int(time.time())}
        response["usage"] = {
            "input_tokens": answers.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answers.num_cached_tokens},
            "output_tokens": len(ids),
            "output_tokens_details": {"reasoning_tokens": self._parser.num_reasoning_tokens(ids, self._tokenizer)},
            "total_tokens": answers.num_prompt_tokens + len(ids),
        }
        self._finished(response)

    def _new_logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        """Log-probabilities of the tokens of a delta that contains text."""
        if self._num_top is None:
            return []
        entries = delta.logprobs
        if len(entries) == len(self._answer_stream.answer_ids[0]):  # the whole answer at once
            entries = entries[self._parser.num_reasoning_tokens(delta.token_ids, self._tokenizer) :]
        new = list(chat_logprobs(self._tokenizer, entries, self._num_top)["content"])
        self._logprobs += new
        return new

    # -- items of the output -------------------------------------------------------------------------------------------

    def _add(self, piece: ParserDelta, logprobs: list[dict[str, Any]]) -> bytes:
        """Add a part of the answer to the open item, or to a new one."""
        if isinstance(piece, Call):
            origin = self._tools.origin(piece.name)
            prefix = "ctc" if origin.is_custom else "fc"
            call_id = self._new_call_id(piece.name, piece.index)
            return self._close() + self._begin_item("call", prefix, call_id, origin)
        if isinstance(piece, ArgumentsDelta):
            if self._open is not None and self._open.origin.is_custom:
                self._open.texts.append(piece.text)  # its text is within the arguments: told at the end
                return b""
            return self._extend("response.function_call_arguments.delta", piece.text)
        if isinstance(piece, ReasoningDelta):
            start = self._begin_content("reasoning", "rs", {"type": "reasoning_text", "text": ""})
            return start + self._extend("response.reasoning_text.delta", piece.text, content_index=0)
        start = self._begin_content("message", "msg", _text_part("", []))
        return start + self._extend("response.output_text.delta", piece.text, content_index=0, logprobs=logprobs)

    def _begin_content(self, kind: str, prefix: str, part: dict[str, Any]) -> bytes:
        """Open an item with a part, unless one of this kind is open."""
        if self._open is not None and self._open.kind == kind:
            return b""
        closed = self._close()
        begun = self._begin_item(kind, prefix)
        return closed + begun + self._event("response.content_part.added", **self._place(), content_index=0, part=part)

    def _begin_item(self, kind: str, prefix: str, call_id: str = "", origin: Origin = _NO_TOOL) -> bytes:
        self._open = _OpenItem(kind, f"{prefix}_{uuid.uuid4().hex}", call_id, origin)
        item = self._open.item("in_progress", [])
        if kind != "call":
            item["content"] = []
        return self._event("response.output_item.added", output_index=len(self._response["output"]), item=item)

    def _extend(self, kind: str, text: str, **fields: Any) -> bytes:
        assert self._open is not None
        self._open.texts.append(text)
        return self._event(kind, **self._place(), delta=text, **fields)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.item_id, "output_index": len(self._response["output"])}

    def _close(self) -> bytes:
        """End the open item."""
        closing = self._open
        if closing is None:
            return b""
        is_cut = self._finish_reason in ("length", "abort")
        item = closing.item("incomplete" if is_cut else "completed", self._logprobs)
        place, text = self._place(), closing.text
        if closing.kind == "call" and closing.origin.is_custom:
            done = self._event("response.custom_tool_call_input.delta", **place, delta=item["input"])
            done += self._event("response.custom_tool_call_input.done", **place, input=item["input"])
        elif closing.kind == "call":
            name = closing.origin.name
            done = self._event("response.function_call_arguments.done", **place, name=name, arguments=text)
        else:
            logprobs = {"logprobs": self._logprobs} if closing.kind == "message" else {}
            name = "output_text" if closing.kind == "message" else "reasoning_text"
            done = self._event(f"response.{name}.done", **place, content_index=0, text=text, **logprobs)
            done += self._event("response.content_part.done", **place, content_index=0, part=item["content"][0])
        done += self._event("response.output_item.done", output_index=place["output_index"], item=item)
        self._response["output"].append(item)
        self._open = None
        return done


class _OpenItem:
    """An item of the output that is being written."""

    def __init__(self, kind: str, item_id: str, call_id: str, origin: Origin) -> None:
        self.kind, self.item_id, self.call_id, self.origin = kind, item_id, call_id, origin
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def item(self, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.kind == "call":
            origin = self.origin
            fields = {"id": self.item_id, "type": "function_call", "call_id": self.call_id, "name": origin.name}
            if origin.namespace is not None:
                fields["namespace"] = origin.namespace
            if origin.is_custom:
                return fields | {"type": "custom_tool_call", "input": custom_input(self.text), "status": status}
            return fields | {"arguments": self.text, "status": status}
        if self.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": self.text}]
            return {"id": self.item_id, "type": "reasoning", "summary": [], "content": content, "status": status}
        content = [_text_part(self.text, logprobs)]
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
