"""`/v1/completions`: continue a prompt of text or token ids."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from torchweave.serving.errors import ApiError
from torchweave.serving.http.middleware import REQUEST_ID
from torchweave.serving.http.responses import EventStream, full_response
from torchweave.serving.http.routes.dependencies import service_of, stream_options
from torchweave.serving.openai.protocol import CompletionRequest, Prompt
from torchweave.serving.openai.response_builders import CompletionResponseBuilder
from torchweave.serving.openai.sampling_fields import completion_params, is_prompt_only
from torchweave.serving.service import Service

router = APIRouter(prefix="/v1", tags=["generation"])


@router.post("/completions", summary="Complete a prompt")
async def completions(body: CompletionRequest, request: Request) -> Response:
    service = service_of(request)
    name = service.check_model(body.model)
    options = stream_options(body)
    if body.stream and body.echo and body.logprobs is not None and (body.n or 1) > 1:
        raise ApiError(
            400, "echo with logprobs cannot be streamed for n above 1; set stream=false or n=1.", param="echo"
        )
    params = completion_params(body, service.model)
    prompts = await _encode(service, body)
    answer_stream = await service.generate(
        prompts,
        params,
        stream=bool(body.stream),
        priority=body.priority,
        cache_salt=body.cache_salt,
        prompt_only=is_prompt_only(body),
    )
    builder = CompletionResponseBuilder(
        answer_stream,
        request.scope[REQUEST_ID],
        name,
        service.tokenizer,
        logprobs=body.logprobs is not None,
        echoes=_texts(service, body, prompts) if body.echo else None,
        echoes_special=not _is_text(body.prompt),
        skip_special_tokens=params.skip_special_tokens,
        with_prompt_logprobs=body.prompt_logprobs is not None,
        num_drawn=params.n,
        num_kept=body.n or 1,
        continuous_usage=options.continuous_usage_stats,
    )
    seconds = service.settings.request_timeout
    if body.stream:
        return EventStream(answer_stream, builder, seconds, options.include_usage)
    return await full_response(answer_stream, builder, request.receive, seconds)


async def _encode(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Encode the prompts as token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await service.require_tokenizer().encode(prompt, body.add_special_tokens)]
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    if isinstance(prompt[0], list):
        return prompt  # type: ignore[return-value]
    tokenizer = service.require_tokenizer()
    return [await tokenizer.encode(text, body.add_special_tokens) for text in prompt]  # type: ignore[arg-type]


def _is_text(prompt: Prompt) -> bool:
    return isinstance(prompt if isinstance(prompt, str) else prompt[0], str)


def _texts(service: Service, body: CompletionRequest, prompts: list[list[int]]) -> list[str]:
    """Decode the prompts."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], str):
        return prompt  # type: ignore[return-value]
    tokenizer = service.require_tokenizer()
    return [tokenizer.decode(ids) for ids in prompts]
