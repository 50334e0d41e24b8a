"""Structured outputs and tool calls over HTTP: forced, chosen, named, and streamed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.serving.running import ServerProcess

SUM: Any = [{"role": "user", "content": "12+30="}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "even": {"type": "boolean"}},
    "required": ["sum", "even"],
    "additionalProperties": False,
}
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]} | {
    "additionalProperties": False
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]


def ask(server: ServerProcess, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": "demo", "messages": SUM, "temperature": 0, "max_tokens": 80} | fields
    return server.client().chat.completions.create(**asked)


def test_response_format_holds_the_answer(server: ServerProcess) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
    no_space = {"9": -100, "8": -100}  # the little model would write nothing else
    choice = ask(server, response_format=form, logit_bias=no_space).choices[0]
    assert choice.finish_reason == "stop", choice.message.content
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    stream = ask(server, response_format=form, logit_bias=no_space, stream=True)
    told = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert told == choice.message.content


@pytest.mark.parametrize(
    "extra",
    [
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "(yes|no)"}},
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "yes|no"},
        {"guided_json": {"enum": ["yes", "no"]}},
    ],
    ids=str,
)
def test_vllms_names_for_forms(server: ServerProcess, extra: dict[str, Any]) -> None:
    assert ask(server, extra_body=extra).choices[0].message.content.strip('"') in ("yes", "no")


def test_json_object(server: ServerProcess) -> None:
    answer = ask(server, response_format={"type": "json_object"}, max_tokens=60, seed=1, temperature=1).choices[0]
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)
    else:
        assert answer.message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, "each constrains the answer"),
        ({"extra_body": {"structured_outputs": {}}}, "exactly one of json, regex"),
        ({"extra_body": {"guided_regex": "(("}}, "regex"),
        ({"extra_body": {"guided_grammar": "no grammar"}}, "grammar"),
        ({"response_format": {"type": "json_schema"}}, "needs json_schema"),
        ({"tools": TOOLS, "tool_choice": "required", "extra_body": {"guided_regex": "a"}}, "forced tool call"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "the same name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "choose from weather, now",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_response_format_gives_a_one_line_error(
    server: ServerProcess, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        ask(server, **fields)


def test_required_tools_are_called(server: ServerProcess) -> None:
    choice = ask(server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        jsonschema.validate(arguments, CITY)
    else:
        assert call.function.name == "now" and arguments == {}


def test_required_tools_that_are_cut_off_leave_no_text(server: ServerProcess) -> None:
    """A model that does not call by itself begins one call after the other, until `max_tokens`."""
    choice = ask(server, tools=TOOLS, tool_choice="required", max_tokens=5).choices[0]
    assert not choice.message.content and choice.finish_reason == "length"


def test_a_named_tool_is_called_and_streamed(server: ServerProcess) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choice = ask(server, tools=TOOLS, tool_choice=named).choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls[0].function.name == "weather"
    jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), CITY)

    name, arguments, parts = "", "", 0
    for chunk in ask(server, tools=TOOLS, tool_choice=named, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            parts += 1
    assert name == "weather" and arguments == choice.message.tool_calls[0].function.arguments and parts > 3


def test_a_conversation_with_calls_goes_on(server: ServerProcess) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *SUM,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "8"},
    ]
    assert ask(server, messages=messages, tools=TOOLS).choices[0].finish_reason in ("stop", "length")
    assert ask(server, tools=TOOLS, tool_choice="none").choices[0].message.content == "42"
    assert ask(server, tools=TOOLS).choices[0].message.content == "42"  # the model was free to call, and did not


def test_call_chosen_by_the_model_is_parsed(server: ServerProcess) -> None:
    """The answer is held to what a model would say that calls by itself."""
    said = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    extra = {"structured_outputs": {"choice": [said]}}
    message = ask(server, tools=TOOLS, extra_body=extra, max_tokens=200).choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.name == "weather"
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    chunks = list(ask(server, tools=TOOLS, extra_body=extra, max_tokens=200, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert "".join(call.function.arguments or "" for call in calls) == '{"city": "Oslo"}' and len(calls) > 3
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_penalties_and_biases_reach_the_engine(server: ServerProcess) -> None:
    def text(**fields: Any) -> str:
        return ask(server, **fields).choices[0].message.content

    four = str(server.post("/tokenize", {"prompt": "4", "add_special_tokens": False}).json()["tokens"][0])
    assert text() == "42"
    assert not text(logit_bias={four: -100}).startswith("4")
    assert text(extra_body={"allowed_token_ids": [int(four)], "ignore_eos": True}, max_tokens=3) == "444"
    assert "4" not in text(extra_body={"bad_words": ["4"]})
    assert text(presence_penalty=2, frequency_penalty=2, extra_body={"repetition_penalty": 1.2})
