"""Body of `/v1/responses`, and its translation to a chat request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from torchweave.serving.openai.bounds import MAX_TOOLS
from torchweave.serving.openai.protocol import Body, ChatRequest, SharedFields, Whole
from torchweave.serving.openai.responses.items import messages_of
from torchweave.serving.openai.responses.tools import ResponseTool, ResponseTools, chat_tool_choice
from torchweave.serving.request_warnings import RequestWarnings

_LOGPROBS = "message.output_text.logprobs"
_NOT_STORED = "send the whole conversation as input"
_IGNORED = frozenset(
    {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
_SAME_NAME_FIELDS = (
    *(name for name in SharedFields.model_fields if name not in _IGNORED), "parallel_tool_calls", "stop", "logit_bias",
    "structured_outputs", "chat_template", "chat_template_kwargs", "include_reasoning",
)  # fmt: skip


class TextFormat(Body):
    """Format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the answer's text. `verbosity` is accepted and ignored."""

    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({}))
    verbosity: str | None = None


class ReasoningOptions(Body):
    """Options of the reasoning. Summaries are not written: `summary` is accepted and ignored, as is `context` (an input holds what
    the model sees)."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class ResponseStreamOptions(Body):
    """Accepted and ignored: OpenAI's padding of events, and the usage, which the last event has anyway."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ResponsesRequest(SharedFields):
    """Body of `/v1/responses`.

    Accepted and ignored: `user`, `metadata` (returned), `service_tier`, `safety_identifier`, `prompt_cache_key`,
    `prompt_cache_retention`, `prompt_cache_options`, `client_metadata`, `max_tool_calls` (of OpenAI's own tools), and what
    `include` asks for except log-probabilities.
    """

    refused_fields: ClassVar[dict[str, str]] = {
        "conversation": f"conversations are not stored: {_NOT_STORED}, or use previous_response_id",
        "prompt": f"prompts are not stored: {_NOT_STORED}",
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    top_logprobs: Whole | None = None
    include: list[str] | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None
    max_tool_calls: Whole | None = None
    client_metadata: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # fields of chat requests that OpenAI's API does not have here
    stop: Any = None
    logit_bias: Any = None
    structured_outputs: Any = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    @property
    def with_logprobs(self) -> bool:
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    def to_chat(self, items: list[dict[str, Any]], tools: ResponseTools, warnings: RequestWarnings) -> ChatRequest:
        """Translate to a chat request.

        Args:
            items: of the whole conversation.
            tools: of this request.
            warnings: takes those about what is left out.

        Raises:
            ValueError: an item, a tool or a field is invalid.
        """
        fields = {name: getattr(self, name) for name in _SAME_NAME_FIELDS}
        fields["messages"] = messages_of(self.instructions, items, tools, warnings)
        if not fields["messages"]:
            raise ValueError("input must hold at least 1 item.")
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["reasoning_effort"] = self.reasoning.effort
        if self.with_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        form = self.text.format
        if form.type == "json_object":
            fields["response_format"] = {"type": "json_object"}
        elif form.type == "json_schema":
            if form.schema_ is None:
                raise ValueError('text.format of type json_schema needs a schema: {"name": ..., "schema": {...}}.')
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": form.name or "answer", "schema": form.schema_, "strict": form.strict},
            }
        if self.tools:
            fields["tools"] = tools.functions
            fields["tool_choice"] = chat_tool_choice(self.tool_choice, tools)
        return ChatRequest.model_validate(fields)
