"""Answers that models write and parsers get wrong: what is called, with which arguments, and what stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.openai.test_tools import cuts, read, tool
from torchweave.serving.openai.answer_parser import AnswerFormat, AnswerParser, WholeAnswer
from torchweave.serving.openai.reasoning import FORMATS
from torchweave.serving.openai.tools import ToolUse, make_tool_parser
from torchweave.serving.openai.tools.schema_types import Parameters

TOOLS = [
    tool("now"),
    tool("f", {"type": "object", "properties": {"a": {"type": "integer"}}}),
    tool("write", {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}),
]
SECTION, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
V3, V3_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def kimi(name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def deepseek(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def fenced(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def qwen(*arguments: tuple[str, str], name: str = "write", end: str = "</parameter>\n") -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n{end}" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def minimax(*arguments: tuple[str, str], name: str = "write") -> str:
    lines = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments)
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{lines}</invoke>\n</minimax:tool_call>'


def glm(*arguments: tuple[str, str], name: str = "write") -> str:
    lines = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)
    return f"<tool_call>{name}\n{lines}</tool_call>"


F, EMPTY = ("f", {"a": 1}), ("now", {})
WHICH_FUNCTION = [
    # Empty arguments before another call.
    ("kimi_k2", SECTION + kimi("now", "") + kimi("f", '{"a": 1}') + END, "", [EMPTY, F]),
    ("kimi_k2", SECTION + kimi("now", "") + END, "", [EMPTY]),
    ("deepseek_v3", V3 + deepseek("now", "") + deepseek("f", '{"a": 1}') + V3_END, "", [EMPTY, F]),
    ("deepseek_v3", V3 + fenced("now", "") + fenced("f", '{"a": 1}') + V3_END, "", [EMPTY, F]),
    ("mistral", '[TOOL_CALLS]now[TOOL_CALLS]f{"a": 1}', "", [EMPTY, F]),
    ("mistral", '[TOOL_CALLS]now[ARGS][TOOL_CALLS]f[ARGS]{"a": 1}', "", [EMPTY, F]),
    ("mistral", "[TOOL_CALLS]now", "", [EMPTY]),
    ("glm45", glm(name="now") + glm(("path", "p"), ("content", "c")), "", [EMPTY, ("write", {"path": "p", "content": "c"})]),
    # A function that the request does not have, before one that it has.
    ("kimi_k2", SECTION + kimi("fly", '{"b": 2}') + kimi("f", '{"a": 1}') + END, "", [("fly", {"b": 2}), F]),
    ("deepseek_v3", V3 + deepseek("fly", "{}") + deepseek("f", '{"a": 1}') + V3_END, "", [("fly", {}), F]),
    ("hermes", '<tool_call>{"name": "fly", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
     "", [("fly", {}), F]),
    ("hermes", '<tool_call>{"name": "fl</tool_call>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
     '<tool_call>{"name": "fl</tool_call>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', []),
    ("hermes", '<tool_call>{name: f}</tool_call>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
     "<tool_call>{name: f}</tool_call>", [F]),
    ("qwen3_coder", qwen(("x", "1"), name="fly") + "\n" + qwen(name="now"), "", [("fly", {"x": "1"}), EMPTY]),
    ("gpt_oss", "<|channel|>commentary to=functions.fly<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.f"
     '<|message|>{"a": 1}<|call|>', "", [("fly", {}), F]),
    ("gpt_oss", "<|channel|>commentary to=functions.now<|message|><|call|>", "", [EMPTY]),
    ("gpt_oss", 'Sure. <|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>', "Sure.", [F]),
    # White space between texts stays.
    ("hermes", 'A.\n<tool_call>{"name": "now"}</tool_call>\nB. ', "A.\n\nB.", [EMPTY]),
    ("mistral", 'A[TOOL_CALLS]f{"a": 1} B', "A B", [F]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls"), WHICH_FUNCTION, ids=[f"{at}-{case[0]}" for at, case in enumerate(WHICH_FUNCTION)]
)  # fmt: skip
def test_every_call_has_its_own_function(form: str, answer: str, text: str, calls: list[tuple[str, Any]]) -> None:
    for parts in cuts(answer):
        assert read(make_tool_parser(form, TOOLS), parts) == (text, calls), parts


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": 1}, "id": "x"', {"a": 1}),
        ('{"a": 1}, "id": null, "meta": {"k": ["}"]}', {"a": 1}),
        ('{"a": NaN, "b": -Infinity, "c": 1e400}', {"a": "NaN", "b": "-Infinity", "c": "1e400"}),
        ('{"a": True, "b": None,}', {"a": True, "b": None}),
        ("{'a': 'it is \"b\"'}", {"a": 'it is "b"'}),
        ('{"a": "line\nbreak\t\\d"}', {"a": "line\nbreak\t\\d"}),
        ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
        ('{"a": "</tool_call>"}', {"a": "</tool_call>"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("null", {}),
        ("[]", {}),
        # Half a character, which no UTF-8 holds, is U+FFFD.
        (
            '{"s": "\\ud83d\\ude00 \\uD83D \\ude00\\ud83d\\ud83d\\ude00", "\\ud800": "\\ud83d"}',
            {"s": "\U0001f600 \ufffd \ufffd\ufffd\U0001f600", "\ufffd": "\ufffd"},
        ),
    ],
    ids=str,
)
def test_arguments_are_always_json(written: str, arguments: Any) -> None:
    call = f'{{"name": "f", "arguments": {written}}}'
    for form, answer in (
        ("hermes", f"<tool_call>\n{call}\n</tool_call>"),
        ("mistral", f"[TOOL_CALLS][{call}]"),
        ("llama3_json", call),
        ("granite", f"<|tool_call|>[{call}]"),
        ("jamba", f"<tool_calls>[{call}]</tool_calls>"),
        ("internlm", f"<|action_start|><|plugin|>{call}<|action_end|>"),
    ):
        for parts in cuts(answer):
            assert read(make_tool_parser(form, TOOLS), parts) == ("", [("f", arguments)]), (form, parts)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("{'name': 'f', 'arguments': {'a': 1}}", {"a": 1}),
        ('{"name": "f", "args": {"a": 1}}', {"a": 1}),
        ('{"input": {"a": 1}, "name": "f"}', {"a": 1}),
        ('{"name": "f", "a": 1, "id": "x"}', {"a": 1}),
        ('{"name": "f", "id": "x"}', {}),
        ('{"name": "f", "arguments": {}, "a": 1}', {}),
    ],
    ids=str,
)
def test_arguments_at_another_place_are_not_lost(call: str, arguments: Any) -> None:
    for parts in cuts(f"<tool_call>{call}</tool_call>"):
        assert read(make_tool_parser("hermes", TOOLS), parts) == ("", [("f", arguments)]), parts


CONTENTS = [
    "ends </parameter> ok", "a </parameter>\nb", "</arg_value> and </invoke>", "ends </function> ok", "ends </tool_call> ok",
    "x <parameter=e>1</parameter> y", 'x <parameter name="e">1</parameter> y', "`<parameter=content>` opens",
    "", "\n", "a && <b> &amp;",
    "Write:\n" + qwen(("path", "x"), ("content", "y")) + "\nDone.", "</parameter>\n</function>\n</tool_call> ends a call",
    minimax(("path", "x"), ("content", "y")), glm(("path", "x"), ("content", "y")), '{"a": "</parameter>"}', "5", "null",
]  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS, ids=lambda text: str(text)[:30])
@pytest.mark.parametrize(("form", "write"), [("qwen3_coder", qwen), ("minimax_m2", minimax), ("glm45", glm)])
def test_a_value_may_hold_the_tags_of_calls(form: str, write: Any, content: str) -> None:
    first, last = [("path", "a.md"), ("content", content)], [("content", content), ("path", "a.md")]
    expected = ("write", {"path": "a.md", "content": content})
    answers = [
        (write(*first), [expected]),
        (write(*first) + "\n" + write(("path", "b")), [expected, ("write", {"path": "b"})]),
    ]
    if not ("<parameter" in content or "<arg_key>path" in content):  # else it cannot be told from the next argument
        answers.append((write(*last), [expected]))
    for answer, calls in answers:
        for parts in cuts(answer):
            assert read(make_tool_parser(form, TOOLS), parts) == ("", calls), parts


def test_a_forgotten_closing_tag_does_not_merge_values() -> None:
    whole = ("write", {"path": "a.md", "content": "hi"})
    values = (("path", "a.md"), ("content", "hi"))
    answers = [
        ("qwen3_coder", qwen(*values, end=""), whole),
        ("qwen3_coder", qwen(*values).replace("a.md\n</parameter>", "a.md"), whole),
        ("qwen3_coder", qwen(*values).replace("hi\n</parameter>", "hi"), whole),
        ("minimax_m2", minimax(*values).replace("a.md</parameter>", "a.md"), whole),
        ("glm45", glm(*values).replace("a.md</arg_value>\n", "a.md"), whole),
    ]
    for form, answer, call in answers:
        for parts in cuts(answer):
            assert read(make_tool_parser(form, TOOLS), parts) == ("", [call]), parts


def test_an_end_as_the_format_has_it_outranks_one_within_a_value() -> None:
    content = "  </parameter></tool_call>[\n<parameter=e>\n1\n</parameter>"
    for parts in cuts(qwen(("path", content)) + "Done."):
        assert read(make_tool_parser("qwen3_coder", TOOLS), parts) == ("Done.", [("write", {"path": content})]), parts


@pytest.mark.parametrize("content", ["x</tool_call><tool_call>=null", "x</tool_call><tool_call>a<tool_call>("])
def test_a_call_after_a_call_is_one_only_with_arguments_or_an_end(content: str) -> None:
    answer = glm(("path", content), ("content", "y"))
    for parts in cuts(answer):
        assert read(make_tool_parser("glm45", TOOLS), parts) == ("", [("write", {"path": content, "content": "y"})]), (
            parts
        )


def test_text_after_a_call_is_text() -> None:
    first, second = (("path", "a"), ("content", "b")), (("path", "c"), ("content", "d"))
    calls = [("write", dict(first)), ("write", dict(second))]
    for form, write in (("qwen3_coder", qwen), ("minimax_m2", minimax), ("glm45", glm)):
        for parts in cuts(f"One.\n{write(*first)}\nTwo.\n{write(*second)}\nThree."):
            text, found = read(make_tool_parser(form, TOOLS), parts)
            assert found == calls and text.split() == ["One.", "Two.", "Three."], parts


SCHEMA = {
    "$defs": {"Count": {"type": "integer"}, "Point": {"properties": {"x": {}}}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "ref": {"$ref": "#/$defs/Count"},
        "all": {"allOf": [{"$ref": "#/$defs/Count"}, {"minimum": 0}]},
        "const": {"const": 5},
        "any": {"anyOf": [{"$ref": "#/$defs/Count"}, {"$ref": "#/$defs/Point"}]},
        "object": {"properties": {"x": {"type": "integer"}}},
        "list": {"items": {}},
        "optional": {"type": ["string", "null"]},
        "choice": {"enum": ["5", 5]},
        "number_first": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "text_first": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "loop": {"$ref": "#/$defs/Loop"},
        "text": {"type": "string", "maxLength": 9},
        "untyped": {},
    },
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ref", "5", 5), ("all", "5", 5), ("const", "5", 5), ("any", "5", 5), ("any", '{"x": 5}', {"x": 5}),
        ("object", '{"x": 5}', {"x": 5}), ("object", "{'x': None}", {"x": None}), ("list", "[1, 2]", [1, 2]),
        ("optional", "null", None), ("optional", "5", "5"), ("choice", "5", "5"), ("number_first", "5", 5),
        ("text_first", "5", "5"),
        ("loop", "5", 5), ("text", "5", "5"), ("untyped", "5", 5), ("untyped", "five", "five"), ("unknown", "5", "5"),
        ("ref", "NaN", "NaN"), ("ref", "1e400", "1e400"), ("ref", "five", "five"),
    ],
)  # fmt: skip
def test_values_between_tags_have_the_types_of_any_schema(name: str, text: str, value: Any) -> None:
    found = Parameters(SCHEMA).value(name, text)
    assert found == value and type(found) is type(value)


PYTHON = [
    ("[f(a=1), now()]", "", [F, EMPTY]),
    ("[f(a=true, b=null, c=None)]", "", [("f", {"a": True, "b": None, "c": None})]),
    ("[f(from='x', in=[1, {'k': (2, 3)}])]", "", [("f", {"from": "x", "in": [1, {"k": [2, 3]}]})]),
    ("[f(a='one\ntwo')]", "", [("f", {"a": "one\ntwo"})]),
    ('[f(a="""b"c""")]', "", [("f", {"a": 'b"c'})]),
    ("<|python_tag|>[f(a=1)]", "", [F]),
    ("<|python_start|>[f(a=1)]<|python_end|>", "", [F]),
    ("[now()] and text", "and text", [EMPTY]),
    ("[fly()]", "[fly()]", []),
    ("[f(1)]", "[f(1)]", []),
]


