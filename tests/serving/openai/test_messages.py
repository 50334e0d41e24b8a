"""Anthropic's `/v1/messages`, as its official client sees it."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serving.running import ServerProcess
from torchweave.serving.anthropic.protocol import MessagesRequest
from torchweave.serving.request_warnings import RequestWarnings

if TYPE_CHECKING:  # 1.7 s of CPU time in each process that collects these tests
    import anthropic

SUM: dict[str, Any] = {
    "model": "demo", "max_tokens": 40, "extra_body": {"temperature": 0}, "messages": [{"role": "user", "content": "12+30="}],
}  # fmt: skip
ZONE = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc"]}},
    "required": ["zone"],
    "additionalProperties": False,
}


def client(server: ServerProcess) -> anthropic.Anthropic:
    import anthropic

    http = anthropic.DefaultHttpxClient(verify=False)
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60, http_client=http)


def test_a_message_whole_and_streamed(server: ServerProcess) -> None:
    messages = client(server).messages
    made = messages.create(**SUM)
    assert [block.text for block in made.content] == ["42"] and made.stop_reason == "end_turn"
    assert made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0) == 10 and made.usage.output_tokens == 3
    with messages.stream(**SUM) as stream:
        assert "".join(stream.text_stream) == "42"
        final = stream.get_final_message()
    assert final.content[0].text == "42" and final.stop_reason == "end_turn" and final.usage.output_tokens == 3
    kinds = [kind for kind, _ in groupby(event.type for event in messages.create(stream=True, **SUM))]
    assert kinds == [  # deltas are one or two: a busy machine sends both tokens as one
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert messages.create(**SUM | {"max_tokens": 1}).stop_reason == "max_tokens"
    stopped = messages.create(**SUM, stop_sequences=["2"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("4", "stop_sequence", "2")


def test_the_prompt_is_that_of_the_chat(server: ServerProcess) -> None:
    system = [{"type": "text", "text": "1+1=", "cache_control": {"type": "ephemeral"}}]
    counted = client(server).messages.count_tokens(model="demo", system=system, messages=SUM["messages"])  # type: ignore[arg-type]
    chat = [{"role": "system", "content": "1+1="}, *SUM["messages"]]
    assert counted.input_tokens == server.post("/tokenize", {"messages": chat}).json()["count"]


def test_tools_are_used(server: ServerProcess) -> None:
    messages = client(server).messages
    tools: Any = [{"name": "now", "input_schema": ZONE}]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "now"}):
        asked = {**SUM, "tools": tools, "tool_choice": choice, "max_tokens": 80}
        made = messages.create(**asked)
        block = made.content[0]
        assert block.type == "tool_use" and (block.name, block.input) == ("now", {"zone": "utc"})
        assert made.stop_reason == "tool_use"
        with messages.stream(**asked) as stream:
            final = stream.get_final_message().content[0]
        assert final.type == "tool_use" and final.input == {"zone": "utc"}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "12:00"}]}
    turns = [*SUM["messages"], {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    assert messages.create(**SUM | {"messages": turns}, tools=tools).content[0].type == "text"


def test_reasoning_is_a_thinking_block(reasoning_server: ServerProcess) -> None:
    messages = client(reasoning_server).messages
    made = messages.create(**SUM)
    assert [block.type for block in made.content] == ["thinking"] and made.content[0].thinking  # type: ignore[union-attr]
    with messages.stream(**SUM) as stream:
        assert stream.get_final_message().content[0].thinking == made.content[0].thinking  # type: ignore[union-attr]
    plain = messages.create(**SUM, thinking={"type": "disabled"})
    assert [block.type for block in plain.content] == ["text"]


def test_turns_are_chat_messages() -> None:
    turns = [
        {
            "role": "user",
            "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "a"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Why", "signature": ""},
                {"type": "text", "text": "Hm."},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "ü"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "text", "text": "So?"}, {"type": "tool_result", "tool_use_id": "1", "content": "x"}],
        },
        {"role": "assistant", "content": "It"},
    ]
    body = MessagesRequest.model_validate({"max_tokens": 3, "messages": turns[1:]})
    chat = body.to_chat(RequestWarnings())
    assert [message.model_dump(exclude_none=True) for message in chat.messages] == [
        {
            "role": "assistant",
            "content": "Hm.",
            "reasoning_content": "Why",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "It"},
    ]
    assert chat.continue_final_message and not chat.add_generation_prompt and chat.max_completion_tokens == 3
    image = MessagesRequest.model_validate({"max_tokens": 3, "messages": turns[:1]})._chat_fields(RequestWarnings())[
        "messages"
    ]
    assert image[0]["content"] == [{"type": "image_url", "image_url": {"url": "data:image/png;base64,a"}}]


def test_errors_have_anthropics_form(server: ServerProcess) -> None:
    import anthropic

    messages = client(server).messages
    with pytest.raises(anthropic.NotFoundError, match="'gpt-9' is not served here"):
        messages.create(**SUM | {"model": "gpt-9"})
    untyped: Any = [{"role": "user", "content": [{"source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match="A content block needs type"):
        messages.create(**SUM | {"messages": untyped})
    for body, said in (
        ({"messages": SUM["messages"]}, "max_tokens"),
        ({"messages": SUM["messages"], "max_tokens": 0}, "max_tokens:"),
        ({"messages": SUM["messages"], "max_tokens": 1, "tool_choice": {"type": "any"}}, "tools is empty"),
        ({"messages": SUM["messages"], "max_tokens": 1, "max_token": 1}, "did you mean max_tokens?"),
    ):
        answer: httpx.Response = server.post("/v1/messages", body)
        error = answer.json()
        assert answer.status_code == 400 and error["type"] == "error" and said in error["error"]["message"]
        assert error["error"]["type"] == "invalid_request_error"
        assert error["request_id"] == answer.headers["x-request-id"]
