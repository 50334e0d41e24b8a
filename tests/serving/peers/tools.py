"""What peers' tests require of tool calls."""

from __future__ import annotations

import json
from typing import Any

from tests.serving.peers.requirement import CHAT, SUM, Json, chat, events, require, require_all
from tests.serving.running import ServerProcess

AREA = "tool calls"
OPTIONS: Any = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"forecast": {"type": "boolean", "default": False, "title": "Forecast"}},
}
NOTHING: Any = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "strict": True,
            "properties": {
                "city": {"type": "string", "enum": ["Bern", "Oslo"], "description": "A city.", "default": "Oslo"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "options": {"$ref": "#/$defs/Options", "description": "More."},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"Options": OPTIONS},
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": NOTHING}}
BARE: Any = {"type": "function", "function": {"name": "now"}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
CALLED = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
NOTE: Any = {"type": "custom", "custom": {"name": "note"}}
NOTED = '<tool_call>{"name": "note", "arguments": {"input": "a, b"}}</tool_call>'
WRITES_A_CALL: Any = {"structured_outputs": {"choice": [CALLED]}, "max_tokens": 120}
"""The built-in model calls no tools by itself: what a model would write is the only choice."""
ASKED: Any = {
    "messages": SUM,
    "tools": [WEATHER, NOW],
    "temperature": 0,
    "max_tokens": 200,
    "parallel_tool_calls": False,
}


def calls(body: Json) -> list[tuple[str, Any]]:
    """Names and arguments of the first choice's calls."""
    found = body["choices"][0]["message"].get("tool_calls") or []
    return [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in found]


def streamed(chunks: list[Json]) -> list[tuple[str, Any]]:
    """The same of a stream: a name comes once, with the call's id; arguments come in parts."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for part in choice["delta"].get("tool_calls") or ():
                index, function = part["index"], part["function"]
                if function.get("name"):
                    assert index not in names and part["id"] and part["type"] == "function"
                    names[index] = function["name"]
                arguments[index] = arguments.get(index, "") + (function.get("arguments") or "")
    return [(name, json.loads(arguments[index])) for index, name in names.items()]


require_all(
    AREA,
    CHAT,
    [
        ("A named function without tools is refused.", {"messages": SUM, "tool_choice": NAMED}, 400),
        ("`required` without tools is refused.", {"messages": SUM, "tool_choice": "required"}, 400),
        (
            "`required` with an empty list of tools is refused.",
            {"messages": SUM, "tools": [], "tool_choice": "required"},
            400,
        ),
        (
            "A named function that is not in tools is refused.",
            ASKED | {"tool_choice": {"type": "function", "function": {"name": "nobody"}}},
            400,
        ),
        ("An empty object as tool_choice is refused.", ASKED | {"tool_choice": {}}, 400),
        ("An unknown tool_choice is refused.", ASKED | {"tool_choice": "maybe"}, 400),
        ("A tool_choice of null is auto.", ASKED | {"tool_choice": None}, 200),
        (
            "A tool_choice of null beside a constraint is no tool request.",
            {"messages": SUM, "tool_choice": None, "structured_outputs": {"choice": ["a"]}},
            lambda body: body["choices"][0]["message"]["content"] == "a",
        ),
        ("`none` answers with text.", ASKED | {"tool_choice": "none"}, lambda body: not calls(body)),
        (
            "`none` leaves text in the form of a call.",
            ASKED | {"tool_choice": "none"} | WRITES_A_CALL,
            lambda body: body["choices"][0]["message"]["content"] == CALLED,
        ),
        (
            "`auto` finds a call, which ends with tool_calls and has no text.",
            ASKED | {"tool_choice": "auto"} | WRITES_A_CALL,
            lambda body: (
                calls(body) == [("weather", {"city": "Oslo"})]
                and body["choices"][0]["finish_reason"] == "tool_calls"
                and body["choices"][0]["message"]["content"] is None
            ),
        ),
        ("Tools without tool_choice are auto.", ASKED | WRITES_A_CALL, lambda body: len(calls(body)) == 1),
        (
            "`required` calls a function with arguments of its schema.",
            ASKED | {"tool_choice": "required"},
            lambda body: (
                bool(calls(body))
                and all(name == "now" or each["city"] in ("Bern", "Oslo") for name, each in calls(body))
            ),
        ),
        (
            "A named function is called, with arguments of its schema.",
            ASKED | {"tool_choice": NAMED},
            lambda body: calls(body)[0][0] == "weather" and calls(body)[0][1]["unit"] in ("celsius", "fahrenheit"),
        ),
        (
            "`$ref`s into a function's own `$defs` hold.",
            ASKED
            | {
                "tool_choice": NAMED,
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "weather",
                            "parameters": {
                                "type": "object",
                                "properties": {"options": {"$ref": "#/$defs/O"}},
                                "required": ["options"],
                                "$defs": {"O": OPTIONS | {"required": ["forecast"]}},
                            },
                        },
                    }
                ],
            },
            lambda body: isinstance(calls(body)[0][1]["options"]["forecast"], bool),
        ),
        (
            "`required` cut off by max_tokens ends with length and without a call.",
            ASKED | {"tool_choice": "required", "max_tokens": 1},
            lambda body: not calls(body) and body["choices"][0]["finish_reason"] == "length",
        ),
        (
            "A named call cut off by max_tokens ends with length.",
            ASKED | {"tool_choice": NAMED, "max_tokens": 1},
            lambda body: body["choices"][0]["finish_reason"] == "length",
        ),
        (
            "`parallel_tool_calls: false` makes one call.",
            ASKED | {"tool_choice": "required", "parallel_tool_calls": False},
            lambda body: len(calls(body)) == 1,
        ),
        (
            "A tool without parameters and description is called without arguments.",
            ASKED
            | {
                "tools": [BARE],
                "tool_choice": "auto",
                "structured_outputs": {"choice": ['<tool_call>{"name": "now"}</tool_call>']},
            },
            lambda body: calls(body)[0] == ("now", {}),
        ),
        (
            "`strict` is taken.",
            ASKED | {"tools": [{"type": "function", "function": WEATHER["function"] | {"strict": True}}]},
            200,
        ),
        ("Two tools of one name are refused.", ASKED | {"tools": [NOW, NOW]}, 400),
        (
            "A tool without a name is refused.",
            ASKED | {"tools": [{"type": "function", "function": {"description": "a"}}]},
            400,
        ),
        ("A tool of an unknown type is refused.", ASKED | {"tools": [{"type": "retrieval"}]}, 400),
        (
            "`allowed_tools` leaves other tools out.",
            ASKED | {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}}},
            lambda body: {name for name, _ in calls(body)} == {"now"},
        ),
        (
            "A format beside `required` holds for plain answers, not for calls.",
            ASKED | {"tool_choice": "required", "response_format": {"type": "json_object"}},
            lambda body: bool(calls(body)),
        ),
        (
            "Log-probabilities of a call are returned.",
            ASKED | {"tool_choice": "required", "logprobs": True},
            lambda body: bool(body["choices"][0]["logprobs"]["content"]),
        ),
        (
            "Results of tools continue a conversation, with arguments as a text.",
            {
                "messages": [
                    *SUM,
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": ""}}],
                    },
                    {"role": "tool", "tool_call_id": "1", "content": "12:00"},
                ],
                "tools": [NOW],
            },
            200,
        ),
        (
            "The result of a tool may be a list of text parts.",
            {
                "messages": [
                    *SUM,
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
                    },
                    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "12:00"}]},
                ],
                "tools": [NOW],
            },
            200,
        ),
    ],
)


@require(AREA)
def a_call_has_an_id(server: ServerProcess) -> None:
    """Each call has an id of its own and the type function."""
    made = [chat(server, **ASKED | WRITES_A_CALL)["choices"][0]["message"]["tool_calls"][0] for _ in range(2)]
    assert made[0]["id"] != made[1]["id"] and made[0]["type"] == "function"


@require(AREA)
def calls_stream(server: ServerProcess) -> None:
    """A stream has the same call: the name once, arguments in parts, no text, one finish reason, tool_calls."""
    for fields in ({"tool_choice": "auto", **WRITES_A_CALL}, {"tool_choice": "required"}):
        asked = ASKED | fields
        chunks = events(server, CHAT, **asked)
        assert streamed(chunks) == calls(chat(server, **asked)) != []
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}
        assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)


@require(AREA)
def custom_tools(server: ServerProcess) -> None:
    """A custom tool is called with a text, whole and streamed, and its call can be sent back."""
    asked = ASKED | {"tools": [NOTE], "structured_outputs": {"choice": [NOTED]}}
    message = chat(server, **asked)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["type"] == "custom" and call["custom"] == {"name": "note", "input": "a, b"}
    parts = [
        part for chunk in events(server, CHAT, **asked) for part in chunk["choices"][0]["delta"].get("tool_calls") or ()
    ]
    assert parts[0]["custom"]["name"] == "note" and parts[0]["type"] == "custom" and "function" not in parts[0]
    assert "".join(part["custom"]["input"] for part in parts) == "a, b"
    chat(server, **asked | {"messages": [*SUM, message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]})


@require(AREA)
def a_named_call_streams(server: ServerProcess) -> None:
    """A stream of a named function has its arguments in parts and no text."""
    asked = ASKED | {"tool_choice": NAMED}
    chunks = events(server, CHAT, **asked)
    assert streamed(chunks) == calls(chat(server, **asked))
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks) == 1
    assert sum(bool(chunk["choices"][0]["delta"].get("tool_calls")) for chunk in chunks) > 2


@require(AREA)
def usage_of_streamed_calls(server: ServerProcess) -> None:
    """A stream with calls ends with its usage where it is included."""
    chunks = events(server, CHAT, **ASKED, tool_choice="required", stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0


@require(AREA)
def several_answers_have_calls(server: ServerProcess) -> None:
    """Each of `n` answers has its calls."""
    made = chat(server, **ASKED | {"tool_choice": "required", "n": 2, "temperature": 1.0})["choices"]
    assert all(choice["message"]["tool_calls"] and choice["finish_reason"] == "tool_calls" for choice in made)


@require(AREA)
def a_schema_of_an_unknown_type(server: ServerProcess) -> None:
    """A parameter of an unknown type is refused where the call is forced, and taken where it is not."""
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "int"}}}},
    }
    assert server.post(CHAT, ASKED | {"tools": [tool], "tool_choice": "required"}).status_code == 400
    assert server.post(CHAT, ASKED | {"tools": [tool]}).status_code == 200


@require(AREA, "OpenAI's clients read null, so a forced call has no content; vLLM's has an empty text")
def content_beside_a_named_call(server: ServerProcess) -> None:
    """The content beside a named call is the empty text."""
    assert chat(server, **ASKED | {"tool_choice": NAMED})["choices"][0]["message"]["content"] == ""


@require(AREA, "agent frameworks send tool_choice auto without tools, which asks for nothing")
def auto_without_tools(server: ServerProcess) -> None:
    """`auto` without tools is refused."""
    assert server.post(CHAT, {"messages": SUM, "tool_choice": "auto"}).status_code == 400


@require(AREA, "a grammar constrains a forced call from its first token, and admits no reasoning")
def reasoning_precedes_a_forced_call(server: ServerProcess) -> None:
    """A model that reasons does so before a forced call."""
    asked = ASKED | {"tool_choice": "required", "chat_template_kwargs": {"enable_thinking": True}}
    assert chat(server, **asked)["choices"][0]["message"].get("reasoning")


@require(AREA)
def a_format_beside_auto(server: ServerProcess) -> None:
    """A format beside `auto` holds for an answer without calls."""
    schema = {"name": "a", "schema": OPTIONS | {"required": ["forecast"]}}
    body = ASKED | {"tool_choice": "auto", "response_format": {"type": "json_schema", "json_schema": schema}}
    answer = server.post("/v1/chat/completions", body).json()
    assert calls(answer) or "forecast" in json.loads(answer["choices"][0]["message"]["content"])