@pytest.mark.parametrize(("answer", "text", "calls"), PYTHON, ids=[case[0][:30] for case in PYTHON])
def test_calls_in_python(answer: str, text: str, calls: list[tuple[str, Any]]) -> None:
    for parts in cuts(answer):
        assert read(make_tool_parser("pythonic", TOOLS), parts) == (text, calls), parts


def test_names_with_hyphens_are_called_in_python() -> None:
    named = [tool("get-weather")]
    for parts in cuts("[get-weather(at-night=True)]"):
        assert read(make_tool_parser("pythonic", named), parts) == ("", [("get-weather", {"at-night": True})])


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
WITHIN = [  # answer, reasoning, text, calls
    (f"<think>\nI call.\n{CALL}", "I call.", "", [F]),
    (f"<think>\nI call.\n{CALL}\n{CALL}", "I call.", "", [F, F]),
    (f"<think>\nI call.\n{CALL}\n</think>\n\n", "I call.", "", [F]),
    (f"<think>\nI call.\n{CALL}\n</think>\n\nHi", f"I call.\n{CALL}", "Hi", []),
    ("<think>\nOr `<tool_call>`? No.\n</think>\n\nHi", "Or `<tool_call>`? No.", "Hi", []),
    ('<think>\n<tool_call>{"name": "f", "arguments": {"a":\n</think>\n\nHi',
     '<tool_call>{"name": "f", "arguments": {"a":', "Hi", []),
    ('<think>\n<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>', "", "", [("f", {"a": "</think>"})]),
    (f"<think>\nOr `<tool_call>`? {CALL}", "Or `<tool_call>`?", "", [F]),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "reasoning", "text", "calls"), WITHIN, ids=[str(at) for at in range(len(WITHIN))])
