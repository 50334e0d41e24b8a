"""`/v1/completions`: text or token ids in, the text that follows out."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from torchweave.serving.answers import Delta
from torchweave.serving.protocol import CompletionRequest
from torchweave.serving.routes.shared import as_response, service_of, usage
from torchweave.serving.sampling import completion_params
from torchweave.serving.service import Service

router = APIRouter(prefix="/v1", tags=["generation"])


@router.post("/completions", summary="Go on from a prompt")
async def completions(body: CompletionRequest, request: Request) -> Response:
    service = service_of(request)
    name = service.check_model(body.model)
    params = completion_params(body, service.model)
    prompts = await _encode(service, body)
    run = await service.ask(
        prompts, params, stream=body.stream, priority=body.priority, cache_salt=body.cache_salt or ""
    )
    try:
        answers = await run.whole()
    finally:
        run.close()
    return as_response(
        {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
            "choices": [_choice(answer) for answer in answers],
            "usage": usage(run.num_prompt_tokens, run.num_answer_tokens),
        }
    )


def _choice(answer: Delta) -> dict[str, Any]:
    return {"index": answer.index, "text": answer.text, "logprobs": None, "finish_reason": answer.finish_reason}


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
