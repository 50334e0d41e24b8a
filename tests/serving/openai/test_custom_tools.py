"""Custom tools of chat requests: functions for the model, a text for the client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchweave.serving.openai.answer_parser import CustomInputs, WholeAnswer
from torchweave.serving.openai.custom_tools import custom_input
from torchweave.serving.openai.protocol import ChatRequest
from torchweave.serving.openai.tools import ArgumentsDelta, Call, TextDelta

NOTE: dict[str, Any] = {"type": "custom", "custom": {"name": "note", "description": "Notes."}}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
USER: dict[str, Any] = {"role": "user", "content": "a"}


def test_the_model_sees_functions() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: A"}}
    called = {"id": "1", "type": "custom", "custom": {"name": "note", "input": 'a "b"\n'}}
    body = ChatRequest.model_validate(
        {
            "messages": [USER, {"role": "assistant", "tool_calls": [called]}],
            "tools": [ADD, {"type": "custom", "custom": NOTE["custom"] | {"format": grammar}}],
            "tool_choice": {"type": "custom", "custom": {"name": "note"}},
        }
    )
    assert body.tools is not None and body.named_function == "note"
    definition = body.tools[1].definition
    assert definition["type"] == "function" and definition["function"]["parameters"]["required"] == ["input"]
    assert "lark grammar:\nstart: A" in definition["function"]["description"]
    (call,) = body.messages[1].tool_calls or []
    assert call["type"] == "function" and json.loads(call["function"]["arguments"]) == {"input": 'a "b"\n'}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOTE]}}
    few = ChatRequest.model_validate({"messages": [USER], "tools": [ADD, NOTE], "tool_choice": allowed})
    assert [tool.function.name for tool in few.tools or ()] == ["note"]


@pytest.mark.parametrize(
    "tool", [{"type": "custom"}, {"type": "custom", "custom": {}}, {"type": "custom", "custom": {"name": 5}}]
)
def test_a_custom_tool_without_a_name_is_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tools\.0"):
        ChatRequest.model_validate({"messages": [USER], "tools": [tool]})


def test_the_input_comes_whole_at_the_end_of_a_call() -> None:
    inputs = CustomInputs(["note"])
    streamed = [
        [TextDelta("I "), Call(0, "note"), ArgumentsDelta(0, '{"inp')],
        [ArgumentsDelta(0, 'ut": "a\\nb"}'), Call(1, "add"), ArgumentsDelta(1, "{}")],
        [Call(2, "note"), ArgumentsDelta(2, '{"input": "c')],
    ]
    parts = [inputs.gather(0, each, number == 2) for number, each in enumerate(streamed)]
    assert list(parts[0]) == [TextDelta("I "), Call(0, "note")]
    assert list(parts[1]) == [ArgumentsDelta(0, "a\nb"), Call(1, "add"), ArgumentsDelta(1, "{}")]
    assert WholeAnswer.of([each for some in parts for each in some]).calls == [
        ("note", "a\nb"),
        ("add", "{}"),
        ("note", "c"),
    ]
    assert [inputs.is_custom(0, index) for index in range(3)] == [True, False, True] and not inputs.is_custom(1, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a"}', "a"),
        ('{"input": "a', "a"),
        ('{"input": "a\\', "a\\"),
        ("{}", "{}"),
        ("a", "a"),
        ('{"input": 5}', '{"input": 5}'),
        ("[" * 9999, "[" * 9999),
    ],
)
def test_the_text_of_arguments(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text
