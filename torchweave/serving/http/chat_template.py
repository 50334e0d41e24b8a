"""A conversation as tokens: messages and tools through the model's chat template, and how its answer is read for calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchweave.serving.errors import ApiError
from torchweave.serving.openai.protocol import ChatRequest, ChatTemplate, Message
from torchweave.serving.openai.tools import ToolCallParser, forced_schema, make_forced_parser, make_tool_parser
from torchweave.serving.service import Service

# Names in `chat_template_kwargs` that are arguments of the tokenizer, not variables of the template.
_RESERVED = frozenset(
    (
        "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
        "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)  # fmt: skip


@dataclass(frozen=True)
class ToolUse:
    """How tools take part in an answer.

    Attributes:
        tools: what the template is told; None: nothing.
        forced: the JSON schema that the answer is held to.
        parser: makes a parser of calls for one answer; None: calls are not looked for.
        keep_special: the model calls by means of special tokens.
        new_id: of a call.
    """

    tools: list[dict[str, Any]] | None = None
    forced: dict[str, Any] | None = None
    parser: Callable[[], ToolCallParser] | None = None
    keep_special: bool = False
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"


def resolve_tool_use(service: Service, body: ChatRequest) -> ToolUse:
    """What the tools of a request mean for its answer.

    Raises:
        ApiError: 400, tools that this model or this choice cannot have.
    """
    choice, named, tools = body.tool_choice, body.named_function, body.tools
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice asks for a call, but there are no tools.", param="tool_choice")
        return ToolUse()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "Two tools have the same name; rename one of them.", param="tools")
    if named is not None and named not in names:
        raise ApiError(400, f"tool_choice names {named!r}, but the tools are {', '.join(names)}.", param="tool_choice")
    if choice == "none":
        return ToolUse()
    template = service.chat_template()
    if "tools" not in template:
        sentence = "The chat template of this model knows no tools; leave tools out, or serve it with a chat_template that does."
        raise ApiError(400, sentence, param="tools")
    tool_definitions = [tool.model_dump(exclude_none=True) for tool in tools]
    tool_format = service.tool_format(template)
    if named is not None or choice == "required":
        schema = forced_schema(tools, named, body.parallel_tool_calls is not False)
        return ToolUse(tool_definitions, schema, lambda: make_forced_parser(tools, named))
    if tool_format is None:
        sentence = "How this model calls tools is not known by its chat template; serve it with tool_call_parser."
        raise ApiError(400, sentence, param="tools")
    if tool_format == "mistral":
        return ToolUse(
            tool_definitions, None, lambda: make_tool_parser(tool_format, tools), True, lambda: uuid.uuid4().hex[:9]
        )
    return ToolUse(tool_definitions, None, lambda: make_tool_parser(tool_format, tools))


async def encode(service: Service, body: ChatTemplate, tools: list[dict[str, Any]] | None) -> list[int]:
    """Token ids of a conversation.

    Raises:
        ApiError: 400, variables that no template may be given, or that this one does not know.
        ValueError: there is no template, or it refuses the messages.
    """
    variables = dict(body.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED & set(variables)):
        raise ApiError(400, f"chat_template_kwargs must not hold {', '.join(reserved)}.", param="chat_template_kwargs")
    if tools is not None:
        variables["tools"] = tools
    if body.reasoning_effort is not None:
        if "reasoning_effort" not in service.chat_template():
            sentence = "The chat template of this model knows no reasoning_effort; leave it out."
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
    """A message as templates know it: text that is there, and arguments of calls as objects."""
    found = message.model_dump(exclude_none=True)
    found.setdefault("content", "")
    if found.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in found["tool_calls"]]
    else:
        found.pop("tool_calls", None)
    return found


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):  # no JSON, or nested too deeply to be read
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
