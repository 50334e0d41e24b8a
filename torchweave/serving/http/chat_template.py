"""Chat requests: render messages and tools with the chat template, and choose the parsers of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchweave.chat_template import has_media
from torchweave.engine.request import SamplingParams
from torchweave.plug_points import REASONING_PARSERS
from torchweave.serving.errors import ApiError
from torchweave.serving.ipc.messages import ModelCard
from torchweave.serving.openai.answer_parser import AnswerFormat
from torchweave.serving.openai.constraints import LENIENT, constrain, loose_format, loose_tools
from torchweave.serving.openai.generation import AnswerStream
from torchweave.serving.openai.protocol import ChatRequest, ChatTemplate, Message, TokenizeChatRequest, Tool
from torchweave.serving.openai.reasoning import TAIL_TOKENS, ReasoningFormat, detect_reasoning_format
from torchweave.serving.openai.sampling_fields import chat_params, truncate
from torchweave.serving.openai.tools import (
    TaggedCalls,
    ToolUse,
    calls_in_format,
    detect_tool_format,
    forced_schema,
    has_special_tokens,
    make_forced_parser,
    make_tool_parser,
    new_call_id,
)
from torchweave.serving.openai.tools.response_template import TemplateGrammar, as_lenient, start_anchor, with_prompt
from torchweave.serving.request_warnings import RequestWarnings
from torchweave.serving.service import Service

_REASONING_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn reasoning on and off: Qwen's and GLM's, DeepSeek's and Granite's."""
# Arguments of the tokenizer, which `chat_template_kwargs` must not set.
_RESERVED = frozenset(
    (
        "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
        "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
        "tokenizer_kwargs", "max_prompt_tokens", "add_special_tokens",
    )
)  # fmt: skip


async def start_chat(
    service: Service, body: ChatRequest, warnings: RequestWarnings, client: str
) -> tuple[AnswerStream, AnswerFormat]:
    """Submit a chat request of a client to the engine; returns its answers, and how they are parsed.

    Raises:
        ApiError, ValueError, EngineUnavailable: see `resolve_tool_use`, `encode`, `chat_params` and `Service.generate`.
    """
    model = service.model
    if model.pooling is not None:  # before a template that such models often lack
        raise ApiError(400, model.pooling.refusal)
    body = await asyncio.to_thread(loose_format, body, warnings) if body.response_format is not None else body
    tools = resolve_tool_use(service, body)
    if tools.forced is not None:
        tools = await asyncio.to_thread(_with_loose_tools, tools, body, warnings)
    if body.prompt_token_ids is None:
        ids = await encode(service, body, tools.tools, model, warnings)
    else:
        ids = _given_ids(body, model)
    answer_format = AnswerFormat(
        tools,
        _resolve_reasoning(service, body),
        continued=body.continued,
        template=_response_template(service, body, tools),
        first_call_only=body.parallel_tool_calls is False,
        with_reasoning=body.include_reasoning,
    )
    try:
        params = chat_params(body, model, tools.forced, answer_format.keep_special)
        ids = truncate(ids, body, model, params.max_tokens)
        params, answer_format = _constrained(service, body, answer_format, params, ids, warnings)
        answer_stream = await service.generate(
            [ids], params, model, stream=bool(body.stream), priority=body.priority, cache_salt=body.cache_salt,
            client=client, adapter=service.adapter_of(body.model),
        )  # fmt: skip
    except ValueError as error:
        if str(error).startswith("logprobs "):  # the engine's name of what a chat request sends as `top_logprobs`
            raise ValueError(f"top_{error}") from None
        raise
    return answer_stream, answer_format


def _given_ids(body: ChatRequest, model: ModelCard) -> list[int]:
    """The prompt that a request gives as token ids.

    Raises:
        ApiError: 400, an id is outside the vocabulary, or the request has messages or fields of the template, too.
    """
    refused = sorted(body.model_fields_set & (set(ChatTemplate.model_fields) - {"messages"}))
    if body.messages or refused:
        sentence = (
            f"prompt_token_ids cannot be combined with {refused[0] if refused else 'messages'}; send one of them."
        )
        raise ApiError(400, sentence, param="prompt_token_ids")
    ids = list(body.prompt_token_ids or ())
    check_vocabulary(ids, model, "prompt_token_ids")
    return ids


def check_vocabulary(ids: Sequence[int], model: ModelCard, param: str) -> None:
    """Raise ApiError 400 for a token id that the model does not have."""
    size = model.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise ApiError(400, f"{param} contains an id outside 0..{size - 1}, the vocabulary of this model.", param=param)


def _resolve_reasoning(service: Service, body: ChatTemplate) -> ReasoningFormat | None:
    """The format of the model's reasoning; None if it is not parsed."""
    name: str | None = service.settings.reasoning_parser
    if name == "auto":
        name = detect_reasoning_format(_template(service, body))
    return None if name in (None, "none") else REASONING_PARSERS.get(name)


