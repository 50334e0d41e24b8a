"""What peers' tests require of `/v1/responses`."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.serving.peers.requirement import RESPONSES, Json, events, require, require_all
from tests.serving.running import ServerProcess

AREA = "Responses"
ASKED: Any = {"input": "12+30=", "temperature": 0}
FUNCTION: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"], "additionalProperties": False,
    },
}  # fmt: skip


def _user(text: str) -> Json:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def _assistant(**more: str) -> Json:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "42"}], **more}


def _reasoning(**more: str) -> Json:
    return {"type": "reasoning", "summary": [], "encrypted_content": None, **more}


def output_text(response: Json) -> str:
    """The text of a response."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


def _is_complete(response: Json) -> bool:
    return response["status"] == "completed" and response["incomplete_details"] is None and response["error"] is None


require_all(
    AREA,
    RESPONSES,
    [
        (
            "A response is completed and has its object, time, model and usage.",
            ASKED,
            lambda r: (
                _is_complete(r)
                and r["object"] == "response"
                and r["created_at"]
                and r["model"] == "demo"
                and r["usage"]["total_tokens"] == r["usage"]["input_tokens"] + r["usage"]["output_tokens"] == 13
            ),
        ),
        ("The input may be messages of parts.", ASKED | {"input": [_user("12+30=")]}, lambda r: output_text(r) == "42"),
        ("`instructions` precede the input.", ASKED | {"instructions": "Be short."}, _is_complete),
        (
            "History with ids and status is taken.",
            ASKED
            | {
                "input": [
                    _user("12+30="),
                    _assistant(id="msg_1", status="completed"),
                    _reasoning(id="rs_1", status="completed"),
                    _user("1+1="),
                ]
            },
            _is_complete,
        ),
        (
            "History without ids is taken.",
            ASKED | {"input": [_user("12+30="), _assistant(), _reasoning(), _user("1+1=")]},
            _is_complete,
        ),
        (
            "Reasoning of an earlier turn is taken, with its text.",
            ASKED
            | {
                "input": [
                    {"role": "user", "content": "12+30="},
                    {
                        "type": "reasoning",
                        "id": "r",
                        "content": [{"type": "reasoning_text", "text": "Hm"}],
                        "summary": [],
                    },
                ]
            },
            _is_complete,
        ),
        (
            "`max_output_tokens` ends a response as incomplete.",
            ASKED | {"max_output_tokens": 1},
            lambda r: r["status"] == "incomplete" and r["incomplete_details"]["reason"] == "max_output_tokens",
        ),
        (
            "Sampling fields beyond OpenAI's are taken.",
            ASKED | {"top_k": 40, "repetition_penalty": 1.2, "seed": 42, "top_p": 0.9},
            200,
        ),
        ("`frequency_penalty` is taken.", ASKED | {"frequency_penalty": 1.0}, lambda r: r["object"] == "response"),
        (
            "`truncation: disabled`, `user` and `parallel_tool_calls` are taken.",
            ASKED
            | {
                "truncation": "disabled",
                "user": "a",
                "parallel_tool_calls": True,
                "tool_choice": "auto",
                "store": True,
            },
            _is_complete,
        ),
        ("`metadata` is returned.", ASKED | {"metadata": {"a": "b"}}, lambda r: r["metadata"] == {"a": "b"}),
        (
            "`text.format` of json_schema constrains the answer.",
            ASKED
            | {
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "a",
                        "strict": True,
                        "schema": {
                            "type": "object",
                            "properties": {"a": {"type": "boolean"}},
                            "required": ["a"],
                            "additionalProperties": False,
                        },
                    }
                }
            },
            lambda r: isinstance(json.loads(output_text(r))["a"], bool),
        ),
        (
            "`text.format` of text changes nothing.",
            ASKED | {"text": {"format": {"type": "text"}}},
            lambda r: output_text(r) == "42",
        ),
        (
            "Log-probabilities are included where they are requested.",
            ASKED | {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
            lambda r: all(len(each["top_logprobs"]) == 3 for each in r["output"][0]["content"][0]["logprobs"]),
        ),
        ("A background response that is not stored is refused.", ASKED | {"background": True, "store": False}, 400),
        (
            "A function that must be called is called.",
            ASKED | {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False},
            lambda r: (
                (r["output"][0]["type"], json.loads(r["output"][0]["arguments"])) == ("function_call", {"city": "Oslo"})
            ),
        ),
        (
            "A named function is called.",
            ASKED | {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "weather"}},
            lambda r: r["output"][0]["name"] == "weather" and r["output"][0]["call_id"],
        ),
        (
            "A call and its output continue a conversation.",
            ASKED
            | {
                "tools": [FUNCTION],
                "input": [
                    _user("12+30="),
                    {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "rain"},
                ],
            },
            _is_complete,
        ),
        ("No tools are taken as none.", ASKED | {"tools": []}, _is_complete),
        (
            "`chat_template_kwargs` are passed to the template.",
            ASKED | {"chat_template_kwargs": {"enable_thinking": False}},
            _is_complete,
        ),
        (
            "`structured_outputs` constrain a response.",
            ASKED | {"structured_outputs": {"choice": ["a"]}},
            lambda r: output_text(r) == "a",
        ),
        ("`logit_bias` outside the vocabulary is refused.", ASKED | {"logit_bias": {"999999": 1}}, 400),
        ("An input of no items is refused.", {"input": []}, 400),
        ("A response without an input is refused.", {"temperature": 0}, 400),
        ("`reasoning.effort` is passed on.", ASKED | {"reasoning": {"effort": "low"}}, _is_complete),
        (
            "The usage of reasoning is counted.",
            ASKED,
            lambda r: r["usage"]["output_tokens_details"]["reasoning_tokens"] == 0,
        ),
        ("Cached tokens are counted.", ASKED, lambda r: r["usage"]["input_tokens_details"]["cached_tokens"] >= 0),
        (
            "`stream_options` of chat clients are taken.",
            ASKED | {"stream": True, "stream_options": {"include_obfuscation": False}},
            200,
        ),
    ],
)


