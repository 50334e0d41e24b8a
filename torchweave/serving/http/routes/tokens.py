"""`/tokenize` and `/detokenize`, compatible with vLLM."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from torchweave.serving.errors import ApiError
from torchweave.serving.http.chat_template import encode
from torchweave.serving.http.routes.dependencies import service_of
from torchweave.serving.openai.protocol import AnyTokenizeRequest, DetokenizeRequest, TokenizeRequest

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", summary="Tokenize a text or a conversation")
async def tokenize(body: AnyTokenizeRequest, request: Request) -> dict[str, Any]:
    service = service_of(request)
    service.check_model(body.model)
    tokenizer = service.require_tokenizer()
    if isinstance(body, TokenizeRequest):
        ids = await tokenizer.encode(body.prompt, body.add_special_tokens)
    else:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
        ids = await encode(service, body, tools)
    texts = [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.model.max_model_len, "tokens": ids, "token_strs": texts}


@router.post("/detokenize", summary="Convert tokens to text")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    service = service_of(request)
    service.check_model(body.model)
    size = service.model.vocab_size
    if any(not 0 <= token < size for token in body.tokens):
        raise ApiError(
            400, f"tokens contains an id outside 0..{size - 1}, the vocabulary of this model.", param="tokens"
        )
    return {"prompt": service.require_tokenizer().decode(body.tokens)}
