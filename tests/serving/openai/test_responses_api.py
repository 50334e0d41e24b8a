"""`/v1/responses`, as the official client sees it."""

from __future__ import annotations

import json
import time
from itertools import groupby
from typing import Any

import openai
import pydantic
import pytest

from tests.serving.running import LONG, ServerProcess
from torchweave.serving.openai.responses.items import messages_of
from torchweave.serving.openai.responses.store import ResponseStore
from torchweave.serving.openai.responses.tools import ResponseTools
from torchweave.serving.request_warnings import RequestWarnings

SUM: dict[str, Any] = {"model": "demo", "input": "12+30=", "temperature": 0}
ZONE = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "now", "parameters": ZONE}


def test_a_response_is_created_stored_and_deleted(server: ServerProcess) -> None:
    responses = server.client().responses
    made = responses.create(**SUM, metadata={"a": "b"})
    assert (made.output_text, made.status, made.object, made.metadata) == ("42", "completed", "response", {"a": "b"})
    assert made.usage is not None and (made.usage.input_tokens, made.usage.output_tokens) == (10, 3)
    assert made.usage.output_tokens_details.reasoning_tokens == 0
    assert responses.retrieve(made.id).model_dump() == made.model_dump()
    with pytest.raises(openai.BadRequestError, match="only a background response in progress"):
        responses.cancel(made.id)
    responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="There is no response"):
        responses.retrieve(made.id)
    unstored = responses.create(**SUM, store=False)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(unstored.id)
    cut = responses.create(**SUM, max_output_tokens=1)
    assert cut.status == "incomplete" and cut.incomplete_details and cut.output_text == "4"
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_response_continues_another(server: ServerProcess) -> None:
    """The conversation is that of the chat with all turns; instructions hold for one response."""
    responses = server.client().responses
    first = responses.create(**SUM, instructions="1+1=")
    second = responses.create(**SUM | {"input": "2+2="}, previous_response_id=first.id)
    turns = [("user", "12+30="), ("assistant", "42"), ("user", "2+2=")]
    asked = {"messages": [{"role": role, "content": text} for role, text in turns], "temperature": 0}
    chat = server.post("/v1/chat/completions", asked).json()
    assert second.usage and second.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert second.output_text == chat["choices"][0]["message"]["content"]
    assert second.previous_response_id == first.id
    with pytest.raises(openai.NotFoundError, match="There is no response"):
        responses.create(**SUM, previous_response_id="resp_0")


def test_the_input_of_a_response_is_listed(server: ServerProcess) -> None:
    responses = server.client().responses
    first = responses.create(**SUM)
    second = responses.create(**(SUM | {"input": [{"role": "user", "content": "1+1="}]}), previous_response_id=first.id)
    newest = responses.input_items.list(second.id, limit=2)
    assert [item.content[0].text for item in newest] == ["1+1=", "42", "12+30="], "the client asks for both pages"  # type: ignore[union-attr]
    oldest = responses.input_items.list(second.id, order="asc", limit=1)
    assert oldest.data[0].content[0].text == "12+30=" and oldest.has_more  # type: ignore[union-attr]
    assert responses.retrieve(first.id).text.model_dump(exclude_none=True) == {"format": {"type": "text"}}  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="no item 'x'"):
        responses.input_items.list(second.id, after="x")


def test_events_add_up_to_the_response(server: ServerProcess) -> None:
    responses = server.client().responses
    events = list(responses.create(**SUM, stream=True, include=["message.output_text.logprobs"], top_logprobs=1))
    assert [kind for kind, _ in groupby(event.type for event in events)] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == "42", "in one or two: a busy machine sends both tokens as one"
    assert [entry.token for event in deltas for entry in event.logprobs][:2] == ["4", "2"]
    final = events[-1].response  # type: ignore[union-attr]
    assert final.output_text == "42" and responses.retrieve(final.id).output_text == "42"
    assert [entry.token for entry in final.output[0].content[0].logprobs][:2] == ["4", "2"]  # type: ignore[union-attr]
    with responses.stream(model="demo", input="12+30=", temperature=0) as stream:
        assert stream.get_final_response().output_text == "42"


