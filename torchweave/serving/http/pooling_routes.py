"""`/v1/embeddings`, `/v1/score`, `/v1/rerank` and `/classify`, of a model with runner=pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from torchweave.pooling import NO_POOLING, Pooling, cosine_similarity, pairs
from torchweave.serving.errors import ApiError
from torchweave.serving.http.generation_routes import encode_prompts
from torchweave.serving.http.middleware import REQUEST_ID
from torchweave.serving.http.responses import begin, json_response, time_limit, unless_disconnected
from torchweave.serving.openai import pooling as bodies
from torchweave.serving.service import Service

router = APIRouter(tags=["pooling"])
_TIMEOUT = "The request took longer than the {:g} seconds that this server allows; send fewer prompts."


@router.post("/v1/embeddings", summary="Embeddings of texts or token ids")
async def embeddings(body: bodies.EmbeddingRequest, request: Request) -> Response:
    service, name, pooling = _begin(body, request, "embed")
    pooling.check_dimensions(body.dimensions)
    rows, num_tokens = await _pool_input(body, request, service, pooling)
    return json_response(bodies.embedding_response(body, pooling, rows, name, num_tokens))


@router.post("/classify", summary="Probabilities of the classes of texts or token ids")
async def classify(body: bodies.ClassifyRequest, request: Request) -> Response:
    service, name, pooling = _begin(body, request, "classify")
    rows, num_tokens = await _pool_input(body, request, service, pooling)
    return json_response(bodies.classify_response(body, pooling, rows, name, num_tokens, request.scope[REQUEST_ID]))


@router.post("/v1/score", summary="Scores of pairs of texts")
@router.post("/score", summary="The same as /v1/score", operation_id="score_without_version")
async def score(body: bodies.ScoreRequest, request: Request) -> Response:
    service, name, pooling = _begin(body, request, "score")
    scores, num_tokens = await _scores(body, body.text_1, body.text_2, request, service, pooling)
    return json_response(bodies.score_response(scores, name, num_tokens, request.scope[REQUEST_ID]))


@router.post("/v1/rerank", summary="Order documents by their relevance to a query")
@router.post("/rerank", summary="The same as /v1/rerank", operation_id="rerank_without_version")
@router.post("/v2/rerank", summary="The same as /v1/rerank, at Cohere's path", operation_id="rerank_second_version")
async def rerank(body: bodies.RerankRequest, request: Request) -> Response:
    service, name, pooling = _begin(body, request, "score")
    scores, num_tokens = await _scores(body, [body.query], body.documents, request, service, pooling)
    return json_response(bodies.rerank_response(body, scores, name, num_tokens, request.scope[REQUEST_ID]))


def _begin(
    body: bodies.PoolingBody, request: Request, task: Literal["embed", "classify", "score"]
) -> tuple[Service, str, Pooling]:
    """The service, the model's name for the answer, and how it pools.

    Raises:
        ApiError: 404 for another model, 400 for one that does not do `task`, 503 while there is none.
    """
    service, name = begin(body, request)
    pooling = service.model.pooling
    if pooling is None:
        raise ApiError(400, NO_POOLING)
    if why := pooling.task_error(task):
        raise ApiError(400, why)
    return service, name, pooling


async def _pool_input(
    body: bodies.EmbeddingRequest | bodies.ClassifyRequest, request: Request, service: Service, pooling: Pooling
) -> tuple[list[np.ndarray], int]:
    """The row of each prompt of `input`, and the number of their tokens."""

    async def work() -> tuple[list[np.ndarray], int]:
        prompts = await encode_prompts(service, service.model, body.input, body.add_special_tokens)
        return await _rows(body, service, [pooling.strip(prompt) for prompt in prompts])

    return await _in_time(work(), request, service)


async def _scores(
    body: bodies.PoolingBody,
    queries: Sequence[str],
    documents: Sequence[str],
    request: Request,
    service: Service,
    pooling: Pooling,
) -> tuple[list[float], int]:
    """The score of each pair, and the number of tokens of their prompts."""
    numbered = pairs(len(queries), len(documents))
    model = service.model
    service.check_sequences(len(queries) + len(documents), model)
    tokenizer, longest = service.require_tokenizer(), model.max_model_len

    async def work() -> tuple[list[float], int]:
        if pooling.task == "embed":
            prompts = [await tokenizer.encode(text, max_tokens=longest) for text in (*queries, *documents)]
            rows, num_tokens = await _rows(body, service, prompts)
            similar = [cosine_similarity(rows[query], rows[len(queries) + document]) for query, document in numbered]
            return similar, num_tokens
        prompts = [await tokenizer.encode_pair(queries[one], documents[two], longest) for one, two in numbered]
        rows, num_tokens = await _rows(body, service, [pooling.strip(prompt) for prompt in prompts])
        return [float(pooling.probabilities(row)[0]) for row in rows], num_tokens

    return await _in_time(work(), request, service)


async def _rows(body: bodies.PoolingBody, service: Service, prompts: list[list[int]]) -> tuple[list[np.ndarray], int]:
    rows = await service.pool(prompts, body.priority, body.cache_salt)
    return rows, sum(map(len, prompts))


async def _in_time(work: Any, request: Request, service: Service) -> Any:
    """The result of `work`, which ends when the client disconnects.

    Raises:
        ApiError: 504 after `request_timeout`.
    """
    async with time_limit(service.settings.request_timeout, _TIMEOUT):
        return await unless_disconnected(work, request, takes_long=True)
