"""Request bodies: OpenAI's fields and vLLM's extra ones. Unknown fields are rejected with a suggestion."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    Tag,
    model_validator,
)

from torchweave.chat_template import content_text
from torchweave.images import has_images, message_content
from torchweave.serving.openai.bounds import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_ITEMS,
    MAX_STOP_REGEXES,
    MAX_STOPS,
    MAX_TOOLS,
    ModelWithBounds,
)
from torchweave.serving.openai.custom_tools import custom_function, from_custom_call
from torchweave.utils.suggest import did_you_mean


class Body(ModelWithBounds):
    """A body that leaves out unknown fields and does not convert types (`"5"` is not a number). Null means absent.

    A name that is nearly a known one, or whose meaning another field has, is rejected: its user means something.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    refused_fields: ClassVar[dict[str, str]] = {}
    """What to do about fields that would change the answer's meaning if they were left out."""
    refuses_unknown: ClassVar[bool] = False
    """Whether every unknown field is an error: one of a constraint on the answer may be the constraint."""
    _left_out: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _without_unknown(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, dict) or cls.refuses_unknown:
            return validate(value)
        value = {name: each for name, each in value.items() if each is not None}
        known = {name for each, info in cls.model_fields.items() for name in (info.alias or each,)}
        left_out = [str(name) for name in value if name not in known]
        for name in left_out:
            if hint := cls.refused_fields.get(name) or did_you_mean(name, sorted(known), ""):
                raise ValueError(f"unknown field {name[:80]!r}; {hint}")
        body = validate({name: each for name, each in value.items() if name in known})
        body._left_out = tuple(left_out)
        return body


def left_out_fields(body: ModelWithBounds, place: str = "") -> list[str]:
    """Names of the unknown fields of a body and of what is nested in it, such as `tools.0.colour`."""
    names = [place + name for name in body._left_out] if isinstance(body, Body) else []
    for name in body.model_fields_set:
        value = getattr(body, name)
        if isinstance(value, ModelWithBounds):
            names += left_out_fields(value, f"{place}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], ModelWithBounds):
            names += [
                each for number, item in enumerate(value) for each in left_out_fields(item, f"{place}{name}.{number}.")
            ]
    return names


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _prompts(value: Any) -> Any:
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise ValueError(f"holds {len(value)} prompts; send at most {MAX_ITEMS}")
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return value
    if isinstance(value, list) and value and all(map(_is_tokens, value)):
        return value
    raise ValueError(
        "expected a text, a list of texts, a list of token ids, or a list of lists of token ids; lists must not be empty"
    )


def _tokens(value: Any) -> list[int]:
    if value == [] or _is_tokens(value):
        return value
    raise ValueError("expected a list of token ids")


def _stop(value: Any) -> Any:
    if (
        value is None
        or isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    ):
        return value
    raise ValueError("expected a text or a list of texts")


def _bias(value: Any) -> Any:
    """Convert OpenAI's keys, which are token ids as strings."""
    if value is None:
        return None
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"holds {len(value)} tokens; send at most {MAX_BIASES}")
    if isinstance(value, dict) and all(
        str(token).isdecimal() and type(value[token]) in (int, float) for token in value
    ):
        with suppress(ValueError, OverflowError):  # too many digits
            return {int(token): float(weight) for token, weight in value.items()}
    raise ValueError('expected token ids with numbers, such as {"50256": -100}')


def _tool_choice(value: Any) -> Any:
    if value is None or value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") in ("function", "custom"):
        name = _function_name(value)
        if name is not None:
            return name + _NAMED
    raise ValueError('expected none, auto, required, or {"type": "function", "function": {"name": ...}}')