def test_functions_are_called_and_their_results_returned(server: ServerProcess) -> None:
    responses = server.client().responses
    asked: dict[str, Any] = {"model": "demo", "input": "12+30=", "tools": [TOOL], "max_output_tokens": 60}
    for choice in ("required", {"type": "function", "name": "now"}):
        made = responses.create(**asked, tool_choice=choice)
        call = made.output[0]
        assert call.type == "function_call" and call.name == "now" and json.loads(call.arguments) == {"zone": "utc"}
        events = list(responses.create(**asked, tool_choice=choice, stream=True))
        arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        done = next(e for e in events if e.type == "response.function_call_arguments.done")
        assert "".join(arguments) == done.arguments == call.arguments and done.name == "now"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    after = responses.create(
        model="demo", input=[result], previous_response_id=made.id, tools=[TOOL], max_output_tokens=60
    )
    assert after.output[0].type == "message"
    other = TOOL | {"name": "then"}
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "then"}]}
    made = responses.create(model="demo", input="1+1=", tools=[TOOL, other], tool_choice=allowed, max_output_tokens=60)
    assert {item.name for item in made.output if item.type == "function_call"} == {"then"}


def test_a_forced_call_drops_the_format_of_plain_answers(server: ServerProcess) -> None:
    function = {"name": "now", "parameters": ZONE}
    asked = {"messages": [{"role": "user", "content": "1+1="}], "tools": [{"type": "function", "function": function}]}
    forced = {"tool_choice": "required", "response_format": {"type": "json_object"}, "max_tokens": 60}
    answer = server.post("/v1/chat/completions", asked | forced)
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"


def test_structured_text_is_parsed(server: ServerProcess) -> None:
    class Sum(pydantic.BaseModel):
        even: bool

    made = server.client().responses.parse(model="demo", input="12+30=", text_format=Sum)
    assert isinstance(made.output_parsed, Sum)


def test_a_background_response_is_polled_and_cancelled(server: ServerProcess) -> None:
    responses = server.client().responses
    made = responses.create(**SUM, background=True)
    assert made.status == "in_progress"
    end = time.monotonic() + 20
    while responses.retrieve(made.id).status == "in_progress" and time.monotonic() < end:
        time.sleep(0.02)
    assert responses.retrieve(made.id).output_text == "42"
    extra = {"ignore_eos": True}
    made = responses.create(**SUM, background=True, max_output_tokens=LONG["max_tokens"], extra_body=extra)
    assert responses.cancel(made.id).status == responses.retrieve(made.id).status == "cancelled"
    assert responses.cancel(made.id).status == "cancelled"


def test_reasoning_is_an_item_in_every_http_process(reasoning_server: ServerProcess) -> None:
    for _ in range(4):  # each client has a connection of its own, to any of the processes
        made = reasoning_server.client().responses.create(**SUM)
        events = list(reasoning_server.client().responses.create(**SUM, stream=True))
        final = reasoning_server.client().responses.retrieve(made.id)
        assert [item.type for item in final.output] == ["reasoning"] and final.output_text == ""
        text = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert text == final.output[0].content[0].text != ""  # type: ignore[union-attr, index]
        assert final.usage and final.usage.output_tokens_details.reasoning_tokens == final.usage.output_tokens
    no_thinking = reasoning_server.client().responses.create(**SUM, reasoning={"effort": "none"})
    assert no_thinking.output_text == "42"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "does not run"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools is empty"),
        ({"input": []}, "at least 1 item"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "only text parts"),
        ({"background": True, "stream": True}, "background needs store=true"),
        ({"conversation": "a"}, "unknown field 'conversation'"),
        ({"max_output_tokens": 0}, "max_output_tokens: Input should be greater than or equal to 1"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "needs a schema"),
        ({"metadata": {"a": "\ud800"}}, "half of a surrogate pair"),
        ({"metadata": {"a": "\ud800"}, "stream": True}, "half of a surrogate pair"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_in_one_sentence(
    server: ServerProcess, fields: dict[str, Any], said: str
) -> None:
    answer = server.post("/v1/responses", SUM | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"] and "\n" not in error["message"]


def test_items_are_messages() -> None:
    parts: Any = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:,"}]
    items: Any = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": parts},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Why"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ]
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in (("1", "f"), ("2", "g"))
    ]
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert messages_of("Rules.", items, ResponseTools(), RequestWarnings()) == [
        {"role": "system", "content": "Rules.\n\nBe short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
        {"role": "assistant", "content": "Hm.", "reasoning_content": "Why", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]


def test_the_store_is_bounded_and_forgets_what_was_used_longest_ago() -> None:
    store = ResponseStore(1000)
    for name in "abc":
        store.put({"id": name, "text": "x" * 300}, [])
        store.get("a")
    assert store.get("b") is None and store.get("a") and store.get("c") and 600 < store.num_bytes <= 1000
    store.put({"id": "large", "text": "x" * 2000}, [])
    assert len(store) == 0 == store.num_bytes
