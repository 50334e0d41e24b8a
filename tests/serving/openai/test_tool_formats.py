"""Tool calls in the formats of today's families, with texts as their chat templates and model cards write them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.serving.openai.test_tools import cuts, read, tool
from torchweave.config.options import ToolCallParser
from torchweave.serving.openai.answer_parser import AnswerFormat, AnswerParser
from torchweave.serving.openai.reasoning import FORMATS, detect_reasoning_format
from torchweave.serving.openai.tools import (
    ArgumentsDelta,
    Call,
    ReasoningDelta,
    StreamParser,
    TextDelta,
    ToolUse,
    detect_tool_format,
    make_tool_parser,
)
from torchweave.serving.openai.tools.families import FAMILIES
from torchweave.serving.openai.tools.schema_types import Parameters

TOOLS = [
    tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "hours": {"type": "array", "items": {"type": "number"}},
                "night": {"type": "boolean"},
            },
        },
    ),
    tool("now"),
    tool("plan", {"properties": {
        "stops": {"type": "array", "items": {"$ref": "#/$defs/Stop"}},
        "tags": {"type": "array"},
    }, "$defs": {"Stop": {"type": "object", "properties": {"city": {"type": "string"}, "nights": {"type": "integer"}}}}}),
]  # fmt: skip
DAYS = ("get_weather", {"days": 3})
WEATHER = ("get_weather", {"city": "San Francisco, CA", "days": 3})
JSON = json.dumps({"name": WEATHER[0], "arguments": WEATHER[1]})
ARGUMENTS = json.dumps(WEATHER[1])
QWEN = """<tool_call>
<function=get_weather>
<parameter=city>
San Francisco, CA
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>San Francisco, CA</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>"""
MINIMAX = """<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">San Francisco, CA</parameter>
<parameter name="days">3</parameter>
</invoke>
<invoke name="now">
</invoke>
</minimax:tool_call>"""
DSML = """<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">San Francisco, CA</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KIMI = (
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ARGUMENTS}"
    "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
INTERN = f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {ARGUMENTS}}}<|action_end|>'

CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("qwen3_coder", QWEN, "", [WEATHER]),
    ("qwen3_coder", f"I look it up.\n\n{QWEN}\n{QWEN}", "I look it up.", [WEATHER] * 2),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
    ("qwen3_coder", QWEN.replace("\n</function>", ""), "", [WEATHER]),
    ("qwen3_coder", QWEN.removesuffix("\n</function>\n</tool_call>"), "", [WEATHER]),
    ("qwen3_coder", QWEN.replace("San Francisco, CA", "a\n  <b> & </c>\n\n"), "",
     [("get_weather", {"city": "a\n  <b> & </c>\n\n", "days": 3})]),
    ("qwen3_coder", "<tool_call>\n<function=fly>\n", "<tool_call>\n<function=fly>\n", []),
    ("qwen3_coder", "a <tool_call> b", "a <tool_call> b", []),
    ("seed_oss", QWEN.replace("tool_call>", "seed:tool_call>"), "", [WEATHER]),
    ("glm45", GLM, "", [WEATHER]),
    ("glm45", "Well.\n" + GLM.replace("\n", "") + "\n<tool_call>now\n</tool_call>", "Well.", [WEATHER, ("now", {})]),
    ("glm45", "a <tool_call> b", "a <tool_call> b", []),
    ("minimax_m2", MINIMAX, "", [WEATHER, ("now", {})]),
    ("deepseek_v32", f"Let me see.\n\n{DSML}", "Let me see.", [WEATHER]),
    ("deepseek_v32", DSML.replace('string="false"', 'string="true"'), "",
     [("get_weather", {"city": "San Francisco, CA", "days": "3"})]),
    ("deepseek_v3", V3, "", [WEATHER, ("now", {})]),
    ("deepseek_v3", f"Sure.{V31}", "Sure.", [WEATHER]),
    ("deepseek_v3", V31 + " {done}", "{done}", [WEATHER]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>no", "<｜tool▁calls▁begin｜>no", []),
    ("kimi_k2", KIMI, "", [WEATHER, ("now", {})]),
    ("kimi_k2", KIMI.replace("<|tool_call_begin|>", "\n<|tool_call_begin|>\n"), "", [WEATHER, ("now", {})]),
    ("granite", f"<|tool_call|>[{JSON}, {JSON}]", "", [WEATHER] * 2),
    ("granite31", f"<tool_call>[{JSON}]", "", [WEATHER]),
    ("granite31", f"<tool_call>\n{JSON}\n</tool_call> Done.", "Done.", [WEATHER]),
    ("granite31", f"<tool_call>\n{JSON}}}\n</tool_call> Done.", "Done.", [WEATHER]),
    ("hermes", f"<tool_call>[{JSON}, {JSON}]</tool_call>", "", [WEATHER] * 2),
    ("phi4_mini", f"functools[{JSON}]", "", [WEATHER]),
    ("phi4_mini", "functools is a module", "functools is a module", []),
    ("phi4_tool_call", f"<|tool_call|>[{JSON}]<|/tool_call|>", "", [WEATHER]),
    ("internlm", f"I use a tool.{INTERN}", "I use a tool.", [WEATHER]),
    ("jamba", f"<tool_calls>[\n{JSON},\n{JSON}\n]</tool_calls>", "", [WEATHER] * 2),
    ("jamba", '<tool_calls>[{"name": "fly"}]</tool_calls>', '<tool_calls>[{"name": "fly"}]</tool_calls>', []),
    ("gpt_oss", f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}", "", [WEATHER]),
    ("gpt_oss", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get_weather<|channel|>"
     f"commentary json<|message|>{ARGUMENTS}<|call|>", "I look.", [WEATHER]),
    ("gpt_oss", "Plain text.", "Plain text.", []),
]  # fmt: skip


