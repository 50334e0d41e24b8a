"""Bodies of `/v1/messages`, and their translation to a chat request."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from torchweave.serving.anthropic.blocks import messages_of, system_messages
from torchweave.serving.errors import ApiError
from torchweave.serving.openai.bounds import MAX_STOPS, MAX_TOOLS, ModelWithBounds
from torchweave.serving.openai.protocol import Body, ChatRequest, Priority, Whole
from torchweave.serving.request_warnings import RequestWarnings

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


class AnyTool(ModelWithBounds):
    """A function that the model may call, or (`type` other than custom, no schema) a tool of Anthropic's own, which is left out."""

    model_config = ConfigDict(extra="ignore", strict=True)
    name: str = ""
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.type == "custom" and (self.input_schema is None or not self.name):
            raise ValueError("a tool needs name and input_schema")
        return self


class ToolChoice(Body):
    """Whether the model calls a function."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether the model reasons, and for how many tokens at most."""

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
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_chat(self, warnings: RequestWarnings) -> ChatRequest:
        """Translate to a chat request.

        Args:
            warnings: takes those about what is left out.

        Raises:
            ValueError: a block, a tool or a field is invalid.
        """
        return ChatRequest.model_validate(self._chat_fields(warnings))

    def _chat_fields(self, warnings: RequestWarnings) -> dict[str, Any]:
        fields: dict[str, Any] = {name: getattr(self, name, None) for name in _SAME_NAME_FIELDS}
        turns = [message for turn in self.messages for message in messages_of(turn.role, turn.content, warnings)]
        fields["messages"] = system_messages(self.system, warnings) + turns
        if self.messages[-1].role == "assistant":  # the answer continues it
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            fields["tools"] = self._functions(warnings)
            fields |= self._tool_choice()
        elif self.tool_choice is not None and self.tool_choice.type in ("any", "tool"):
            raise ApiError(400, "tool_choice forces a tool, but tools is empty; add tools.", param="tool_choice")
        if self.thinking is not None:
            switch = self.thinking.type != "disabled"
            variables = {"enable_thinking": switch, "thinking": switch}
            fields["chat_template_kwargs"] = variables | (self.chat_template_kwargs or {})
            if self.thinking.type == "enabled":
                fields["thinking_token_budget"] = self.thinking.budget_tokens
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
            if self.output_config.format is not None:
                fields["response_format"] = _response_format(self.output_config.format)
        return fields

    def _functions(self, warnings: RequestWarnings) -> list[dict[str, Any]]:
        """The functions of the tools; others run at Anthropic, or have schemas that only its models know.

        Raises:
            ApiError: 400, `tool_choice` forces one of the others.
        """
        tools = [tool for tool in self.tools or () if tool.input_schema is not None]
        for tool in self.tools or ():
            if tool.input_schema is not None:
                continue
            what = f"The tool {(tool.name or tool.type)[:80]!r} of type {tool.type[:80]!r}"
            if self.tool_choice is not None and self.tool_choice.type == "tool" and self.tool_choice.name == tool.name:
                raise ApiError(400, f"{what} cannot be called here; send tools with input_schema.", param="tool_choice")
            warnings.add("unsupported_tool", f"{what} was left out: this server has no such tool.")
        return [_function(tool) for tool in tools]

    def _tool_choice(self) -> dict[str, Any]:
        choice = self.tool_choice
        if choice is None:
            return {}
        named = {"type": "function", "function": {"name": choice.name}}
        parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
        return {"tool_choice": named if choice.type == "tool" else _TOOL_CHOICES[choice.type], **parallel}


class MessagesRequest(CountTokensRequest):
    """Body of `/v1/messages`. Accepted and ignored: `metadata`, `diagnostics`, `service_tier`, `inference_geo`."""

    max_tokens: Annotated[Whole, Field(ge=1)]
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

    def _chat_fields(self, warnings: RequestWarnings) -> dict[str, Any]:
        return super()._chat_fields(warnings) | {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}


def _function(tool: AnyTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.strict is not None:
        function["strict"] = tool.strict
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise ValueError('output_config.format must be {"type": "json_schema", "schema": {...}}.')
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