def _response_template(service: Service, body: ChatRequest, tools: ToolUse) -> TemplateGrammar | None:
    """The checkpoint's own parser of answers; None if it has none, or the options or the request ask for others."""
    settings = service.settings
    if settings.tool_call_parser != "auto" or settings.reasoning_parser != "auto" or body.chat_template is not None:
        return None
    tokenizer = service.require_tokenizer()
    template = tokenizer.response_template
    if template is None or tools.forced is not None:
        return None
    made = as_lenient(template)
    return TemplateGrammar(
        lambda prefix: tokenizer.response_parser(made, prefix, tools.tools),
        "",
        tools.tools is not None,
        start_anchor(made),
    )


def _with_loose_tools(tools: ToolUse, body: ChatRequest, warnings: RequestWarnings) -> ToolUse:
    """Replace the schema of forced calls by what a grammar can hold of it."""
    loose, is_lenient = loose_tools(body.tools or [], warnings)
    schema = forced_schema(loose, body.named_function, body.parallel_tool_calls is not False)
    return replace(tools, forced={**schema, "x-guidance": LENIENT} if is_lenient else schema)


def _constrained(
    service: Service,
    body: ChatRequest,
    answer_format: AnswerFormat,
    params: SamplingParams,
    ids: list[int],
    warnings: RequestWarnings,
) -> tuple[SamplingParams, AnswerFormat]:
    """Add the end of the prompt, which may open the reasoning, and what the answer's constraint must leave room for."""
    budget = body.thinking_token_budget if body.thinking_token_budget != -1 else None
    form = answer_format.reasoning
    if form is not None:
        tail = service.require_tokenizer().decode(ids[-TAIL_TOKENS:])
        answer_format = replace(answer_format, prompt_tail=tail)
    if budget is not None and not (form is not None and _has_closing_token(service, form)):
        sentence = "The reasoning of this model cannot be limited; thinking_token_budget was left out."
        warnings.add("reasoning_effort", sentence)
        budget = None
    may_call = answer_format.tools.forced is None and answer_format.tools.tools is not None
    form_type = body.response_format.type if body.response_format is not None else "text"
    if params.structured_outputs is not None and form_type == "text":
        may_call = False  # vLLM's `structured_outputs` hold for the whole answer
    tools = body.tools or [] if may_call else []
    calls, is_strict = _constrained_calls(service, body, answer_format, tools, params, warnings)
    texts = () if form is None else (form.opening[0], form.closing[0])
    markers = frozenset(text for text in texts if service.require_tokenizer().token_of(text) is not None)
    names = [tool.function.name for tool in tools]
    constrained = constrain(params, answer_format, budget, names, calls, is_strict, markers)
    template = answer_format.template
    if template is not None:  # a constraint is built for, and read by, the formats that are known here
        is_free = constrained.params.structured_outputs is None
        template = with_prompt(template, ids, service.require_tokenizer().decode) if is_free else None
    return constrained.params, replace(constrained.answer_format, template=template)


def _constrained_calls(
    service: Service,
    body: ChatRequest,
    answer_format: AnswerFormat,
    tools: list[Tool],
    params: SamplingParams,
    warnings: RequestWarnings,
) -> tuple[TaggedCalls | None, bool]:
    """Calls in the model's format where a constraint needs them: a tool is strict, or calls stand beside a schema; and whether the
    constraint holds strict tools."""
    strict = [tool for tool in tools if tool.function.strict]
    beside = params.structured_outputs is not None
    if not tools or not (strict or beside):
        return None, False
    by_name = {tool.function.name: tool for tool in loose_tools(strict, warnings)[0]}
    tools = [by_name.get(tool.function.name, tool) for tool in tools]
    parallel = body.parallel_tool_calls is not False
    calls = calls_in_format(_tool_format(service, body), _template(service, body), tools, parallel)
    parser, form = answer_format.tools.parser, answer_format.reasoning
    in_text = beside or (form is not None and form.in_channels) or (calls is not None and bool(calls.within_text))
    is_strict = bool(strict) and calls is not None and calls.holds_strict and in_text
    if strict and not is_strict:
        sentence = "strict is left to the model: calls in its format are constrained only where tool_choice forces one."
        warnings.add("schema", sentence)
    if beside and calls is None and (parser is None or parser.marked is None):
        sentence = (
            "The tool parser of this model does not describe calls, so that response_format leaves no room for them."
        )
        warnings.add("schema", sentence)
    return calls, is_strict


def _tool_format(service: Service, body: ChatTemplate) -> str | None:
    configured = service.settings.tool_call_parser
    return detect_tool_format(_template(service, body)) if configured == "auto" else configured


def _has_closing_token(service: Service, form: ReasoningFormat) -> bool:
    """Whether the text that ends the reasoning is one token, which can be forced."""
    closing = "<|end|>" if form.in_channels else form.closing[0]
    return service.require_tokenizer().token_of(closing) is not None


