"""`/v1/chat/completions`: generate the next message of a conversation."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from torchweave.serving.http.chat_template import encode, resolve_tool_use
from torchweave.serving.http.middleware import REQUEST_ID
from torchweave.serving.http.responses import EventStream, full_response
from torchweave.serving.http.routes.dependencies import service_of, stream_options
from torchweave.serving.openai.protocol import ChatRequest
from torchweave.serving.openai.response_builders import ChatResponseBuilder
from torchweave.serving.openai.sampling_fields import chat_params

router = APIRouter(prefix="/v1", tags=["generation"])


@router.post("/chat/completions", summary="Generate the next message of a conversation")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    service = service_of(request)
    name = service.check_model(body.model)
    options = stream_options(body)
    tools = resolve_tool_use(service, body)
    params = chat_params(body, service.model, tools.forced, tools.keep_special)
    ids = await encode(service, body, tools.tools)
    answer_stream = await service.generate(
        [ids], params, stream=bool(body.stream), priority=body.priority, cache_salt=body.cache_salt
    )
    builder = ChatResponseBuilder(
        answer_stream,
        request.scope[REQUEST_ID],
        name,
        service.tokenizer,
        num_top=(body.top_logprobs or 0) if body.logprobs else None,
        with_prompt_logprobs=body.prompt_logprobs is not None,
        parser=tools.parser,
        first_call_only=body.parallel_tool_calls is False,
        calls_end=body.named_function is None,
        new_id=tools.new_id,
        continuous_usage=options.continuous_usage_stats,
    )
    seconds = service.settings.request_timeout
    if body.stream:
        return EventStream(answer_stream, builder, seconds, options.include_usage)
    return await full_response(answer_stream, builder, request.receive, seconds)
