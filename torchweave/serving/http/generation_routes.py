"""`/v1/completions` continues a prompt; `/v1/chat/completions` and Anthropic's `/v1/messages` generate the next message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from torchweave.serving.anthropic.builder import MessagesBuilder
from torchweave.serving.anthropic.protocol import CountTokensRequest, MessagesRequest
from torchweave.serving.errors import ApiError
from torchweave.serving.http.chat_template import encode, resolve_tool_use, start_chat
from torchweave.serving.http.middleware import REQUEST_ID
from torchweave.serving.http.responses import (
    begin,
    client_of,
    encode_in_slices,
    read_chat,
    respond,
    time_limit,
    unless_disconnected,
    warnings_of,
)
from torchweave.serving.ipc.messages import ModelCard
from torchweave.serving.openai.protocol import ChatBatchRequest, ChatRequest, CompletionRequest, Generation, Prompts
from torchweave.serving.openai.response_builders import ChatResponseBuilder, CompletionResponseBuilder
from torchweave.serving.openai.sampling_fields import completion_params, is_prompt_only, truncate
from torchweave.serving.service import Service

router = APIRouter(prefix="/v1", tags=["generation"])
_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


@router.post("/chat/completions", summary="Generate the next message of a conversation")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    service, name = begin(body, request)
    _check_stream_options(body)
    starting = start_chat(service, body, warnings_of(request), client_of(request))
    answer_stream, answer_format = await unless_disconnected(starting, request, body.has_images)
    builder = ChatResponseBuilder(answer_stream, body, _id(body, request), name, answer_format)
    return await respond(request, bool(body.stream), answer_stream, builder)


@router.post("/chat/completions/batch", summary="Generate the next message of each of several conversations")
async def chat_completion_batch(body: ChatBatchRequest, request: Request) -> Response:
    service, name = begin(body, request)
    _check_stream_options(body)
    service.check_sequences(len(body.messages) * (body.n or 1), service.model)
    answer = _answer_batch(service, body.conversations, name, _id(body, request), request)
    async with time_limit(service.settings.request_timeout):
        return Response(await unless_disconnected(answer, request, takes_long=True), media_type="application/json")


async def _answer_batch(
    service: Service, requests: Sequence[ChatRequest], model: str, request_id: str, http_request: Request
) -> bytes:
    """Answer conversations together. Choices are numbered through all of them; `usage` is the sum.

    Raises:
        ApiError, ValueError, EngineUnavailable: see `start_chat`; all requests are then stopped.
    """
    started = []
    try:
        for request in requests:
            started.append(await start_chat(service, request, warnings_of(http_request), client_of(http_request)))
        deltas = [await answer_stream.full() for answer_stream, _ in started]  # all are generated at the same time
    finally:
        for answer_stream, _ in started:
            answer_stream.close()
    answers = [
        ChatResponseBuilder(answer_stream, request, request_id, model, answer_format).full(answer)
        for request, (answer_stream, answer_format), answer in zip(requests, started, deltas, strict=True)
    ]
    return await encode_in_slices(_join_answers(answers))


def _join_answers(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One body. What a body has of its prompt (`prompt_token_ids`, `prompt_logprobs`) moves to its choices."""
    choices = []
    for body in answers:
        of_prompt = {name: list(body[name]) for name in ("prompt_token_ids", "prompt_logprobs") if name in body}
        choices += [choice | of_prompt for choice in body["choices"]]
    usage: dict[str, Any] = {name: sum(body["usage"][name] for body in answers) for name in _USAGE}
    for name in ("prompt_tokens_details", "completion_tokens_details"):
        details = [body["usage"][name] for body in answers]
        usage[name] = {key: sum(each[key] for each in details) for key in details[0]}
    first = {name: answers[0][name] for name in ("id", "object", "created", "model")}
    numbered = [choice | {"index": index} for index, choice in enumerate(choices)]
    return {**first, "choices": numbered, "usage": usage}


@router.post("/messages", summary="Generate the next message of a conversation, in Anthropic's format")
async def messages(body: MessagesRequest, request: Request) -> Response:
    service, name = begin(body, request)
    warnings = warnings_of(request)
    chat = await read_chat(lambda: body.to_chat(warnings), request)
    starting = start_chat(service, chat, warnings, client_of(request))
    answer_stream, answer_format = await unless_disconnected(starting, request, chat.has_images)
    builder = MessagesBuilder(answer_stream, answer_format, request.scope[REQUEST_ID], name)
    return await respond(request, bool(body.stream), answer_stream, builder)


@router.post("/messages/count_tokens", summary="Count the prompt's tokens of a message request")
async def count_tokens(body: CountTokensRequest, request: Request) -> JSONResponse:
    service, _ = begin(body, request)
    warnings = warnings_of(request)
    chat = await read_chat(lambda: body.to_chat(warnings), request)
    encoding = encode(service, chat, resolve_tool_use(service, chat).tools, service.model, warnings)
    ids = await unless_disconnected(encoding, request, chat.has_images)
    return JSONResponse({"input_tokens": len(ids)})


@router.post("/completions", summary="Complete a prompt")
async def completions(body: CompletionRequest, request: Request) -> Response:
    service, name = begin(body, request)
    _check_stream_options(body)
    model = service.model
    params = completion_params(body, model)
    encoding = encode_prompts(service, model, body.prompt, body.add_special_tokens, body.n or 1)
    encoded = await unless_disconnected(encoding, request)
    prompts = [truncate(ids, body, model, params.max_tokens) for ids in encoded]
    if body.echo and prompts != encoded:
        raise ApiError(400, "echo cannot be combined with truncate_prompt_tokens; leave one of them out.", param="echo")
    answer_stream = await service.generate(
        prompts,
        params,
        model,
        stream=bool(body.stream),
        priority=body.priority,
        cache_salt=body.cache_salt,
        client=client_of(request),
        prompt_only=is_prompt_only(body),
        adapter=service.adapter_of(body.model),
    )
    echoes = _texts(service, body, prompts, params.skip_special_tokens) if body.echo else None
    echoes_special = not isinstance(body.prompt[0], str) and not params.skip_special_tokens
    builder = CompletionResponseBuilder(answer_stream, body, _id(body, request), name, echoes, echoes_special)
    return await respond(request, bool(body.stream), answer_stream, builder)


async def encode_prompts(
    service: Service, model: ModelCard, prompts: Prompts, add_special_tokens: bool, n: int = 1
) -> list[list[int]]:
    """Encode the prompts of a request for `n` answers to each as token ids."""
    if encoded := [prompt for prompt in prompts if isinstance(prompt, list)]:
        return encoded
    service.check_sequences(len(prompts) * n, model)
    tokenizer, longest = service.require_tokenizer(), model.max_model_len
    return [await tokenizer.encode(text, add_special_tokens, longest) for text in prompts if isinstance(text, str)]


def _id(body: Generation, request: Request) -> str:
    """Part of the response's id: the body's own, else that of the header `x-request-id`."""
    return body.request_id or body.rid or request.scope[REQUEST_ID]


def _texts(service: Service, body: CompletionRequest, prompts: list[list[int]], skip_special: bool) -> list[str]:
    """The prompts as texts; special tokens of prompts of token ids are left out where `skip_special`."""
    if texts := [prompt for prompt in body.prompt if isinstance(prompt, str)]:
        return texts
    tokenizer = service.require_tokenizer()
    return [tokenizer.decode(ids, skip_special) for ids in prompts]


def _check_stream_options(body: Generation) -> None:
    """Raise ApiError 400 for `stream_options` without `stream`."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options requires stream=true.", param="stream_options")