def _template(service: Service, body: ChatTemplate) -> str:
    """Source of the chat template of a request.

    Raises:
        ApiError: 400, the request has a template of its own, which this server does not allow.
    """
    if body.chat_template is None:
        return service.require_tokenizer().chat_template
    if not service.settings.trust_request_chat_template:
        sentence = (
            "chat_template: this server renders no templates of requests; leave it out, or start the server with "
            "trust_request_chat_template."
        )
        raise ApiError(400, sentence, param="chat_template")
    return body.chat_template


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
    template = _template(service, body)
    if "tools" not in template:
        sentence = (
            "The chat template of this model does not support tools; leave tools out, or serve the model with a chat_template "
            "that does."
        )
        raise ApiError(400, sentence, param="tools")
    tool_definitions = [tool.definition for tool in tools]
    tool_format = _tool_format(service, body)
    new_id = new_call_id(tool_format, sum(len(message.tool_calls or ()) for message in body.messages))
    if named is not None or choice == "required":
        schema = forced_schema(tools, named, body.parallel_tool_calls is not False)
        return ToolUse(tool_definitions, schema, make_forced_parser(tools, named), new_id=new_id)
    if tool_format is None and service.require_tokenizer().response_template is None:
        sentence = "The tool-call format of this model was not detected; serve the model with tool_call_parser."
        raise ApiError(400, sentence, param="tools")
    parser = None if tool_format is None else make_tool_parser(tool_format, tools)
    special = tool_format is not None and has_special_tokens(tool_format)
    return ToolUse(tool_definitions, None, parser, special, new_id)


async def encode(
    service: Service,
    body: ChatTemplate,
    tools: list[dict[str, Any]] | None,
    model: ModelCard,
    warnings: RequestWarnings,
) -> list[int]:
    """Encode a conversation as token ids.

    Raises:
        ApiError: 400, template variables that are reserved, or see `MediaFetcher.resolve`.
        ValueError: the model has no template, the template rejects the messages, or they have too many characters.
    """
    variables = dict(body.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED & set(variables)):
        raise ApiError(
            400,
            f"chat_template_kwargs must not contain {', '.join(reserved)}; leave them out.",
            param="chat_template_kwargs",
        )
    if not body.messages:
        raise ApiError(400, "messages must hold at least 1 item.", param="messages")
    if tools is not None:
        variables["tools"] = tools
    template = _template(service, body)
    if body.chat_template is not None:
        variables["chat_template"] = template
    reasoning = await _reasoning_variables(service, template, body, warnings)
    variables = service.settings.default_chat_template_kwargs | reasoning | variables
    if body.continue_final_message:
        if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
            raise ApiError(
                400, "continue_final_message needs add_generation_prompt=false.", param="continue_final_message"
            )
        variables["continue_final_message"] = True
    if body.add_special_tokens:
        variables["add_special_tokens"] = True
    max_images = model.images.max_images
    messages = [_message(each, max_images > 0, warnings) for each in body.messages]
    return await service.require_tokenizer().chat(
        await service.media.resolve(messages, max_images),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        max_prompt_tokens=None if isinstance(body, TokenizeChatRequest) else model.max_model_len,
        content_format=body.chat_template_content_format or "auto",
        **variables,
    )


async def _reasoning_variables(
    service: Service, template: str, body: ChatTemplate, warnings: RequestWarnings
) -> dict[str, Any]:
    """Template variables of `reasoning_effort`: the nearest level that the template takes; a template that only turns reasoning on
    and off gets that."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    switches = [name for name in _REASONING_SWITCHES if name in template]
    if "reasoning_effort" in template:
        nearest = (await service.require_tokenizer().template_traits(body.chat_template)).nearest_effort(effort)
        if nearest != effort and effort == "none" and switches:
            return {switches[0]: False}
        if nearest != effort:
            sentence = f"reasoning_effort {effort} is no level of this model's chat template; {nearest} is used."
            warnings.add("reasoning_effort", sentence)
        return {"reasoning_effort": nearest}
    if not switches:
        sentence = "The chat template of this model does not read reasoning_effort, which was left out."
        warnings.add("reasoning_effort", sentence)
    return dict.fromkeys(switches[:1], effort != "none")


def _message(message: Message, takes_images: bool, warnings: RequestWarnings) -> dict[str, Any]:
    """A message for the template. An image in a tool's result becomes a text for a model that takes none: a client cannot
    take it back, and sends it with each later turn."""
    fields = message.model_dump(exclude_none=True)
    content: Any = fields.get("content") or ""
    if fields["role"] == "tool" and not takes_images and has_media(content):
        sentence = "An image in a tool's result was left out, because this model reads only text."
        warnings.add("unsupported_content", sentence)
        fields["content"] = [part if part.get("type") == "text" else _NO_IMAGE for part in content]
    return fields


_NO_IMAGE = {"type": "text", "text": "[An image was left out here: this model reads only text.]"}
