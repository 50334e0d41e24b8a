"""`/v1/responses`: OpenAI's Responses API over the path of chat requests.

The first HTTP process handles all of it, since responses are stored in its memory.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from torchweave.serving.errors import ApiError, api_error
from torchweave.serving.http.chat_template import start_chat
from torchweave.serving.http.responses import (
    begin,
    client_of,
    read_chat,
    respond,
    time_limit,
    unless_disconnected,
    warnings_of,
)
from torchweave.serving.openai.answer_parser import AnswerFormat
from torchweave.serving.openai.generation import AnswerStream
from torchweave.serving.openai.protocol import ChatRequest, Message
from torchweave.serving.openai.responses.builder import ResponsesBuilder, new_response
from torchweave.serving.openai.responses.protocol import ResponsesRequest
from torchweave.serving.openai.responses.store import StoredResponse, input_page
from torchweave.serving.openai.responses.tools import flatten
from torchweave.serving.request_warnings import RequestWarnings
from torchweave.serving.service import Service, service_of
from torchweave.tokenizer import check_text

router = APIRouter(prefix="/v1", tags=["responses"])


@router.post("/responses", summary="Generate a response")
async def create(body: ResponsesRequest, request: Request) -> Response:
    service, name = begin(body, request)
    warnings = warnings_of(request)
    if body.background and (body.stream or not body.store):
        raise ApiError(400, "background needs store=true and stream=false.", param="background")
    previous = body.previous_response_id
    history = [] if previous is None else _stored(service, previous, "previous_response_id").items
    response = new_response(body, name)
    check_text(json.dumps([response, body.items], ensure_ascii=False))  # both are returned or stored as UTF-8
    items = [*history, *(_resolved(service, item) for item in body.items)]
    tools = flatten(body.tools or (), warnings)
    chat = await read_chat(lambda: body.to_chat(items, tools, warnings), request)
    starting = _start(service, chat, body.truncation == "auto", warnings, client_of(request))
    answer_stream, answer_format = await unless_disconnected(starting, request, chat.has_images)

    def finished(response: dict[str, Any]) -> None:
        if body.store:
            service.response_store.put(response, [*items, *response["output"]])

    builder = ResponsesBuilder(answer_stream, answer_format, body, tools, response, finished)
    if not body.background:
        return await respond(request, bool(body.stream), answer_stream, builder)
    work = _in_background(answer_stream, builder, service.settings.request_timeout)
    service.background_responses.start(response, work)
    return JSONResponse(response)


async def _start(
    service: Service, chat: ChatRequest, truncates: bool, warnings: RequestWarnings, client: str
) -> tuple[AnswerStream, AnswerFormat]:
    """Start a chat. Where `truncates`, one that is too long loses its oldest turns: one, two more, four more, but not the last."""
    dropped = 1
    while True:
        try:
            return await start_chat(service, chat, warnings, client)
        except (ApiError, ValueError) as error:
            is_long = api_error(error).code == "context_length_exceeded"
            shorter = _without_turns(chat.messages, dropped) if truncates and is_long else None
            if shorter is None:
                raise
            chat.messages = shorter
            dropped *= 2


def _without_turns(messages: list[Message], count: int) -> list[Message] | None:
    """A conversation without its oldest `count` turns, which messages of the user begin; None if it has one only."""
    head = next((at for at, each in enumerate(messages) if each.role not in ("system", "developer")), len(messages))
    starts = [at for at in range(head + 1, len(messages)) if messages[at].role == "user"]
    return [*messages[:head], *messages[starts[min(count, len(starts)) - 1] :]] if starts else None


def _resolved(service: Service, item: dict[str, Any]) -> dict[str, Any]:
    """An item of the input; a reference is replaced by the stored item.

    Raises:
        ApiError: 404, no item of this id is stored.
    """
    if item.get("type") != "item_reference":
        return item
    item_id = str(item.get("id"))
    stored = service.response_store.item(item_id)
    if stored is None:
        sentence = (
            f"There is no item {item_id[:80]!r}: its response was not stored, was deleted, or made room for newer ones "
            "(response_store_mib); send the item itself."
        )
        raise ApiError(404, sentence, param="input", code="item_not_found")
    return stored


async def _in_background(answer_stream: AnswerStream, builder: ResponsesBuilder, seconds: float) -> None:
    try:
        async with time_limit(seconds):
            builder.full(await answer_stream.full())
    except Exception as error:
        builder.failure(api_error(error))
    finally:
        answer_stream.close()


@router.get("/responses/{response_id}", summary="Return a stored response")
async def retrieve(response_id: str, request: Request, stream: bool = False) -> JSONResponse:
    if stream:
        raise ApiError(400, "A stored response is not streamed again; leave stream out.", param="stream")
    service = service_of(request)
    running = service.background_responses.get(response_id)
    return JSONResponse(running or _stored(service, response_id, "response_id").response)


@router.get("/responses/{response_id}/input_items", summary="List the input of a stored response")
async def input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    return input_page(_stored(service_of(request), response_id, "response_id"), limit, order == "desc", after)


@router.delete("/responses/{response_id}", summary="Delete a stored response")
async def delete(response_id: str, request: Request) -> dict[str, Any]:
    service = service_of(request)
    if service.background_responses.cancel(response_id) is None and not service.response_store.delete(response_id):
        raise _unknown(response_id, "response_id")
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/responses/{response_id}/cancel", summary="Stop a background response")
async def cancel(response_id: str, request: Request) -> JSONResponse:
    service = service_of(request)
    response = service.background_responses.cancel(response_id)
    if response is not None:
        service.response_store.put(response, [])
        return JSONResponse(response)
    response = _stored(service, response_id, "response_id").response
    if response["status"] != "cancelled":
        sentence = (
            f"The response has ended ({response['status']}); only a background response in progress is cancelled."
        )
        raise ApiError(400, sentence, param="response_id")
    return JSONResponse(response)


def _stored(service: Service, response_id: str, param: str) -> StoredResponse:
    """Return a stored response.

    Raises:
        ApiError: 404, there is none with this id.
    """
    stored = service.response_store.get(response_id)
    if stored is None:
        raise _unknown(response_id, param)
    return stored


def _unknown(response_id: str, param: str) -> ApiError:
    sentence = (
        f"There is no response {response_id[:80]!r}: it was not stored, was deleted, or made room for newer ones "
        "(response_store_mib); send the whole conversation as input."
    )
    return ApiError(404, sentence, param=param, code="response_not_found")
