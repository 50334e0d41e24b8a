"""Tool calls in outputs: parsed in every model's format, streamed, and independent of chunking."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from torchweave.engine.request import StructuredOutputs
from torchweave.engine.sampling.structured_output import rejection_reason
from torchweave.serving.openai.protocol import Function, Tool
from torchweave.serving.openai.tools import (
    ArgumentsDelta,
    Call,
    CallParser,
    ParserDelta,
    StreamParser,
    TextDelta,
    detect_tool_format,
    forced_schema,
    make_forced_parser,
    make_tool_parser,
)

Read = tuple[str, list[tuple[str, Any]]]


def tool(name: str, parameters: dict[str, Any] | None = None) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


TOOLS = [tool("weather", {"type": "object", "properties": {"city": {"type": "string"}}}), tool("now")]
WEATHER = ("weather", {"city": "Zürich {x}", "days": [1, {"a": '"'}]})
ARGUMENTS = json.dumps(WEATHER[1], ensure_ascii=False)
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
PYTHONIC = """[weather(city='Zürich {x}', days=[1, {'a': '"'}]), now()]"""


def read(calls_of: CallParser, parts: Sequence[str]) -> Read:
    """The text and the calls that a parser finds."""
    parser = StreamParser(calls_of.parse)
    pieces: list[ParserDelta] = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))
    calls = []
    for index, call in enumerate(piece for piece in pieces if isinstance(piece, Call)):
        assert call.index == index
        arguments = "".join(
            piece.text for piece in pieces if isinstance(piece, ArgumentsDelta) and piece.index == index
        )
        calls.append((call.name, json.loads(arguments)))
    return text, calls


def cuts(text: str) -> list[list[str]]:
    """The text whole, and in parts of several sizes."""
    return [[text], *([text[at : at + size] for at in range(0, len(text), size)] for size in (1, 2, 3, 7, 20))]


CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", "Plain <b>text</b>.", "Plain <b>text</b>.", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER]),
    ("hermes", f"I look.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "I look.", [WEATHER] * 2),
    ("hermes", f"<tool_call>{CALL}</tool_call> And so on. ", "And so on.", [WEATHER]),
    ("hermes", f"<tool_call>{CALL}", "", [WEATHER]),
    ("hermes", f"<tool_call>{CALL[:-1]}\n</tool_call>", "", [WEATHER]),  # without the last brace
    ("hermes", f"<tool_call>{CALL[:-1]}</tool_call>\n<tool_call>{CALL}</tool_call> Well.", "Well.", [WEATHER] * 2),
    ("hermes", f"<tool_call>{CALL}}}\n</tool_call> Well.", "Well.", [WEATHER]),  # with one too many
    ("hermes", f"<tool_call>{CALL}}} It's }}.", "} It's }.", [WEATHER]),
    ("hermes", '<tool_call>{"name": "fly"}</tool_call>', '<tool_call>{"name": "fly"}</tool_call>', []),
    ("hermes", "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "a"}, "name": "weather"}</tool_call>',
        "",
        [("weather", {"city": "a"})],
    ),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>', "", [WEATHER]),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("llama3_json", CALL.replace("arguments", "parameters"), "", [WEATHER]),
    ("llama3_json", f"<|python_tag|>{CALL}; {CALL}", "", [WEATHER] * 2),
    ("llama3_json", f"{CALL}}}; {CALL}}}", "", [WEATHER] * 2),
    ("llama3_json", "It is { cold }.", "It is { cold }.", []),
    ("llama3_json", ' {"name": "Ann", "age": 3} and so on', ' {"name": "Ann", "age": 3} and so on', []),
    ("llama3_json", '{"age": 3}', '{"age": 3}', []),
    ("llama3_json", '{"age": ', '{"age": ', []),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [WEATHER] * 2),
    ("mistral", f"[TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]now{{}}", "", [WEATHER, ("now", {})]),
    ("mistral", f"Well. [TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "Well.", [WEATHER]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]aB3dE6gH9[ARGS]{ARGUMENTS}", "", [WEATHER]),
    ("mistral", "[TOOL_CALLS]fly[CALL_ID]aB3dE6gH9[ARGS]{}", "", [("fly", {})]),
    ("mistral", "A [TOOL] of mine [TOOL_", "A [TOOL] of mine [TOOL_", []),
    ("mistral", "[TOOL_CALLS]fly{}[TOOL_CALLS]now", "", [("fly", {}), ("now", {})]),
    ("mistral", "[TOOL_CALLS]fly", "[TOOL_CALLS]fly", []),
    ("mistral", 'Well. [TOOL_CALLS] [{"name": "fly"}]', 'Well. [TOOL_CALLS] [{"name": "fly"}]', []),
    ("mistral", "Well. [TOOL_CALLS][1, 2] ", "Well. [TOOL_CALLS][1, 2] ", []),
    ("mistral", f"[TOOL_CALLS]now{{}}[TOOL_CALLS][{CALL}]", "", [("now", {}), WEATHER]),
    ("pythonic", PYTHONIC, "", [WEATHER, ("now", {})]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "Text [now()]", "Text [now()]", []),
    ("pythonic", "[now(", "[now(", []),
    ("pythonic", "[weather(city=open('x'))]", "[weather(city=open('x'))]", []),
]


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls"), CASES, ids=[f"{case[0]}-{case[1][:30]}" for case in CASES]
)
def test_parsed_calls_do_not_depend_on_chunking(
    form: str, answer: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    for parts in cuts(answer):
        assert read(make_tool_parser(form, TOOLS), parts) == (text, calls), parts


def test_arguments_are_streamed() -> None:
    for make, head in (
        (lambda: make_tool_parser("hermes", TOOLS), '<tool_call>{"name": "weather", "arguments": '),
        (lambda: make_tool_parser("mistral", TOOLS), "[TOOL_CALLS]weather"),
        (lambda: make_forced_parser(TOOLS, None), '[{"name": "weather", "parameters": '),
    ):
        parser = StreamParser(make().parse)
        assert [piece for piece in parser.feed(head) if isinstance(piece, TextDelta)] == []
        pieces = [piece for char in '{"city": "Bern' for piece in parser.feed(char)]
        told = "".join(piece.text for piece in pieces if isinstance(piece, ArgumentsDelta))
        assert told == '{"city": "Bern'


def test_answers_that_were_held_to_a_call() -> None:
    several = f'[{CALL.replace("arguments", "parameters")}, {{"name": "now", "parameters": {{}}}}]'
    makers: list[tuple[Callable[[], CallParser], str, list[tuple[str, Any]]]] = [
        (lambda: make_forced_parser(TOOLS, None), several, [WEATHER, ("now", {})]),
        (lambda: make_forced_parser(TOOLS, "weather"), ARGUMENTS, [WEATHER]),
    ]
    for make, answer, calls in makers:
        cases = list(cuts(answer))
        assert cases
        for parts in cases:
            assert read(make(), parts) == ("", calls)


def test_what_is_left_of_a_forced_call_that_was_cut_off_is_no_text() -> None:
    whole = f"[{CALL.replace('arguments', 'parameters')}"
    for answer, calls in ((whole + ',{"na', [WEATHER]), (whole + ",", [WEATHER]), ('[{"name":"we', []), ("[", [])):
        for parts in cuts(answer):
            assert read(make_forced_parser(TOOLS, None), parts) == ("", calls)


def test_the_schema_of_a_forced_call() -> None:
    import jsonschema

    schema = forced_schema(TOOLS, None, parallel=True)
    jsonschema.validate([{"name": "weather", "parameters": {"city": "a"}}, {"name": "now", "parameters": {}}], schema)
    for wrong in ([], [{"name": "fly", "parameters": {}}], [{"name": "weather", "parameters": {"city": 3}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    single = forced_schema(TOOLS, None, parallel=False)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "now", "parameters": {}}] * 2, single)
    assert forced_schema(TOOLS, "weather", parallel=True) == TOOLS[0].function.parameters


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        ({"$defs": {"A": {"type": "null"}}, "properties": {"a": {"$ref": "#/$defs/A"}}}, {"a": None}, {"a": "1"}),
        ({"properties": {"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}}}, {"b": None}, {"b": "1"}),
        ({"properties": {"a": {"anyOf": [{"$ref": "#"}]}}}, {"a": {"a": {}}}, {"a": []}),
        ({"definitions": {"A": {"type": "null"}}, "properties": {"a": {"$ref": "#/definitions/A"}}}, {"a": None}, {"a": 1}),
        ({"$id": "urn:two", "$defs": {"A": {"type": "null"}}, "properties": {"a": {"$ref": "#/$defs/A"}}}, {"a": None}, {"a": 1}),
        ({"properties": {"$ref": {"type": "null"}}}, {"$ref": None}, {"$ref": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_references_of_a_tool_mean_the_same_in_the_schema_of_a_forced_call(
    parameters: dict[str, Any], right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """Beside another tool, which has something else under the same name."""
    import jsonschema

    other = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "string"}}}
    asked = [tool("one", other), tool("two", {"type": "object", "additionalProperties": False} | parameters)]
    schema = forced_schema(asked, None, parallel=True)
    assert not rejection_reason(StructuredOutputs(json=schema))
    jsonschema.validate([{"name": "one", "parameters": {"a": "1"}}, {"name": "two", "parameters": right}], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "two", "parameters": wrong}], schema)


def test_parameters_that_are_no_schema_are_refused_and_no_fault() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="'deep' are nested too deeply"):
        forced_schema(
            [Tool.model_construct(function=Function.model_construct(name="deep", parameters=deep))], None, True
        )
    assert forced_schema([tool("odd", {"type": "object", "$defs": 5})], None, parallel=True)["minItems"] == 1


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call>\n{...}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary of ...', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ messages }}", None),
    ],
)
def test_chat_template_selects_the_tool_format(template: str, form: str | None) -> None:
    assert detect_tool_format(template) == form
