"""Several conversations in one request: each is a chat request of its own, and their answers are one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchweave.serving.http.chat_template import start_chat
from torchweave.serving.openai.protocol import ChatRequest
from torchweave.serving.openai.response_builders import ChatResponseBuilder
from torchweave.serving.service import Service

_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


async def answer_batch(
    service: Service, requests: Sequence[ChatRequest], model: str, request_id: str
) -> dict[str, Any]:
    """Answer conversations together. Choices are numbered through all of them; `usage` is the sum.

    Raises:
        ApiError, ValueError, EngineUnavailable: see `start_chat`; all requests are then stopped.
    """
    started = []
    try:
        for request in requests:
            started.append(await start_chat(service, request))
        deltas = [await answer_stream.full() for answer_stream, _ in started]  # all run at once, and wait to be read
    finally:
        for answer_stream, _ in started:
            answer_stream.close()
    answers = [
        ChatResponseBuilder(answer_stream, request, request_id, model, answer_format).full(answer)
        for request, (answer_stream, answer_format), answer in zip(requests, started, deltas, strict=True)
    ]
    return _joined(answers)


def _joined(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One body. What a body has of its prompt (`prompt_token_ids`, `prompt_logprobs`) moves to its choices."""
    choices = []
    for body in answers:
        of_prompt = {name: body[name] for name in ("prompt_token_ids", "prompt_logprobs") if name in body}
        choices += [choice | of_prompt for choice in body["choices"]]
    usage: dict[str, Any] = {name: sum(body["usage"][name] for body in answers) for name in _USAGE}
    for name in ("prompt_tokens_details", "completion_tokens_details"):
        details = [body["usage"][name] for body in answers]
        usage[name] = {key: sum(each[key] for each in details) for key in details[0]}
    first = {name: answers[0][name] for name in ("id", "object", "created", "model")}
    numbered = [choice | {"index": index} for index, choice in enumerate(choices)]
    return {**first, "choices": numbered, "usage": usage}
