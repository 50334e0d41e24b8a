"""Bodies and answers of models that pool: OpenAI's embeddings, vLLM's scores and classes, Jina's and Cohere's rerank."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from torchweave.pooling import Pooling
from torchweave.serving.openai.bounds import MAX_ITEMS
from torchweave.serving.openai.protocol import Body, Priority, Prompts

_Texts = str | list[str]


def _check_count(value: Any) -> None:
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise ValueError(f"holds {len(value)} texts; send at most {MAX_ITEMS}")


def _texts(value: Any) -> Any:
    _check_count(value)
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(each, str) for each in value)):
        return [value] if isinstance(value, str) else value
    raise ValueError("expected a text, or a list of at least one text")


def _documents(value: Any) -> Any:
    _check_count(value)
    if isinstance(value, list):
        value = [each["text"] if isinstance(each, dict) and set(each) == {"text"} else each for each in value]
        if value and all(isinstance(each, str) for each in value):
            return value
    raise ValueError('expected a list of at least one text, or of objects {"text": ...}')


Texts = Annotated[list[str], BeforeValidator(_texts, json_schema_input_type=_Texts)]
Documents = Annotated[list[str], BeforeValidator(_documents, json_schema_input_type=list[str | dict[str, str]])]


class PoolingBody(Body):
    """Fields of all these requests. Accepted and ignored: `user`."""

    model: str | None = None
    user: str | None = None
    priority: Priority = 0
    cache_salt: str | None = None


class EmbeddingRequest(PoolingBody):
    """Body of `/v1/embeddings`."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    add_special_tokens: bool = True


class ClassifyRequest(PoolingBody):
    """Body of `/classify`."""

    input: Prompts
    use_activation: bool = True
    add_special_tokens: bool = True


class ScoreRequest(PoolingBody):
    """Body of `/v1/score`."""

    text_1: Texts
    text_2: Texts


class RerankRequest(PoolingBody):
    """Body of `/v1/rerank`; without `top_n`, all documents are returned."""

    query: str
    documents: Documents
    top_n: Annotated[int | None, Field(ge=1)] = None
    return_documents: bool = True


def usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def embedding_response(
    body: EmbeddingRequest, pooling: Pooling, rows: Sequence[np.ndarray], name: str, num_tokens: int
) -> dict[str, Any]:
    """The answer of `/v1/embeddings`; base64 is of little-endian float32."""
    vectors = [pooling.embedding(row, body.dimensions) for row in rows]
    encoded: list[Any] = [
        vector.tolist()
        if body.encoding_format == "float"
        else base64.b64encode(vector.astype("<f4").tobytes()).decode()
        for vector in vectors
    ]
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(encoded)]
    return {"object": "list", "data": data, "model": name, "usage": usage(num_tokens)}


def classify_response(
    body: ClassifyRequest, pooling: Pooling, rows: Sequence[np.ndarray], name: str, num_tokens: int, answer_id: str
) -> dict[str, Any]:
    """The answer of `/classify`."""
    data = []
    for index, row in enumerate(rows):
        numbers = (pooling.probabilities(row) if body.use_activation else row).tolist()
        data.append({"index": index, "label": pooling.label(row), "probs": numbers, "num_classes": len(numbers)})
    return _listed(f"classify-{answer_id}", data, name, num_tokens)


def score_response(scores: Sequence[float], name: str, num_tokens: int, answer_id: str) -> dict[str, Any]:
    """The answer of `/v1/score`."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return _listed(f"score-{answer_id}", data, name, num_tokens)


def rerank_response(
    body: RerankRequest, scores: Sequence[float], name: str, num_tokens: int, answer_id: str
) -> dict[str, Any]:
    """The answer of `/v1/rerank`: the best documents first, equal ones in their order."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if body.return_documents:
        results = [each | {"document": {"text": body.documents[each["index"]]}} for each in results]
    return {"id": f"rerank-{answer_id}", "model": name, "usage": usage(num_tokens), "results": results}


def _listed(answer_id: str, data: list[dict[str, Any]], name: str, num_tokens: int) -> dict[str, Any]:
    head = {"id": answer_id, "object": "list", "created": int(time.time()), "model": name}
    return head | {"data": data, "usage": usage(num_tokens)}