NS = "]<]minimax[>["
CASES += [
    ("cohere", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"days": 3}},\n'
     '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>', "", [DAYS, ("now", {})]),
    ("cohere", "<|START_RESPONSE|>It rains.<|END_RESPONSE|>", "It rains.", []),
    ("ernie45", f"<tool_call>\n{JSON}\n</tool_call>\n<response>\nOK\n</response>", "OK", [WEATHER]),
    ("nemotron_json", f"Wait.<TOOLCALL>[{JSON}]</TOOLCALL>", "Wait.", [WEATHER]),
    ("longcat", f"<longcat_tool_call>{JSON}</longcat_tool_call>", "", [WEATHER]),
    ("longcat", "<longcat_tool_call>get_weather\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3"
     "</longcat_arg_value>\n</longcat_tool_call>", "", [DAYS]),
    ("xlam", f"[{JSON}]", "", [WEATHER]),
    ("xlam", f"Sure:\n```json\n[{JSON}]\n```", "Sure:", [WEATHER]),
    ("lfm2", "I look.<|tool_call_start|>[get_weather(days=3), now()]<|tool_call_end|>", "I look.", [DAYS, ("now", {})]),
    ("lfm2", f"<|tool_call_start|>[{JSON}]<|tool_call_end|>", "", [WEATHER]),
    ("olmo3", "<function_calls>get_weather(city='Martha\\'s', night=true)\nnow()</function_calls>", "",
     [("get_weather", {"city": "Martha's", "night": True}), ("now", {})]),
    ("functiongemma", "<start_function_call>call:get_weather{days:3,city:<escape>a, \"b\"<escape>}<end_function_call>", "",
     [("get_weather", {"days": 3, "city": 'a, "b"'})]),
    ("gemma4", 'So.<|tool_call>call:get_weather{city:<|"|>x{y}<|"|>,hours:[1,2.5],night:true}<tool_call|><|tool_call>call:now{}'
     "<tool_call|>", "So.", [("get_weather", {"city": "x{y}", "hours": [1, 2.5], "night": True}), ("now", {})]),
    ("step3", "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"get_weather\">"
     '<steptml:parameter name="days">3</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜>'
     '<steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>', "", [DAYS, ("now", {})]),
    ("hy_v3", "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>days"
     "</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
     "", [DAYS]),
    ("kimi_k3", 'Hi<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument '
     'key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|>'
     '<|open|>json type="object"<|sep|>{}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
     "Hi", [DAYS, ("now", {})]),
    ("deepseek_v4", DSML.replace("function_calls", "tool_calls"), "", [WEATHER]),
    ("minimax_m3", f'{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<days>3{NS}</days>{NS}</invoke>\n'
     f'{NS}<invoke name="now">{NS}</invoke>\n{NS}</tool_call>', "", [DAYS, ("now", {})]),
    ("minimax_m3", f'{NS}<tool_call>{NS}<invoke name="plan">{NS}<stops>{NS}<item>{NS}<city>Bern{NS}</city>{NS}<nights>2'
     f"{NS}</nights>{NS}</item>{NS}</stops>{NS}<tags>{NS}</tags>{NS}</invoke>{NS}</tool_call>", "",
     [("plan", {"stops": [{"city": "Bern", "nights": 2}], "tags": []})]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls"), CASES, ids=[f"{number}-{case[0]}" for number, case in enumerate(CASES)]
)
def test_calls_of_todays_families(form: str, answer: str, text: str, calls: list[tuple[str, Any]]) -> None:
    for parts in cuts(answer):
        assert read(make_tool_parser(form, TOOLS), parts) == (text, calls), parts


