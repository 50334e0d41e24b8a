"""Bodies that hold too much are refused before they are decoded, and the first wrong item ends a validation."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter, ValidationError

from torchweave.serving.anthropic.protocol import MessagesRequest
from torchweave.serving.errors import ApiError, api_error
from torchweave.serving.http import bodies
from torchweave.serving.http.middleware import FastPathMiddleware
from torchweave.serving.openai import protocol
from torchweave.serving.openai.pooling import EmbeddingRequest, RerankRequest
from torchweave.serving.openai.protocol import ChatBatchRequest, ChatRequest, CompletionRequest, DetokenizeRequest
from torchweave.serving.openai.responses.protocol import ResponsesRequest

LIMIT = 8 << 20
TALK = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "a"}}
LISTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "prompt": (CompletionRequest, {}),
    "stop": (CompletionRequest, {"prompt": "a"}),
    "stop_regex": (CompletionRequest, {"prompt": "a"}),
    "stop_token_ids": (CompletionRequest, {"prompt": "a"}),
    "bad_words": (CompletionRequest, {"prompt": "a"}),
    "allowed_token_ids": (CompletionRequest, {"prompt": "a"}),
    "guided_choice": (CompletionRequest, {"prompt": "a"}),
    "messages": (ChatRequest, {}),
    "messages of a batch": (ChatBatchRequest, {}),
    "messages of Anthropic": (MessagesRequest, {"max_tokens": 1}),
    "tools": (ChatRequest, TALK),
    "modalities": (ChatRequest, TALK),
    "prompt_token_ids": (ChatRequest, TALK),
    "input": (ResponsesRequest, {}),
    "include": (ResponsesRequest, {"input": "a"}),
    "input of embeddings": (EmbeddingRequest, {}),
    "documents": (RerankRequest, {"query": "a"}),
    "tokens": (DetokenizeRequest, {}),
}
ITEMS = ("", 1, None, 1.5, {}, [], {"role": "user", "content": 1}, {"type": "function", "function": 1})


def read(kind: Any, body: dict[str, Any] | bytes) -> Any:
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return bodies.read_body(encoded, TypeAdapter(kind), LIMIT)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_wrong_items_costs_a_few_errors(name: str) -> None:
    """And not one or two for each of its items, of two kilobytes each."""
    kind, others = LISTS[name]
    for item in ITEMS:
        body = others | {name.partition(" ")[0]: [item] * 20_000}
        try:
            read(kind, body)
        except ValidationError as error:
            assert error.error_count() <= 4, (item, error.error_count())
            sentence = api_error(error).message
            assert sentence.endswith((".", "?")) and len(sentence) < 400
        except ApiError as error:
            assert error.status == 400


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (ChatRequest, {"messages": TALK["messages"] * 20_000}, "messages holds more than 16384 items"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]},
            "holds more than 16384 items",
        ),
        (ChatRequest, TALK | {"tools": [TOOL] * 3000}, "tools holds more than 2048 items"),
        (CompletionRequest, {"prompt": ["a"] * 20_000}, "prompt: holds 20000 prompts; send at most 16384"),
        (CompletionRequest, {"prompt": "a", "stop": ["a"] * 2000}, "stop holds more than 1024 items"),
        (CompletionRequest, {"prompt": "a", "stop_regex": ["a"] * 9}, "stop_regex holds more than 8 items"),
        (
            CompletionRequest,
            {"prompt": "a", "logit_bias": {str(each): 1 for each in range(20_000)}},
            "logit_bias: holds 20000 tokens; send at most 16384",
        ),
        (RerankRequest, {"query": "a", "documents": ["a"] * 20_000}, "documents: holds 20000 texts"),
    ],
)
def test_long_lists_are_refused_with_their_bound(kind: Any, body: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        read(kind, body)
    assert words in api_error(caught.value).message


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (b"{}", "objects and lists, but this server accepts at most 131072"),
        (b"[]", "objects and lists"),
        (b'{"a":1}', "objects and lists"),
        (b"1", "values, but this server accepts at most 2097152"),
        (b'"\\""', "quotes"),
    ],
)
def test_bodies_of_many_values_are_not_decoded(item: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"prompt": [' + b",".join([item] * (LIMIT // (len(item) + 1) - 10)) + b"]}"
    monkeypatch.setattr(bodies, "_decode", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(ApiError, match=words):
        read(CompletionRequest, body)


def test_texts_may_hold_any_characters() -> None:
    text = '{["a": \\, \\" ' * 200_000
    assert read(CompletionRequest, {"prompt": text}).prompt == [text]
    tokens = [70_000] * 1_000_000
    assert read(CompletionRequest, {"prompt": tokens}).prompt == [tokens]


@pytest.mark.parametrize("given", [5, "a", {"a": 1}, None])
def test_allowed_tools_need_a_list_of_tools(given: Any) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
    with pytest.raises(ValidationError, match="needs tools, a list"):
        read(ChatRequest, TALK | {"tools": given, "tool_choice": choice})


def test_allowed_tools_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []
    name_of = protocol._function_name
    monkeypatch.setattr(protocol, "_function_name", lambda tool: looked_at.append(0) or name_of(tool))
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(1000)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[1:]}}
    body = read(ChatRequest, TALK | {"tools": tools, "tool_choice": choice})
    assert [tool.function.name for tool in body.tools] == [f"f{number}" for number in range(1, 1000)]
    assert len(looked_at) <= 4 * len(tools)


@pytest.mark.parametrize(("size", "on_thread"), [(100, False), (100_000, True)])
def test_long_bodies_are_read_on_a_thread(size: int, on_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    router, threads = APIRouter(), list[threading.Thread]()

    async def answer(body: CompletionRequest, request: Request) -> Response:
        return Response(f"{len(body.prompt[0])}")

    def noting(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return bodies.read_body(*args)

    monkeypatch.setattr("torchweave.serving.http.middleware.read_body", noting)
    router.add_api_route("/v1/completions", answer, methods=["POST"])
    parts: list[bytes] = []
    pending = [{"type": "http.request", "body": json.dumps({"prompt": "a" * size}).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        return pending.pop() if pending else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
    scope["headers"] = [(b"content-type", b"application/json")]  # type: ignore[assignment]
    asyncio.run(FastPathMiddleware(Response("other"), [router], LIMIT)(scope, receive, send))
    assert b"".join(parts) == b"%d" % size
    assert [each is not threading.main_thread() for each in threads] == [on_thread]
