"""What peers' tests require of `/v1/messages`."""

from __future__ import annotations

import json
from typing import Any

from tests.serving.peers.requirement import MESSAGES, SUM, Json, events, require, require_all
from tests.serving.running import ServerProcess

AREA = "Messages"
ASKED: Any = {"messages": SUM, "max_tokens": 80, "temperature": 0}
TOOL: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"], "additionalProperties": False,
    },
}  # fmt: skip
USED: Any = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}

ONE: Any = {"type": "any", "disable_parallel_tool_use": True}


def _turns(assistant: list[Any], user: list[Any]) -> Json:
    """A conversation with these blocks."""
    turns = [*SUM, {"role": "assistant", "content": assistant}, {"role": "user", "content": user}]
    return ASKED | {"messages": turns, "tools": [TOOL]}


def _without(block: Json, name: str) -> Json:
    return {key: value for key, value in block.items() if key != name}


TEXT: Any = {"type": "text", "text": "1+1="}
require_all(
    AREA,
    MESSAGES,
    [
        (
            "A message ends its turn and is the assistant's.",
            ASKED,
            lambda m: (
                m["stop_reason"] == "end_turn"
                and m["role"] == "assistant"
                and m["content"] == [{"type": "text", "text": "42"}]
            ),
        ),
        ("`system` may be a text.", ASKED | {"system": "Be short."}, lambda m: m["stop_reason"] == "end_turn"),
        (
            "`system` may be blocks with cache_control.",
            ASKED | {"system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]},
            200,
        ),
        (
            "A system message among the messages is taken.",
            ASKED | {"messages": [{"role": "system", "content": "a"}, *SUM]},
            200,
        ),
        ("`max_tokens` is required.", {"messages": SUM}, 400),
        ("`max_tokens` ends a message as such.", ASKED | {"max_tokens": 1}, lambda m: m["stop_reason"] == "max_tokens"),
        (
            "`stop_sequences` end a message and are named.",
            ASKED | {"stop_sequences": ["2"]},
            lambda m: (m["stop_reason"], m["stop_sequence"]) == ("stop_sequence", "2"),
        ),
        (
            "A tool that must be used is used.",
            ASKED | {"tools": [TOOL], "tool_choice": ONE},
            lambda m: m["stop_reason"] == "tool_use" and m["content"][0]["input"] == {"city": "Oslo"},
        ),
        (
            "A named tool is used.",
            ASKED | {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
            lambda m: m["content"][0]["name"] == "weather" and m["content"][0]["id"],
        ),
        (
            "`auto` and `none` are taken as tool choices.",
            ASKED | {"tools": [TOOL], "tool_choice": {"type": "none"}},
            lambda m: m["content"][0]["type"] == "text",
        ),
        ("A used tool and its result continue a conversation.", _turns([USED], [RESULT]), 200),
        ("An input without arguments is taken.", _turns([USED | {"input": {}}], [RESULT]), 200),
        ("A result may be blocks, and empty.", _turns([USED], [RESULT | {"content": [TEXT]}]), 200),
        ("A result without content is taken.", _turns([USED], [_without(RESULT, "content")]), 200),
        ("A tool_use without an id is refused.", _turns([_without(USED, "id")], [RESULT]), 400),
        ("A tool_use with an empty id is refused.", _turns([USED | {"id": ""}], [RESULT]), 400),
        ("A tool_use without a name is refused.", _turns([_without(USED, "name")], [RESULT]), 400),
        ("A tool_use without an input is refused.", _turns([_without(USED, "input")], [RESULT]), 400),
        ("A tool_result without the id of its use is refused.", _turns([USED], [_without(RESULT, "tool_use_id")]), 400),
        (
            "A text block without a text is refused.",
            ASKED | {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            400,
        ),
        (
            "An image block without a source is refused.",
            ASKED | {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
        ),
        (
            "A block of an unknown type is left out.",
            ASKED | {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
            200,
        ),
        (
            "A thinking block is taken, without a signature, too.",
            _turns([{"type": "thinking", "thinking": "Hm"}, TEXT], [TEXT]),
            200,
        ),
        (
            "A thinking block without its text is refused.",
            _turns([{"type": "thinking", "signature": "s"}, TEXT], [TEXT]),
            400,
        ),
        (
            "A redacted_thinking block is taken.",
            _turns([{"type": "redacted_thinking", "data": "opaque"}, TEXT], [TEXT]),
            200,
        ),
        (
            "A redacted_thinking block without data is refused.",
            _turns([{"type": "redacted_thinking"}, TEXT], [TEXT]),
            400,
        ),
        (
            "Usage has the prompt's and the answer's tokens.",
            ASKED,
            lambda m: (
                m["usage"]["input_tokens"] + m["usage"]["cache_read_input_tokens"] == 10
                and m["usage"]["output_tokens"] == 3
            ),
        ),
        (
            "`output_config.format` constrains the text.",
            ASKED | {"output_config": {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}}},
            lambda m: json.loads(m["content"][0]["text"]) == {"city": "Oslo"},
        ),
        (
            "`thinking` and `metadata` are taken.",
            ASKED | {"thinking": {"type": "disabled"}, "metadata": {"user_id": "a"}},
            200,
        ),
        ("No messages are refused.", ASKED | {"messages": []}, 400),
        (
            "A role that Anthropic does not know is refused.",
            ASKED | {"messages": [{"role": "tool", "content": "a"}]},
            400,
        ),
        ("An unknown model is not found.", ASKED | {"model": "nobody"}, 404),
    ],
)


@require(AREA)
def events_of_a_stream(server: ServerProcess) -> None:
    """A stream starts a message, starts, extends and stops each block, and ends with the stop reason and the usage."""
    found = events(server, MESSAGES, **ASKED)
    kinds = [each["type"] for each in found]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-3:] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(each["delta"]["text"] for each in found if each["type"] == "content_block_delta") == "42"
    assert found[-2]["delta"]["stop_reason"] == "end_turn" and found[-2]["usage"]["output_tokens"] == 3


@require(AREA)
def a_tool_streams(server: ServerProcess) -> None:
    """A used tool streams its input as parts of JSON."""
    found = events(server, MESSAGES, **ASKED, tools=[TOOL], tool_choice=ONE)
    start = next(each for each in found if each["type"] == "content_block_start")["content_block"]
    assert start["type"] == "tool_use" and start["name"] == "weather" and start["input"] == {}
    parts = "".join(each["delta"]["partial_json"] for each in found if each["type"] == "content_block_delta")
    assert json.loads(parts) == {"city": "Oslo"} and found[-2]["delta"]["stop_reason"] == "tool_use"


@require(AREA)
def tokens_are_counted(server: ServerProcess) -> None:
    """`count_tokens` counts the prompt that the message would have, with its tools."""
    counted = server.post(f"{MESSAGES}/count_tokens", {"messages": SUM, "tools": [TOOL]}).json()["input_tokens"]
    usage = server.post(MESSAGES, ASKED | {"tools": [TOOL]}).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


@require(AREA)
def errors_have_anthropics_form(server: ServerProcess) -> None:
    """Errors have the form of Anthropic's."""
    body = server.post(MESSAGES, ASKED | {"temperature": -1}).json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error" and body["error"]["message"]
