"""`/v1/completions`: text or token ids in, the text that follows out."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from torchweave.serving.http.errors import ApiError
from torchweave.serving.http.middleware import REQUEST_ID
from torchweave.serving.http.responses import EventStream, answer_whole
from torchweave.serving.http.routes.dependencies import service_of, stream_options
from torchweave.serving.openai.protocol import CompletionRequest, Prompt
from torchweave.serving.openai.response_builders import CompletionReply
from torchweave.serving.openai.sampling_fields import asks_for_prompt_alone, completion_params
from torchweave.serving.service import Service

router = APIRouter(prefix="/v1", tags=["generation"])


@router.post("/completions", summary="Go on from a prompt")
async def completions(body: CompletionRequest, request: Request) -> Response:
    service = service_of(request)
    name = service.check_model(body.model)
    options = stream_options(body)
    if body.stream and body.echo and body.logprobs is not None and (body.n or 1) > 1:
        raise ApiError(400, "echo with logprobs cannot be streamed for n above 1.", param="echo")
    params = completion_params(body, service.model)
    prompts = await _encode(service, body)
    run = await service.ask(
        prompts,
        params,
        stream=bool(body.stream),
        priority=body.priority,
        cache_salt=body.cache_salt,
        prompt_alone=asks_for_prompt_alone(body),
    )
    reply = CompletionReply(
        run,
        request.scope[REQUEST_ID],
        name,
        service.codec,
        logprobs=body.logprobs is not None,
        echoes=_texts(service, body, prompts) if body.echo else None,
        echoes_special=not _is_text(body.prompt),
        skip_special_tokens=params.skip_special_tokens,
        scores=body.prompt_logprobs is not None,
        num_drawn=params.n,
        num_kept=body.n or 1,
        counts=options.continuous_usage_stats,
    )
    seconds = service.settings.request_timeout
    if body.stream:
        return EventStream(run, reply, seconds, options.include_usage)
    return await answer_whole(run, reply, request.receive, seconds)


async def _encode(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Token ids of the prompts."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await service.need_codec().encode(prompt, body.add_special_tokens)]
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    if isinstance(prompt[0], list):
        return prompt  # type: ignore[return-value]
    codec = service.need_codec()
    return [await codec.encode(text, body.add_special_tokens) for text in prompt]  # type: ignore[arg-type]


def _is_text(prompt: Prompt) -> bool:
    return isinstance(prompt if isinstance(prompt, str) else prompt[0], str)


def _texts(service: Service, body: CompletionRequest, prompts: list[list[int]]) -> list[str]:
    """The prompts as texts."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], str):
        return prompt  # type: ignore[return-value]
    codec = service.need_codec()
    return [codec.decode(ids) for ids in prompts]
