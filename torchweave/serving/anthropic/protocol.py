"""Bodies of `/v1/messages`, and their translation to a chat request."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from torchweave.serving.errors import ApiError
from torchweave.serving.openai.bounds import MAX_STOPS, MAX_TOOLS, ModelWithBounds
from torchweave.serving.openai.protocol import Body, ChatRequest, Priority, Whole

_SAME_NAME_FIELDS = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "chat_template_kwargs",
    "priority",
)
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Turn(ModelWithBounds):
    """A message: a text, or a list of content blocks."""

    model_config = ConfigDict(extra="ignore", strict=True)
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ClientTool(ModelWithBounds):
    """A function that the model may call."""

    model_config = ConfigDict(extra="ignore", strict=True)
    name: str
    type: Literal["custom"] = "custom"
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Body):
    """Whether the model calls a function."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether the model reasons; the budget is accepted and ignored."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = None
    display: str | None = None


class OutputConfig(Body):
    """Reasoning effort, and the format of the answer (`{"type": "json_schema", "schema": ...}`)."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(Body):
    """Body of `/v1/messages/count_tokens`.

    Accepted and ignored: `cache_control` (prefixes are cached anyway), `context_management`, `speed`, `user_profile_id`,
    `workspace_id`.
    """

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_chat(self) -> ChatRequest:
        """Translate to a chat request.

        Raises:
            ValueError: a block, a tool or a field is invalid.
        """
        return ChatRequest.model_validate(self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {name: getattr(self, name, None) for name in _SAME_NAME_FIELDS}
        system = [] if self.system is None else [{"role": "system", "content": _parts(self.system)}]
        fields["messages"] = system + [message for turn in self.messages for message in _messages(turn)]
        if self.messages[-1].role == "assistant":  # the answer continues it
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            fields["tools"] = [_function(tool) for tool in self.tools]
            fields |= self._tool_choice()
        if self.thinking is not None:
            switch = self.thinking.type != "disabled"
            variables = {"enable_thinking": switch, "thinking": switch}
            fields["chat_template_kwargs"] = variables | (self.chat_template_kwargs or {})
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
            if self.output_config.format is not None:
                fields["response_format"] = _response_format(self.output_config.format)
        return fields

    def _tool_choice(self) -> dict[str, Any]:
        choice = self.tool_choice
        if choice is None:
            return {}
        named = {"type": "function", "function": {"name": choice.name}}
        parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
        return {"tool_choice": named if choice.type == "tool" else _TOOL_CHOICES[choice.type], **parallel}


class MessagesRequest(CountTokensRequest):
    """Body of `/v1/messages`. Accepted and ignored: `metadata`, `diagnostics`, `service_tier`, `inference_geo`."""

    max_tokens: Whole
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    metadata: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    # fields of chat requests that Anthropic's API does not have
    seed: Whole | None = None
    min_p: float | None = None
    priority: Priority = 0

    def _chat_fields(self) -> dict[str, Any]:
        return super()._chat_fields() | {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}


def _function(tool: ClientTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise ValueError('output_config.format must be {"type": "json_schema", "schema": {...}}.')
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}


def _messages(turn: Turn) -> list[dict[str, Any]]:
    """Chat messages of a turn: results of tools precede the text that a user sends with them."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    for block in turn.content:
        _check(block)
    results = [block for block in turn.content if block.get("type") == "tool_result"]
    messages = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _parts(block.get("content") or "")}
        for block in results
    ]
    calls = [_call(block) for block in turn.content if block.get("type") == "tool_use"]
    thoughts = [str(block.get("thinking", "")) for block in turn.content if block.get("type") == "thinking"]
    parts = _parts([block for block in turn.content if block.get("type") not in _NOT_CONTENT])
    if not parts and results:
        return messages
    message: dict[str, Any] = {"role": turn.role, "content": parts or None}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [*messages, message]


_REQUIRED: dict[str, tuple[str, ...]] = {
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
    "redacted_thinking": ("data",),
}
"""Fields of blocks that must be texts, and not empty."""
_NOT_CONTENT = ("tool_result", "tool_use", "thinking", "redacted_thinking")


def _check(block: dict[str, Any]) -> None:
    """Raise ApiError 400 if a block has no id, name, input or text where Anthropic's API needs one."""
    kind = str(block.get("type"))
    for name in _REQUIRED.get(kind, ()):
        if not isinstance(block.get(name), str) or not block[name]:
            raise ApiError(400, f"A {kind} block needs {name}, a text that is not empty.", param="messages")
    if kind in ("text", "thinking") and not isinstance(block.get(kind), str):
        raise ApiError(400, f"A {kind} block needs {kind}, a text.", param="messages")
    if kind == "tool_use" and not isinstance(block.get("input"), dict):
        raise ApiError(400, "A tool_use block needs input, an object.", param="messages")


def _call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}


def _parts(content: str | list[dict[str, Any]]) -> Any:
    """Content blocks as parts of a chat message; a single text as a text."""
    if isinstance(content, str):
        return content
    parts = [_part(block) for block in content]
    return parts[0].get("text") if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _image_url(source: Any) -> str:
    """The source of an image block as a URL."""
    source = source if isinstance(source, dict) else {}
    kind, url, data, media_type = (source.get(name) for name in ("type", "url", "data", "media_type"))
    if kind == "url" and isinstance(url, str):
        return url
    if kind == "base64" and isinstance(data, str) and isinstance(media_type, str):
        return f"data:{media_type};base64,{data}"
    raise ApiError(
        400,
        'The source of an image block is not supported; send {"type": "base64", "media_type": "image/png", "data": ...}.',
        param="messages",
    )


def _part(block: dict[str, Any]) -> dict[str, Any]:
    _check(block)
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return {"type": "text", "text": block["text"]}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(source)}}
    supported = "text, image, tool_use, tool_result or thinking"
    raise ApiError(
        400,
        f"A content block has the type {str(kind)[:80]!r}, which is not supported; send {supported}.",
        param="messages",
    )
