"""Chat requests: render messages and tools with the chat template, and choose the tool-call parser."""

from __future__ import annotations

import json
import uuid
from typing import Any

from torchweave.serving.errors import ApiError
from torchweave.serving.openai.protocol import ChatRequest, ChatTemplate, Message
from torchweave.serving.openai.tools import (
    ToolUse,
    detect_tool_format,
    forced_schema,
    make_forced_parser,
    make_tool_parser,
)
from torchweave.serving.service import Service

# Arguments of the tokenizer, which `chat_template_kwargs` must not set.
_RESERVED = frozenset(
    (
        "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
        "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)  # fmt: skip


def resolve_tool_use(service: Service, body: ChatRequest) -> ToolUse:
    """Resolve `tools` and `tool_choice` of a request.

    Raises:
        ApiError: 400, the tools are invalid or not supported by the model.
    """
    choice, named, tools = body.tool_choice, body.named_function, body.tools
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice requires a tool call, but tools is empty; add tools.", param="tool_choice")
        return ToolUse()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "Two tools have the same name; rename one.", param="tools")
    if named is not None and named not in names:
        raise ApiError(
            400, f"tool_choice {named!r} is not in tools; choose from {', '.join(names)}.", param="tool_choice"
        )
    if choice == "none":
        return ToolUse()
    template = service.require_tokenizer().chat_template
    if "tools" not in template:
        sentence = (
            "The chat template of this model does not support tools; leave tools out, or serve the model with a chat_template "
            "that does."
        )
        raise ApiError(400, sentence, param="tools")
    tool_definitions = [tool.model_dump(exclude_none=True) for tool in tools]
    configured = service.settings.tool_call_parser
    tool_format = detect_tool_format(template) if configured == "auto" else configured
    if named is not None or choice == "required":
        schema = forced_schema(tools, named, body.parallel_tool_calls is not False)
        return ToolUse(tool_definitions, schema, lambda: make_forced_parser(tools, named))
    if tool_format is None:
        sentence = "The tool-call format of this model was not detected; serve the model with tool_call_parser."
        raise ApiError(400, sentence, param="tools")
    if tool_format == "mistral":
        return ToolUse(
            tool_definitions, None, lambda: make_tool_parser(tool_format, tools), True, lambda: uuid.uuid4().hex[:9]
        )
    return ToolUse(tool_definitions, None, lambda: make_tool_parser(tool_format, tools))


async def encode(service: Service, body: ChatTemplate, tools: list[dict[str, Any]] | None) -> list[int]:
    """Encode a conversation as token ids.

    Raises:
        ApiError: 400, template variables that are reserved or not supported by the template.
        ValueError: the model has no template, or the template rejects the messages.
    """
    variables = dict(body.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED & set(variables)):
        raise ApiError(
            400,
            f"chat_template_kwargs must not contain {', '.join(reserved)}; leave them out.",
            param="chat_template_kwargs",
        )
    if tools is not None:
        variables["tools"] = tools
    if body.reasoning_effort is not None:
        if "reasoning_effort" not in service.require_tokenizer().chat_template:
            sentence = "The chat template of this model does not support reasoning_effort; leave it out."
            raise ApiError(400, sentence, param="reasoning_effort")
        variables["reasoning_effort"] = body.reasoning_effort
    if body.continue_final_message:
        if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
            raise ApiError(
                400, "continue_final_message needs add_generation_prompt=false.", param="continue_final_message"
            )
        variables["continue_final_message"] = True
    return await service.require_tokenizer().chat(
        [_message(each) for each in body.messages],
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        **variables,
    )


def _message(message: Message) -> dict[str, Any]:
    """Convert a message for the template: `content` is always present, arguments of tool calls are objects."""
    fields = message.model_dump(exclude_none=True)
    fields.setdefault("content", "")
    if fields.get("tool_calls"):
        fields["tool_calls"] = [_call(call) for call in fields["tool_calls"]]
    else:
        fields.pop("tool_calls", None)
    return fields


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
