"""Errors of bodies name the field and what it takes, in the API's words and not in pydantic's."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from torchweave.serving.anthropic.protocol import MessagesRequest
from torchweave.serving.errors import api_error
from torchweave.serving.openai.protocol import ChatRequest, CompletionRequest
from torchweave.serving.openai.responses.protocol import ResponsesRequest
from torchweave.serving.openai.responses.tools import ResponseTools
from torchweave.serving.request_warnings import RequestWarnings

TURN = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("kind", "body", "sentence"),
    [
        (ResponsesRequest, {"input": 5}, "input: expected a text or a list."),
        (ResponsesRequest, {"input": [5]}, "input.0: expected an object."),
        (ResponsesRequest, {"input": "hi", "max_output_tokens": 0}, "max_output_tokens: Input should be greater than "),
        (
            ChatRequest,
            {"messages": [TURN], "max_completion_tokens": 0},
            "max_completion_tokens: Input should be greater",
        ),
        (ChatRequest, {"messages": [5]}, "messages.0: expected an object."),
        (ChatRequest, {"messages": "hi"}, "messages: expected a list."),
        (ChatRequest, {"messages": [TURN], "functions": []}, "unknown field 'functions'; the field is tools."),
        (CompletionRequest, {"prompt": "hi", "stream_options": 5}, "stream_options: expected an object."),
        (
            CompletionRequest,
            {"prompt": "hi", "structured_outputs": {"a": 1}},
            "structured_outputs.a: unknown field; leave ",
        ),
        (MessagesRequest, {"messages": [], "max_tokens": 5}, "messages must hold at least 1 item."),
        (MessagesRequest, {"messages": [TURN], "max_tokens": 5, "system": 5}, "system: expected a text or a list."),
    ],
)
def test_an_invalid_body_is_one_sentence_about_its_field(
    kind: type[BaseModel], body: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    error = api_error(caught.value)
    assert error.status == 400 and error.message.startswith(sentence)
    assert "pydantic" not in error.message and error.param in (sentence.split(":")[0].split(" ")[0], None)


def test_responses_without_an_item_name_the_input() -> None:
    with pytest.raises(ValueError, match="input must hold at least 1 item") as caught:
        ResponsesRequest.model_validate({"input": []}).to_chat([], ResponseTools(), RequestWarnings())
    assert api_error(caught.value).param == "input"
