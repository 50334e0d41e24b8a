"""Reasoning parsers: every format, in parts of any size, after prompts that open the reasoning or do not."""

from __future__ import annotations

import json

import pytest

from tests.serving.running import ServerProcess
from torchweave.serving.openai.answer_parser import AnswerFormat, AnswerParser, WholeAnswer
from torchweave.serving.openai.protocol import Tool
from torchweave.serving.openai.reasoning import FORMATS, detect_reasoning_format
from torchweave.serving.openai.tools import ParserDelta, ToolUse, make_tool_parser

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CASES = [
    ("qwen3", "", "<think>\nA < b.\n</think>\n\nIt is.", "A < b.", "It is."),
    ("qwen3", "<think>\n", "A </thin b.\n</think>\n\nIt is.", "A </thin b.", "It is."),
    ("qwen3", "<think>\n\n</think>\n\n", "It is. <think>", "", "It is. <think>"),
    ("qwen3", "", "\n It <think> is.</think>", "", "\n It <think> is.</think>"),
    ("qwen3", "", "<think>\n\n</think>\n\nIt is.", "", "It is."),
    ("qwen3", "", "<think>I was cut ", "I was cut", ""),
    ("qwen3", "", "<thi", "", "<thi"),
    ("deepseek_r1", "", "A.\n</think>\nIt is.", "A.", "It is."),
    ("deepseek_r1", "", "<think>A.</think>It is.", "A.", "It is."),
    ("deepseek_r1", "</think>", "It is.", "", "It is."),
    ("kimi_vl", "", "◁think▷A.◁/think▷It is.", "A.", "It is."),
    ("seed_oss", "", "<seed:think>A.</seed:think>It is.", "A.", "It is."),
    ("mistral", "", "[THINK]A [/THIN].[/THINK]It is.", "A [/THIN].", "It is."),
    ("granite", "", "Here is my thought process: A.\n\nHere is my response: It is.", "A.", "It is."),
    ("granite", "", "Here's my thought process: A. Here is\nHere's my response:\nIt is.", "A. Here is", "It is."),
    ("granite", "", "Here is the answer.", "", "Here is the answer."),
]


def read(answer_format: AnswerFormat, parts: list[str]) -> WholeAnswer:
    parser = AnswerParser(answer_format)
    pieces: list[ParserDelta] = []
    for number, part in enumerate(parts):
        pieces += parser.feed(part, is_last=number == len(parts) - 1)
    return WholeAnswer.of(pieces)


@pytest.mark.parametrize(("form", "prompt", "answer", "reasoning", "text"), CASES, ids=lambda value: str(value)[:30])
def test_reasoning_and_answer_do_not_depend_on_chunks(
    form: str, prompt: str, answer: str, reasoning: str, text: str
) -> None:
    for size in (len(answer), 1, 2, 3, 7):
        parts = [answer[at : at + size] for at in range(0, len(answer), size)]
        found = read(AnswerFormat(reasoning=FORMATS[form], prompt_tail=f"Why?<|assistant|>{prompt}"), parts)
        assert (found.reasoning, found.text, found.calls) == (reasoning, text, [])


def test_calls_after_reasoning_are_calls_and_those_within_are_not() -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "now"}})
    tools = ToolUse([], None, make_tool_parser("hermes", [tool]))
    whole = f"<think>I could {CALL}.</think>\n{CALL}"
    for parts in ([whole], list(whole)):
        found = read(AnswerFormat(tools, FORMATS["qwen3"]), parts)
        assert found == WholeAnswer(f"I could {CALL}.", "", [("now", "{}")])
        hidden = read(AnswerFormat(tools, FORMATS["qwen3"], with_reasoning=False), parts)
        assert hidden == WholeAnswer("", "", [("now", "{}")])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<think>\\n' }}", "qwen3"),
        ("{% set content = content.split('</think>')[-1] %}", "qwen3"),
        ("[THINK]{{ system }}<think>", "mistral"),
        ("◁think▷", "kimi_vl"),
        ("write 'Here is my thought process:'", "granite"),
        ("{{ messages }}", None),
    ],
)
def test_chat_template_selects_the_reasoning_format(template: str, form: str | None) -> None:
    assert detect_reasoning_format(template) == form


def test_a_chat_returns_reasoning_apart_whole_and_streamed(reasoning_server: ServerProcess) -> None:
    """The template opens the reasoning, and the model never closes it: all of the answer is reasoning."""
    client = reasoning_server.client()
    asked = {"model": "demo", "messages": [{"role": "user", "content": "12+30="}], "temperature": 0}
    answer = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    message = answer.choices[0].message
    assert message.content == "" and message.reasoning_content == message.reasoning != ""
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens > 1
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **asked)]  # type: ignore[call-overload]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning
    assert not any(delta.content for delta in deltas)
    plain = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}
    for change, text in (
        ({"include_reasoning": False}, ""),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "42"),
        ({"reasoning_effort": "none"}, "42"),
        ({"response_format": plain}, "7"),  # a grammar admits no reasoning
    ):
        answer = reasoning_server.post("/v1/chat/completions", asked | change).json()
        message = answer["choices"][0]["message"]
        assert message["content"] == text and "reasoning" not in message, change


def test_reasoning_of_earlier_messages_reaches_the_template(reasoning_server: ServerProcess) -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = [{"role": "developer", "content": "1"}, {"role": "assistant", "content": "2", name: "3"}]
        ids = reasoning_server.post("/tokenize", {"messages": messages}).json()["tokens"]
        prompt = reasoning_server.post("/detokenize", {"tokens": ids}).json()["prompt"]
        assert prompt == "<bos>(system)1(assistant)[3]2<|assistant|><think>\n"


def test_templates_of_requests_need_trust(server: ServerProcess, reasoning_server: ServerProcess) -> None:
    asked = {"messages": [{"role": "user", "content": "12+30="}], "chat_template": "{{ 'a' }}"}
    assert reasoning_server.post("/tokenize", asked).json()["count"] == 1
    refused = server.post("/v1/chat/completions", asked)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"
    assert "trust_request_chat_template" in json.dumps(refused.json())