def test_every_parser_is_an_option() -> None:
    names = {name for family in FAMILIES.values() for name in (family.name, *family.aliases)}
    assert {"auto", *names} == {*ToolCallParser.__args__[0].__args__}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3", None, "3"),
        ("three", {"type": "integer"}, "three"),
        ("[1, 2.5]", {"type": "array"}, [1, 2.5]),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["integer", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("2", {"enum": [1, 2]}, 2),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_have_the_types_of_the_schema(text: str, schema: Any, value: Any) -> None:
    parameters = Parameters({} if schema is None else {"properties": {"a": schema}})
    assert parameters.value("a", text) == value


def test_harmony_has_reasoning_text_and_calls() -> None:
    answer = (
        "<|channel|>analysis<|message|>They ask for the weather.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    )
    final = "<|channel|>analysis<|message|>Sums.<|end|><|start|>assistant<|channel|>final<|message|>It is 42."
    with_tools = ToolUse(parser=make_tool_parser("gpt_oss", TOOLS))
    for text, tools, reasoning, content, calls in (
        (answer, with_tools, "They ask for the weather.", "", [WEATHER]),
        (final, with_tools, "Sums.", "It is 42.", []),
        (final, ToolUse(), "Sums.", "It is 42.", []),
        (final.removesuffix("It is 42."), ToolUse(), "Sums.", "", []),
        ("<|channel|>analysis to=python<|message|>1+1<|call|>", ToolUse(), "1+1", "", []),
    ):
        for parts in cuts(text):
            parser = AnswerParser(AnswerFormat(tools, FORMATS["gpt_oss"]))
            pieces = [p for at, part in enumerate(parts, 1) for p in parser.feed(part, is_last=at == len(parts))]
            assert "".join(p.text for p in pieces if isinstance(p, ReasoningDelta)) == reasoning
            assert "".join(p.text for p in pieces if isinstance(p, TextDelta)) == content
            arguments = "".join(p.text for p in pieces if isinstance(p, ArgumentsDelta))
            assert [(p.name, json.loads(arguments)) for p in pieces if isinstance(p, Call)] == calls
            assert parser.has_calls == bool(calls)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>\n<function=example_function_name>\n<parameter=", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'", "deepseek_v3"),
        ("<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] %}<|tool_call_begin|>", "kimi_k2"),
        ('"<|start|>assistant<|channel|>commentary to=functions."', "gpt_oss"),
        ("<|action_start|><|plugin|>", "internlm"),
        ("<|tool_call|>", "granite"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
        ('<tool_call>\n{"name": <function-name>', "hermes"),
    ],
)
def test_formats_are_detected_in_templates(template: str, form: str) -> None:
    assert detect_tool_format(template) == form


def test_gpt_oss_reasoning_is_detected() -> None:
    assert detect_reasoning_format("<|start|>assistant<|channel|>analysis<|message|>") == "gpt_oss"


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "deepseek_v3", "kimi_k2", "granite", "gpt_oss"])
def test_long_arguments_are_read_in_linear_time(form: str) -> None:
    """A file of 200,000 characters as an argument, token by token."""
    answer = next(case[1] for case in CASES if case[0] == form).replace("San Francisco, CA", "x < y\\\\n " * 20_000)
    parser = StreamParser(make_tool_parser(form, TOOLS).parse)
    begin = time.process_time()
    for at in range(0, len(answer), 4):
        parser.feed(answer[at : at + 4])
    assert time.process_time() - begin < 10
    unended = StreamParser(make_tool_parser(form, TOOLS).parse)
    begin = time.process_time()
    for _ in range(20_000):
        unended.feed("<tool_")
    assert time.process_time() - begin < 10