def _function_name(tool: Any) -> str | None:
    """The name of a tool, a function or a custom one."""
    function = tool.get("custom" if tool.get("type") == "custom" else "function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


_NAMED = "()"  # suffix of a function's name, which distinguishes a function named `auto` from the mode
_Prompt = str | list[str] | list[int] | list[list[int]]
Prompts = Annotated[list[str] | list[list[int]], PlainValidator(_prompts, json_schema_input_type=_Prompt)]
"""One prompt or several, as a list. Validated in one pass: pydantic would try each type of the union on a long list of tokens."""
TokenIds = Annotated[list[int], PlainValidator(_tokens, json_schema_input_type=list[int])]
"""Token ids of a prompt or an answer, as many as the body holds; the vocabulary is checked later."""
Whole = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class StreamOptions(Body):
    """Additional content of a stream.

    Attributes:
        include_usage: send a final chunk with token counts.
        continuous_usage_stats: from vLLM: include token counts in each chunk.
        include_obfuscation: OpenAI's padding of chunks; accepted and ignored.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class StructuredBody(Body):
    """vLLM's `structured_outputs`: exactly one of the first six."""

    refuses_unknown = True
    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False


class JsonSchema(ModelWithBounds):
    """Schema of an answer. What a grammar cannot hold of it is left to the model, and refused with `strict`."""

    model_config = ConfigDict(extra="ignore", strict=True, populate_by_name=True)
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Format of an answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    # of structural_tag: xgrammar's form, or vLLM's older one
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class SharedFields(Body):
    """Fields of completions, chat completions and responses; see `Generation` for those that are ignored."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # vLLM's extra fields
    top_k: Whole | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None  # llama.cpp's
    repetition_penalty: float | None = None
    min_tokens: Whole | None = None
    stop_token_ids: Annotated[list[Whole], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    priority: Priority = 0
    cache_salt: str | None = None


class Generation(SharedFields):
    """Fields of both completions and chat completions.

    Accepted and ignored: `user`, `metadata`, `store`, `service_tier`, `safety_identifier`, `prompt_cache_key`,
    `prompt_cache_retention`, `spaces_between_special_tokens`, `guided_decoding_backend`.
    """

    stream_options: StreamOptions | None = None
    n: Whole | None = None
    max_tokens: Whole | None = None
    stop: Annotated[str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None, BeforeValidator(_stop)] = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_bias)] = None
    response_format: ResponseFormat | None = None
    store: bool | None = None
    # vLLM's extra fields
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[Whole], Field(max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: Whole | None = None
    structured_outputs: StructuredBody | None = None
    vllm_xargs: dict[str, Any] | None = None
    beam_width: Whole | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    request_id: Annotated[str | None, Field(pattern="^[!-~]{1,128}$")] = None
    return_token_ids: bool = False
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    truncation_side: Literal["left", "right"] = "left"
    detokenize: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool = False
    guided_decoding_backend: str | None = None
    # SGLang's
    regex: str | None = None
    ebnf: str | None = None
    stop_regex: Annotated[
        str | Annotated[list[str], Field(max_length=MAX_STOP_REGEXES)] | None, BeforeValidator(_stop)
    ] = None
    no_stop_trim: bool | None = None
    rid: Annotated[str | None, Field(pattern="^[!-~]{1,128}$")] = None


class CompletionRequest(Generation):
    """Body of `/v1/completions`."""

    prompt: Prompts
    logprobs: Whole | None = None
    echo: bool | None = None
    best_of: Whole | None = None
    suffix: None = None  # no model here fills in a middle: an answer without it would be another one
    add_special_tokens: bool = True


def _calls(value: Any) -> Any:
    return [from_custom_call(call) for call in value] if isinstance(value, list) else value


class Message(ModelWithBounds):
    """A message of a conversation. Further fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: Annotated[
        str | list[dict[str, Any]] | None,
        BeforeValidator(message_content, json_schema_input_type=str | list[dict[str, Any]] | None),
    ] = None
    tool_calls: Annotated[list[dict[str, Any]] | None, BeforeValidator(_calls)] = None


class Function(Body):
    """Definition of a tool. With `strict`, calls match the parameters also where the model calls freely; see `Family.tags`."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the model may call, or a custom tool, which the model sees as one."""

    type: Literal["function", "custom"]
    function: Function

    @property
    def definition(self) -> dict[str, Any]:
        """For the chat template, complete: templates read all of it."""
        definition = self.model_dump(exclude_none=True)
        filled = {"description": "", "parameters": {"type": "object", "properties": {}}}
        function = definition["function"] | {k: v for k, v in filled.items() if k not in definition["function"]}
        return {**definition, "type": "function", "function": function}


def _tool(value: Any) -> Any:
    """A custom tool as a function; other values as they are."""
    custom = value.get("custom") if isinstance(value, dict) and value.get("type") == "custom" else None
    if not isinstance(custom, dict):
        return value
    function = custom_function(custom.get("name"), custom.get("description"), custom.get("format"))
    return {"type": "custom", "function": function}


class ChatTemplate(Body):
    """Fields that the chat template uses."""

    messages: list[Message]
    tools: Annotated[list[Annotated[Tool, BeforeValidator(_tool)]], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] | None = None
    add_special_tokens: bool = False  # the template writes them

    @property
    def has_images(self) -> bool:
        """Whether a message has images."""
        return has_images([{"content": message.content} for message in self.messages])


class ChatRequest(ChatTemplate, Generation):
    """Body of `/v1/chat/completions`."""

    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tool_choice: Annotated[
        str | None, BeforeValidator(_tool_choice, json_schema_input_type=str | dict[str, Any] | None)
    ] = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: str | None = None
    best_of: Literal[1] | None = None
    prompt_token_ids: TokenIds | None = None
    include_reasoning: bool = True
    echo: bool = False
    prediction: dict[str, Any] | None = None
    thinking_token_budget: Annotated[Whole, Field(ge=-1)] | None = None
    separate_reasoning: Literal[True] = True
    stream_reasoning: Literal[True] = True

    @property
    def echoed(self) -> str:
        """The text before the answer: that of a last message of the assistant, where `echo` is set."""
        return self._last_text if self.echo else ""

    @property
    def continued(self) -> str:
        """The text of a last message that the answer continues."""
        return self._last_text if self.continue_final_message else ""

    @property
    def _last_text(self) -> str:
        """The text of a last message of the assistant."""
        last = self.messages[-1] if self.messages else None
        return content_text(last.content) or "" if last and last.role == "assistant" else ""

    @model_validator(mode="before")
    @classmethod
    def _allowed_tools(cls, value: Any) -> Any:
        """Replace `tool_choice` of type allowed_tools: the other tools are left out."""
        choice = value.get("tool_choice") if isinstance(value, dict) else None
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return value
        allowed = choice.get("allowed_tools")
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        if (
            not isinstance(allowed, dict)
            or not isinstance(listed, list)
            or allowed.get("mode") not in ("auto", "required")
        ):
            expected = '{"mode": "auto" or "required", "tools": [...]}'
            raise ValueError(f"tool_choice of type allowed_tools needs allowed_tools: {expected}")
        given = value.get("tools")
        if not isinstance(given, list):
            raise ValueError("tool_choice of type allowed_tools needs tools, a list")
        if max(len(listed), len(given)) > MAX_TOOLS:
            raise ValueError(f"tools and allowed_tools hold more than {MAX_TOOLS} functions; send fewer")
        names = dict.fromkeys(map(_function_name, listed))
        tools = [tool for tool in given if _function_name(tool) in names]
        known = set(map(_function_name, tools))
        if missing := [name for name in names if name not in known]:
            raise ValueError(f"tool_choice allows {str(missing[0])[:80]!r}, which is not in tools")
        return {**value, "tools": tools, "tool_choice": allowed["mode"]}

    @property
    def named_function(self) -> str | None:
        """Function that `tool_choice` names."""
        choice = self.tool_choice or ""
        return choice.removesuffix(_NAMED) if choice.endswith(_NAMED) else None


class ChatBatchRequest(ChatRequest):
    """Body of `/v1/chat/completions/batch`: as of a chat completion, with a list of conversations; not streamed."""

    messages: Annotated[list[Annotated[list[Message], Field(min_length=1)]], Field(min_length=1)]  # type: ignore[assignment]
    stream: Literal[False] | None = None  # type: ignore[assignment]
    prompt_token_ids: None = None  # type: ignore[assignment]

    @property
    def conversations(self) -> list[ChatRequest]:
        """A chat request for each conversation."""
        given = set(self.model_fields_set)
        fields = {name: getattr(self, name) for name in given - {"messages"}}
        return [ChatRequest.model_construct(given, messages=each, **fields) for each in self.messages]


class TokenizeRequest(Body):
    """Body of `/tokenize` with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatTemplate):
    """Body of `/tokenize` with a conversation."""

    model: str | None = None
    return_token_strs: bool = False


def _tokenize_kind(value: Any) -> str:
    return "a conversation" if isinstance(value, dict) and "messages" in value else "a text"


AnyTokenizeRequest = Annotated[
    Annotated[TokenizeRequest, Tag("a text")] | Annotated[TokenizeChatRequest, Tag("a conversation")],
    Discriminator(_tokenize_kind),
]


class DetokenizeRequest(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds
