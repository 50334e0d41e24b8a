"""Routes beside generation: health, readiness, statistics, models, tokens, metrics and the live page."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

import torchweave
from torchweave.chat_template import content_text, has_media
from torchweave.engine.request import SamplingParams
from torchweave.serving.engine_client.replicas import Replicas
from torchweave.serving.errors import ApiError
from torchweave.serving.http.chat_template import check_vocabulary, encode
from torchweave.serving.http.responses import begin, json_response, time_limit, unless_disconnected, warnings_of
from torchweave.serving.openai.protocol import AnyTokenizeRequest, DetokenizeRequest, TokenizeRequest
from torchweave.serving.service import Service, public_name, service_of

router = APIRouter()
_MAX_CHARACTERS = 1 << 20
"""Of a text to tokenize, and tokens to convert to text: seconds of work on a thread."""

# The page is self-contained and must not load anything from other origins.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)


def _status(client: Replicas) -> str:
    """`failed`, `ok`, or `degraded` if only some replicas serve."""
    if not client.alive:
        return "failed"
    return "ok" if client.state == "starting" or all(each.state == "ready" for each in client.engines) else "degraded"


@router.get(
    "/health",
    tags=["status"],
    summary="200 while an engine process runs, else 503; with several replicas, the state of each",
)
async def health(request: Request) -> JSONResponse:
    client = service_of(request).client
    body: dict[str, Any] = {"status": _status(client), "engine": client.state}
    if client.failure:
        body["reason"] = client.failure
    if len(client.engines) > 1:
        body["replicas"] = [
            {"replica": engine.replica_info.index, "engine": engine.state, "restarts": engine.restarts}
            | ({"reason": engine.failure} if engine.failure else {})
            for engine in client.engines
        ]
    return JSONResponse(body, 200 if client.alive else 503)


@router.get("/ping", tags=["status"], summary="The same as /health, as SageMaker asks")
async def ping(request: Request) -> JSONResponse:
    return await health(request)


@router.get("/health_generate", tags=["status"], summary="200 once the engine has generated a token for this request")
async def health_generate(request: Request) -> dict[str, str]:
    service = service_of(request)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    answer_stream = await service.generate([[0]], params, service.model, stream=False, priority=0, cache_salt=None)
    try:
        async with time_limit(service.settings.request_timeout):
            await answer_stream.full()
    finally:
        answer_stream.close()
    return {"status": "ok"}


@router.get(
    "/ready",
    tags=["status"],
    summary="200 once requests are accepted; 503 with progress before, and while the server shuts down",
)
async def ready(request: Request) -> JSONResponse:
    service = service_of(request)
    client = service.client
    body: dict[str, Any] = {"ready": service.ready, "engine": "draining" if service.draining else client.state}
    if client.failure:
        body["reason"] = client.failure
    if not service.ready:
        body["progress"] = client.progress
    return JSONResponse(body, 200 if service.ready else 503)


@router.get(
    "/statistics",
    tags=["status"],
    summary="Statistics of the engine's last iteration with TensorRT-LLM's keys, empty before the first; with several replicas "
    "a list `replicas` of these records",
)
async def statistics(request: Request) -> dict[str, Any]:
    engines = service_of(request).client.engines
    return engines[0].stats if len(engines) == 1 else {"replicas": [engine.stats for engine in engines]}


@router.get("/version", tags=["status"], summary="The version of Torchweave")
async def version() -> dict[str, str]:
    return {"version": torchweave.__version__}


@router.get("/load", tags=["status"], summary="The number of requests in flight, as vLLM reports it")
async def load(request: Request) -> dict[str, int]:
    return {"server_load": service_of(request).client.num_in_flight}


@router.get("/v1/models", tags=["models"], summary="List the names of the served model")
async def models(request: Request) -> dict[str, Any]:
    service = service_of(request)
    return {"object": "list", "data": [_entry(service, name) for name in (*service.names, *service.adapters)]}


@router.get("/v1/models/{name:path}", tags=["models"], summary="Describe the model of a name")
async def model(name: str, request: Request) -> dict[str, Any]:
    if not name:  # `/v1/models/`
        return await models(request)
    service = service_of(request)
    return _entry(service, service.check_model(name))


def _entry(service: Service, name: str) -> dict[str, Any]:
    model = service.model
    folder = service.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "torchweave",
        "root": public_name(model.name if folder is None else folder),
        "parent": None if folder is None else service.names[0],
        "max_model_len": model.max_model_len,
    }


@router.post("/tokenize", tags=["tokens"], summary="Tokenize a text or a conversation")
async def tokenize(body: AnyTokenizeRequest, request: Request) -> Response:
    service, _ = begin(body, request)
    tokenizer = service.require_tokenizer()
    if isinstance(body, TokenizeRequest):
        _check_size(len(body.prompt))
        ids = await unless_disconnected(tokenizer.encode(body.prompt, body.add_special_tokens), request)
    else:
        tools = [tool.definition for tool in body.tools] if body.tools else None
        contents = [content_text(each.content) or "" for each in body.messages if not has_media(each.content)]
        _check_size(sum(map(len, contents)) + (len(json.dumps(tools)) if tools else 0))
        encoding = encode(service, body, tools, service.model, warnings_of(request))
        ids = await unless_disconnected(encoding, request, body.has_images)
    texts = [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return json_response(
        {"count": len(ids), "max_model_len": service.model.max_model_len, "tokens": ids, "token_strs": texts}
    )


def _check_size(size: int) -> None:
    if size > _MAX_CHARACTERS:
        sentence = (
            f"The text has {size} characters, but at most {_MAX_CHARACTERS} are tokenized at once; send it in parts."
        )
        raise ApiError(400, sentence, param="prompt")


@router.get("/tokenizer_info", tags=["tokens"], summary="The tokenizer's configuration and chat template")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    return service_of(request).require_tokenizer().info()


@router.post("/detokenize", tags=["tokens"], summary="Convert tokens to text")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    service, _ = begin(body, request)
    ids = body.tokens
    if len(ids) > _MAX_CHARACTERS:
        sentence = (
            f"tokens holds {len(ids)} ids, but at most {_MAX_CHARACTERS} are converted at once; send them in parts."
        )
        raise ApiError(400, sentence, param="tokens")
    check_vocabulary(ids, service.model, "tokens")
    tokenizer = service.require_tokenizer()
    return json_response({"prompt": await unless_disconnected(tokenizer.decode_long(ids), request)})


@router.get(
    "/metrics",
    tags=["status"],
    summary="Counters, gauges and histograms in Prometheus' text format",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    await request.app.state.poll_metrics()
    text, content_type = request.app.state.metrics.exposition(request.headers.get("accept", ""))
    return Response(text, media_type=content_type)


@functools.cache
def page() -> str:
    """Text of the page."""
    return files("torchweave.serving.http").joinpath("page.html").read_text(encoding="utf-8")


@router.get("/", tags=["status"], response_class=HTMLResponse, summary="The live page")
async def root() -> HTMLResponse:
    return HTMLResponse(page(), headers={"Content-Security-Policy": _POLICY})


@router.get(
    "/live",
    tags=["status"],
    summary="The data of the live page",
    response_class=Response,
    responses={200: {"content": {"application/json": {"schema": {"type": "object"}}}}},
)
async def live(request: Request) -> Response:
    text = await request.app.state.live.text()
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})
