"""Requirements of vLLM's, SGLang's and TensorRT-LLM's published tests, in our own words and with checks of our own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.serving.running import ServerProcess

Json = dict[str, Any]
Check = Callable[[ServerProcess], None]
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
SUM: Any = [{"role": "user", "content": "12+30="}]
"""A conversation whose answer is 42: two tokens and the end token."""


@dataclass(frozen=True)
class Requirement:
    """One requirement.

    Attributes:
        area: heading in the table of docs/reference/http.md.
        sentence: what the server must do.
        check: raises AssertionError if it does not.
        missing: why it does not hold; None: it holds.
    """

    area: str
    sentence: str
    check: Check
    missing: str | None = None


REQUIREMENTS: list[Requirement] = []
"""Filled by the modules of this folder."""

NOT_APPLICABLE = (
    (
        "Images, audio and video in messages, and their caches",
        "the built-in model reads text; images have tests of their own",
    ),
    ("`prompt_embeds` and embeddings in place of tokens", "a prompt is text or token ids"),
    ("`kv_transfer_params`, routing of disaggregated prefill and decode", "prefill and decode run in one engine"),
    ("Sleep, pause, and update of weights at run time", "weights are loaded at start"),
    ("OpenAI's own tools, MCP servers, code interpreters and files", "tools are functions of the client"),
    ("The Responses API over a WebSocket", "responses are streamed as server-sent events"),
    ("Embeddings, scores and reranking", "other endpoints, with tests of their own"),
    ("Answers of one model to one prompt, word for word", "they test the model; tokens are compared with transformers"),
)
"""What peers' tests also check, and why it is no requirement on a text model here."""


def require(area: str, missing: str | None = None) -> Callable[[Check], Check]:
    """Register a function as a requirement; its docstring is the sentence."""

    def register(check: Check) -> Check:
        REQUIREMENTS.append(Requirement(area, check.__doc__ or "", check, missing))
        return check

    return register


def require_all(area: str, path: str, cases: Sequence[tuple[str, Json, int | Callable[[Json], bool]]]) -> None:
    """Register requirements on one answer each: (sentence, body, the status, or a predicate of an answer with status 200)."""
    for sentence, body, expected in cases:
        REQUIREMENTS.append(Requirement(area, sentence, _post(path, body, expected)))


def _post(path: str, body: Json, expected: int | Callable[[Json], bool]) -> Check:
    def check(server: ServerProcess) -> None:
        answer = server.post(path, body)
        status = expected if isinstance(expected, int) else 200
        assert answer.status_code == status, answer.text
        if status != 200:
            assert answer.json()["error"]["message"]
        if not isinstance(expected, int):
            assert expected(answer.json()), answer.text

    return check


def complete(server: ServerProcess, **fields: Any) -> Json:
    """The answer to a greedy completion."""
    return _answer(server, COMPLETIONS, {"prompt": "12+30=", "temperature": 0, **fields})


def chat(server: ServerProcess, **fields: Any) -> Json:
    """The answer to a greedy chat completion."""
    return _answer(server, CHAT, {"messages": SUM, "temperature": 0, **fields})


def _answer(server: ServerProcess, path: str, body: Json) -> Json:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: ServerProcess, path: str, **fields: Any) -> list[Json]:
    """The events of a greedy stream."""
    answer = server.post(path, {"temperature": 0, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    if path in (COMPLETIONS, CHAT):
        assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


def texts(chunks: Sequence[Json], key: str = "content") -> dict[int, str]:
    """The text of each choice of a stream."""
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            part = choice["text"] if "text" in choice else choice["delta"].get(key) or ""
            joined[choice["index"]] = joined.get(choice["index"], "") + part
    return joined