@require(AREA)
def events_of_a_stream(server: ServerProcess) -> None:
    """A stream begins with created and in_progress, opens and closes items and parts, numbers events, ends with completed."""
    found = events(server, RESPONSES, input="12+30=")
    assert [each["type"] for each in found if "delta" not in each["type"]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    text = "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta")
    final = found[-1]["response"]
    assert text == output_text(final) == "42" and final["usage"]["output_tokens"] == 3


@require(AREA)
def log_probabilities_of_a_stream(server: ServerProcess) -> None:
    """Deltas of a stream have their log-probabilities."""
    found = events(server, RESPONSES, input="12+30=", top_logprobs=3, include=["message.output_text.logprobs"])
    deltas = [each for each in found if each["type"] == "response.output_text.delta"]
    assert deltas and all(each["logprobs"] and len(each["logprobs"][0]["top_logprobs"]) == 3 for each in deltas)
    assert all(each["logprob"] <= 0 for delta in deltas for each in delta["logprobs"])


@require(AREA)
def calls_of_a_stream(server: ServerProcess) -> None:
    """A call streams its arguments, which make up those of the item that is done."""
    found = events(
        server, RESPONSES, input="12+30=", tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False
    )
    kinds = [each["type"] for each in found]
    parts = "".join(each["delta"] for each in found if each["type"] == "response.function_call_arguments.delta")
    done = next(each for each in found if each["type"] == "response.function_call_arguments.done")
    assert parts == done["arguments"] and json.loads(parts) == {"city": "Oslo"}
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") > 0


@require(AREA)
def a_stored_response_is_retrieved(server: ServerProcess) -> None:
    """A response is stored unless `store` is false, retrieved by id, and not found once deleted."""
    made = server.post(RESPONSES, ASKED).json()
    assert server.get(f"{RESPONSES}/{made['id']}").json()["status"] == "completed"
    hidden = server.post(RESPONSES, ASKED | {"store": False}).json()
    assert server.get(f"{RESPONSES}/{hidden['id']}").status_code == 404


@require(AREA)
def a_conversation_continues(server: ServerProcess) -> None:
    """Two responses may continue the same one, each with its history alone."""
    first = server.post(RESPONSES, ASKED).json()
    second, third = (server.post(RESPONSES, ASKED | {"previous_response_id": first["id"]}).json() for _ in range(2))
    assert second["usage"]["input_tokens"] == third["usage"]["input_tokens"] > first["usage"]["input_tokens"]


@require(AREA)
def an_unknown_response_is_an_error(server: ServerProcess) -> None:
    """An unknown `previous_response_id` is an error with message, type and code."""
    answer = server.post(RESPONSES, ASKED | {"previous_response_id": "bad"})
    assert answer.status_code in (400, 404) and {"message", "type", "code"} <= set(answer.json()["error"])


@require(AREA)
def a_background_response(server: ServerProcess) -> None:
    """A background response returns at once, is polled until it is completed, and cannot be cancelled then."""
    made = server.post(RESPONSES, ASKED | {"background": True}).json()
    assert made["status"] in ("queued", "in_progress")
    end = time.monotonic() + 20
    while (now := server.get(f"{RESPONSES}/{made['id']}").json())["status"] in ("queued", "in_progress"):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert output_text(now) == "42"
    assert server.post(f"{RESPONSES}/{made['id']}/cancel", {}).status_code == 400


@require(AREA)
def a_background_response_is_cancelled(server: ServerProcess) -> None:
    """A cancelled background response stays cancelled."""
    made = server.post(RESPONSES, ASKED | {"background": True, "max_output_tokens": 450, "ignore_eos": True}).json()
    assert server.post(f"{RESPONSES}/{made['id']}/cancel", {}).json()["status"] == "cancelled"
    assert server.get(f"{RESPONSES}/{made['id']}").json()["status"] == "cancelled"


@require(AREA)
def stream_options_include_usage(server: ServerProcess) -> None:
    """`stream_options.include_usage`, which some clients send, is taken: the last event has the usage anyway."""
    found = events(server, RESPONSES, input="12+30=", stream_options={"include_usage": True})
    assert found[-1]["response"]["usage"]["total_tokens"] == 13


@require(AREA, "the prompt and the raw answer are what `/tokenize` and `return_token_ids` of chats return")
def raw_messages_are_returned(server: ServerProcess) -> None:
    """`enable_response_messages` returns the rendered prompt, the raw answer and their tokens."""
    assert server.post(RESPONSES, ASKED | {"enable_response_messages": True}).json()["input_messages"]