def test_a_call_may_end_the_reasoning(answer: str, reasoning: str, text: str, calls: list[tuple[str, Any]]) -> None:
    tools = ToolUse([], None, make_tool_parser("hermes", TOOLS))
    for parts in cuts(answer):
        parser = AnswerParser(AnswerFormat(tools, FORMATS["qwen3"]))
        pieces = [piece for at, part in enumerate(parts, 1) for piece in parser.feed(part, at == len(parts))]
        whole = WholeAnswer.of(pieces)
        found = [(name, json.loads(arguments)) for name, arguments in whole.calls]
        assert (whole.reasoning, whole.text, found) == (reasoning, text, calls), parts
        assert parser.has_calls == bool(calls)


@pytest.mark.parametrize(
    ("continued", "reasoning", "text"),
    [
        ("<think>\n", "it is 2", "Two"),
        ("<think>\nSo", " it is 2", "Two"),
        ("<think>\na\n</think>\n\n<think>\nb", " it is 2", "Two"),
        ("<think>\na\n</think>\n\nSo", "", " it is 2\n</think>\n\nTwo"),
        ("So", "", " it is 2\n</think>\n\nTwo"),
    ],
)
def test_an_open_reasoning_is_continued(continued: str, reasoning: str, text: str) -> None:
    for parts in cuts(" it is 2\n</think>\n\nTwo"):
        parser = AnswerParser(AnswerFormat(ToolUse(), FORMATS["qwen3"], "?", continued))
        whole = WholeAnswer.of(
            [piece for at, part in enumerate(parts, 1) for piece in parser.feed(part, at == len(parts))]
        )
        assert (whole.reasoning, whole.text) == (reasoning, text)


def test_a_call_that_was_cut_off_is_not_completed() -> None:
    for form, answer in (
        ("mistral", "[TOOL_CALLS]now"),
        ("kimi_k2", SECTION + kimi("f", "").removesuffix("<|tool_call_end|>")),
        ("qwen3_coder", qwen(("path", "a")).partition("</function>")[0]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a"'),
    ):
        for parts in cuts(answer):
            parser = AnswerParser(AnswerFormat(ToolUse([], None, make_tool_parser(form, TOOLS))))
            pieces = [p for at, part in enumerate(parts, 1) for p in parser.feed(part, at == len(parts), is_cut=True)]
            for _, arguments in WholeAnswer.of(pieces).calls:
                with pytest.raises(ValueError):
                    json.loads(arguments)
