"""Requests of agents: what a server does not know is left out and said, and each conversation is in the form of its template."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serving.running import ServerProcess

USER = {"role": "user", "content": "1+1="}
FUNCTION = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
WARNING = "x-torchweave-warning"


def chat(server: ServerProcess, **fields: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 2, **fields})


def messages(server: ServerProcess, **fields: Any) -> httpx.Response:
    return server.post("/v1/messages", {"messages": [USER], "max_tokens": 2, **fields})


def respond(server: ServerProcess, **fields: Any) -> httpx.Response:
    return server.post("/v1/responses", {"input": "1+1=", "max_output_tokens": 2, **fields})


# -- fields ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {"messages": [USER], "telemetry": {"a": 1}}, "telemetry"),
        ("/v1/chat/completions", {"messages": [USER], "stream_options": {"zeal": 1}, "stream": True}, "stream_options.zeal"),
        ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL | {"zeal": 1}]}, "tools.zeal"),
        ("/v1/completions", {"prompt": "1+1=", "telemetry": 1}, "telemetry"),
        ("/v1/messages", {"messages": [USER], "max_tokens": 2, "thread": {"type": "create"}}, "thread"),
        ("/v1/messages/count_tokens", {"messages": [USER], "telemetry": 1}, "telemetry"),
        ("/v1/responses", {"input": "1+1=", "telemetry": 1}, "telemetry"),
        ("/v1/responses", {"input": "1+1=", "tools": [{"type": "function", **FUNCTION, "zeal": True}]}, "tools.zeal"),
        ("/tokenize", {"prompt": "1+1=", "telemetry": 1}, "telemetry"),
    ],
)  # fmt: skip
def test_an_unknown_field_is_left_out_and_said(
    server: ServerProcess, path: str, body: dict[str, Any], named: str
) -> None:
    answer = server.post(path, body | ({"max_tokens": 2} if "completions" in path else {}))
    assert answer.status_code == 200, answer.text
    assert answer.headers[WARNING] == f"The field {named} is unknown and was left out."
    assert 'torchweave_request_warnings_total{kind="unknown_field"}' in server.get("/metrics").text


def test_a_field_without_effect_needs_no_warning(server: ServerProcess) -> None:
    for answer in (
        chat(server, user="a"),
        respond(server, client_metadata={"a": "b"}, include=["reasoning.encrypted_content"]),
    ):
        assert answer.status_code == 200 and WARNING not in answer.headers


@pytest.mark.parametrize("field", [{"max_token": 3}, {"temprature": 1}, {"functions": []}, {"lora_request": {}}])
def test_a_field_that_means_a_known_one_is_refused(server: ServerProcess, field: dict[str, Any]) -> None:
    answer = chat(server, **field)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(
        f"unknown field '{next(iter(field))}'; "
    )


# -- Claude Code -------------------------------------------------------------------------------------------------------


def count(server: ServerProcess, **fields: Any) -> int:
    answer = server.post("/v1/messages/count_tokens", {"messages": [USER], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]


def test_the_billing_block_does_not_reach_the_prompt(server: ServerProcess) -> None:
    text = {"type": "text", "text": "Be brief."}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=abc;"}
    assert count(server, system=[billing, text]) == count(server, system=[text])
    assert count(server, system=[billing]) == count(server)
    assert count(server, system=billing["text"] + "\n\nBe brief.") == count(server, system="Be brief.")


def test_an_effort_that_the_template_does_not_read_is_dropped(reasoning_server: ServerProcess) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for effort in ("low", "high", "max"):
        answer = chat(reasoning_server, reasoning_effort=effort, chat_template=plain)
        assert answer.status_code == 200 and "does not read reasoning_effort" in answer.headers[WARNING]
    levels = "{% if reasoning_effort not in ['low', 'high'] %}{{ raise_exception('level') }}{% endif %}" + plain
    answer = chat(reasoning_server, reasoning_effort="max", chat_template=levels)
    assert answer.status_code == 200 and "high is used" in answer.headers[WARNING]
    assert (
        messages(reasoning_server, output_config={"effort": "high"}, thinking={"type": "adaptive"}).status_code == 200
    )


BLOCKS = [
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A document."}, "title": "T"},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aaaa"}},
    {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "b"}]}},
    {"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "b"}]},
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "title": "T", "url": "u"}]},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "web_search_tool_result_error", "error_code": "x"}},
    {"type": "tool_reference", "tool_name": "Read"},
    {"type": "container_upload", "file_id": "f"},
    {"type": "a_block_of_next_year"},
]  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block["type"])
def test_blocks_that_models_cannot_read_become_texts(server: ServerProcess, block: dict[str, Any]) -> None:
    without = count(server, messages=[{"role": "user", "content": "a"}])
    assert count(server, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, block]}]) > without
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]}
    assert messages(server, messages=[USER, use, result]).status_code == 200


def test_an_image_in_a_result_becomes_a_text_for_a_model_that_reads_text(server: ServerProcess) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aaaa"}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}
    answer = messages(server, messages=[USER, use, {"role": "user", "content": [result]}])
    assert answer.status_code == 200 and "reads only text" in answer.headers[WARNING]
    calls = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_image", "image_url": "data:image/png;base64,aaaa"}],
    }
    answer = respond(server, input=[USER, *calls, output])
    assert answer.status_code == 200 and "reads only text" in answer.headers[WARNING]
    shown = messages(server, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    assert shown.status_code == 400, "the user's own image must not be dropped"


def test_tools_of_anthropic_are_left_out_unless_forced(server: ServerProcess) -> None:
    mine = {"name": "Read", "input_schema": {"type": "object"}}
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    answer = messages(server, tools=[mine, hosted, {"type": "bash_20250124", "name": "bash"}])
    assert (
        answer.status_code == 200
        and "'web_search' of type 'web_search_20250305' was left out" in answer.headers[WARNING]
    )
    assert messages(server, tools=[mine, hosted], tool_choice={"type": "tool", "name": "web_search"}).status_code == 400
    assert messages(server, tools=[hosted], tool_choice={"type": "any"}).status_code == 400


# -- Codex -------------------------------------------------------------------------------------------------------------

NAMED = {"type": "function", "name": "get_weather"}
SPACE = {
    "type": "namespace",
    "name": "mcp__weather",
    "description": "Weather.",
    "tools": [{"type": "function", **FUNCTION}],
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


def only_call(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    (call,) = [item for item in answer.json()["output"] if item["type"].endswith("_call")]
    return call


@pytest.mark.parametrize(
    "choice",
    [NAMED | {"namespace": "mcp__weather"}, NAMED, "required"],
    ids=("both", "name", "required"),
)  # fmt: skip
def test_a_call_of_a_namespace_has_its_name(server: ServerProcess, choice: Any) -> None:
    call = only_call(respond(server, tools=[SPACE, {"type": "web_search"}], tool_choice=choice, max_output_tokens=60))
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "get_weather", "mcp__weather")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
    assert respond(server, input=[USER, call, result], tools=[SPACE]).status_code == 200


def test_functions_of_one_name_in_two_namespaces_are_told_apart(server: ServerProcess) -> None:
    other = SPACE | {"name": "mcp__news"}
    plain = {"type": "function", **FUNCTION}
    for choice, namespace in (
        ({"namespace": "mcp__news"}, "mcp__news"),
        ({"namespace": "mcp__weather"}, "mcp__weather"),
        ({}, None),
    ):
        tools = [plain, SPACE, other]
        call = only_call(respond(server, tools=tools, tool_choice=NAMED | choice, max_output_tokens=60))
        assert (call["name"], call.get("namespace")) == ("get_weather", namespace)


def test_a_custom_tool_takes_a_text(server: ServerProcess) -> None:
    fields = {"tools": [PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}, "max_output_tokens": 60}
    call = only_call(respond(server, **fields))
    assert call["type"] == "custom_tool_call" and call["name"] == "apply_patch" and isinstance(call["input"], str)
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
    assert respond(server, input=[USER, call, output], tools=[PATCH]).status_code == 200
    events = list(server.client().responses.create(model="demo", input="1+1=", stream=True, **fields))
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert events[-1].response.output[-1].input == done.input


ITEMS = [
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "image_generation_call", "id": "i", "status": "completed", "result": "aaaa"},
    {"type": "local_shell_call", "id": "l", "call_id": "c", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "c", "output": "total 0"},
    {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
    {"type": "compaction", "encrypted_content": "aaaa"},
    {"type": "reasoning", "id": "r", "summary": [], "content": None, "encrypted_content": "aaaa"},
    {"type": "an_item_of_next_year"},
]  # fmt: skip


def test_items_of_other_tools_are_rendered_or_left_out(server: ServerProcess) -> None:
    answer = respond(server, input=[USER, *ITEMS, USER])
    assert answer.status_code == 200, answer.text
    said = answer.headers[WARNING]
    assert (
        all(kind in said for kind in ("mcp_list_tools", "compaction", "an_item_of_next_year"))
        and "web_search" not in said
    )


def test_a_reference_stands_for_a_stored_item(server: ServerProcess) -> None:
    first = respond(server).json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    answer, same = (respond(server, input=[USER, each, USER]).json() for each in (reference, first["output"][0]))
    assert answer["usage"]["input_tokens"] == same["usage"]["input_tokens"]
    unknown = respond(server, input=[USER, {"type": "item_reference", "id": "msg_unknown"}])
    assert unknown.status_code == 404 and "send the item itself" in unknown.json()["error"]["message"]


def test_truncation_drops_the_oldest_turns(server: ServerProcess) -> None:
    turns = [{"role": role, "content": "1+1=2 " * 40} for _ in range(12) for role in ("user", "assistant")]
    conversation = [{"role": "system", "content": "Be brief."}, *turns, USER]
    assert respond(server, input=conversation).status_code == 400
    answer = respond(server, input=conversation, truncation="auto")
    assert answer.status_code == 200 and answer.json()["truncation"] == "auto", answer.text
    assert respond(server, input="1+1=" * 4000, truncation="auto").status_code == 400


# -- templates ---------------------------------------------------------------------------------------------------------

FIRST_ONLY = (
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def prompt(server: ServerProcess, template: str, conversation: list[Any], **fields: Any) -> str:
    body = {"messages": conversation, "chat_template": template, **fields}
    tokens = server.post("/tokenize", body)
    assert tokens.status_code == 200, tokens.text
    return server.post("/detokenize", {"tokens": tokens.json()["tokens"]}).json()["prompt"]


def test_a_later_system_message_stays_where_it_is(reasoning_server: ServerProcess) -> None:
    later = {"role": "system", "content": "2+2="}
    assert prompt(reasoning_server, FIRST_ONLY, [USER, later]) == "[user]1+1=[user]2+2="
    assert prompt(reasoning_server, FIRST_ONLY, [later, later, USER]).startswith("[system]2+2=\n\n2+2=[user]")


def test_parts_reach_a_template_that_reads_them(reasoning_server: ServerProcess) -> None:
    template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    template += "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
    parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("1+1=", "2")]}]
    assert prompt(reasoning_server, template, parts) == "(1+1=)(2)"
    assert prompt(reasoning_server, template, parts, chat_template_content_format="string") == "1+1=\n2"
    assert prompt(reasoning_server, template, [USER], chat_template_content_format="openai") == "(1+1=)"
