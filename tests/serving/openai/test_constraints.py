"""Constraints on the answers of a chat: which answers they allow, in the formats of several models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.sampling.test_structural_tag import PLAIN, TOKENS, Texts, accepts
from tests.serving.openai.answer_writers import WRITERS
from torchweave.engine.request import SamplingParams, StructuredOutputs
from torchweave.serving.errors import ApiError
from torchweave.serving.openai.answer_parser import AnswerFormat
from torchweave.serving.openai.constraints import constrain, loose_format, loose_tools
from torchweave.serving.openai.protocol import ChatRequest, Tool
from torchweave.serving.openai.reasoning import FORMATS
from torchweave.serving.openai.tools import ToolUse, calls_in_format, make_tool_parser
from torchweave.serving.openai.tools.families import FAMILIES
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.request_warnings import RequestWarnings

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool.model_validate({"type": "function", "function": {"name": "w", "strict": True, "parameters": PARAMETERS}})
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
JSON = '{"a": true}'
CALL = '<tool_call>\n{"name": "w", "arguments": {"city": "x"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "w", "arguments": {"city": 1}}\n</tool_call>'
XML = "<tool_call>\n<function=w>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
EMPTY = "<tool_call>\n<function=w>\n</function>\n</tool_call>"
HARMONY = Texts(("<|eos|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|constrain|>"))
MISTRAL = Texts(("<|eos|>", "[TOOL_CALLS]", "[ARGS]"))
_KIMIS = ("s_section_begin", "s_section_end", "_begin", "_end", "_argument_begin")
KIMI = Texts(("<|eos|>", *(f"<|tool_call{name}|>" for name in _KIMIS)))


def allows(
    text: str,
    tokenizer: Texts,
    calls: str | None = None,
    schema: bool = False,
    reasoning: str | None = None,
    tail: str = "",
    budget: int | None = None,
    strict: bool = False,
    template: str = "",
) -> bool:
    """Whether a request's constraint allows a whole answer."""
    tools = [WEATHER] if calls is not None else []
    use = ToolUse([tool.definition for tool in tools], None, make_tool_parser(calls, tools)) if calls else ToolUse()
    form = AnswerFormat(use, FORMATS[reasoning] if reasoning else None, prompt_tail=tail)
    params = SamplingParams(structured_outputs=StructuredOutputs(json=SCHEMA) if schema else None)
    if not strict:
        tools = [
            tool.model_copy(update={"function": tool.function.model_copy(update={"strict": None})}) for tool in tools
        ]
    tags = calls_in_format(calls, template, tools, True) if strict or schema else None
    constrained = constrain(
        params, form, budget, [tool.function.name for tool in tools], tags, strict, frozenset(tokenizer.special)
    )
    structured = constrained.params.structured_outputs
    return structured is None or accepts(structured, text, tokenizer) == "whole"


@pytest.mark.parametrize("tokenizer", [TOKENS, PLAIN], ids=("special tokens", "texts"))
def test_calls_stand_beside_a_schema(tokenizer: Texts) -> None:
    for strict in (False, True):
        options: dict[str, Any] = {"calls": "hermes", "schema": True, "strict": strict}
        assert all(allows(text, tokenizer, **options) for text in (JSON, CALL, f"\n{CALL}", f"{CALL}\n{CALL}"))
        assert not any(allows(text, tokenizer, **options) for text in ("Sure.", '{"a": 1}', ""))
        assert allows(WRONG, tokenizer, **options) != strict


def test_reasoning_is_free_before_a_schema_and_calls() -> None:
    opened: dict[str, Any] = {"calls": "hermes", "schema": True, "reasoning": "qwen3", "tail": "<think>\n"}
    assert allows(f"hmm {{x</think>\n\n{JSON}", TOKENS, **opened) and allows(f"hmm</think>{CALL}", TOKENS, **opened)
    assert not allows("hmm</think>x", TOKENS, **opened) and not allows("hmm", TOKENS, **opened)
    start = opened | {"tail": "assistant\n"}
    assert all(allows(text, TOKENS, **start) for text in (f"<think>hmm</think>\n\n{JSON}", JSON, CALL))
    closed = opened | {"tail": "<think>\n\n</think>\n\n", "calls": None}
    assert allows(JSON, TOKENS, **closed) and not allows(f"<think>hmm</think>{JSON}", TOKENS, **closed)
    for options in (opened, start):  # an end that is no token
        assert allows(JSON, PLAIN, **options) and not allows(f"<think>hmm</think>{JSON}", PLAIN, **options)


def test_a_budget_ends_the_reasoning() -> None:
    options: dict[str, Any] = {"reasoning": "qwen3", "tail": "<think>\n", "budget": 3}
    assert allows("abc</think>So <tool_call>", TOKENS, **options) and allows("a</think>So", TOKENS, **options)
    assert not allows("abcd</think>So", TOKENS, **options)
    assert allows(f"abc</think>{JSON}", TOKENS, schema=True, **options)
    assert not allows(f"abcd</think>{JSON}", TOKENS, schema=True, **options)


@pytest.mark.parametrize(
    ("calls", "template", "tokenizer", "right", "wrong"),
    [
        ("hermes", "", TOKENS, f"I look. {CALL}{CALL} So.", WRONG),
        ("hermes", "", PLAIN, f"I look. {CALL}", '<tool_call>\n{"name": "v", "arguments": {}}\n</tool_call>'),
        ("qwen3_coder", "", TOKENS, "I look. " + XML.format("Bern </parameter> x\ny"), EMPTY),
        ("qwen3_coder", "", PLAIN, XML.format("Bern"), XML.format("Bern").replace("=w", "=v")),
        ("mistral", "[ARGS]", MISTRAL, '[TOOL_CALLS]w[ARGS]{"city": "x"}[TOOL_CALLS]w[ARGS]{"city": "y"}', '[TOOL_CALLS]v[ARGS]{}'),
        (
            "kimi_k2",
            "",
            KIMI,
            "Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.w:0<|tool_call_argument_begin|>"
            '{"city": "x"}<|tool_call_end|><|tool_calls_section_end|>',
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.v:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
        ),
    ],
)  # fmt: skip
def test_strict_tools_get_valid_calls_only(calls: str, template: str, tokenizer: Texts, right: str, wrong: str) -> None:
    for text, expected in ((right, True), (wrong, False), ("No call.", True)):
        assert allows(text, tokenizer, calls=calls, template=template, strict=True) == expected, text
    assert allows(wrong, tokenizer, calls=calls, template=template), "nothing is constrained without strict"


def test_formats_without_a_marker_stand_beside_a_schema() -> None:
    for calls, text in (("llama3_json", '{"name": "w", "parameters": {"city": "x"}}'), ("pythonic", '[w(city="x")]')):
        assert allows(text, TOKENS, calls=calls, schema=True) and allows(JSON, TOKENS, calls=calls, schema=True)
        assert not any(allows(wrong, TOKENS, calls=calls, schema=True) for wrong in (text[:-1], text.replace("w", "v")))


ANY_OBJECT = {"functiongemma", "gemma4", "kimi_k3", "minimax_m3"}
"""Families whose calls are not described: beside a schema, they are free after their marker."""
VARIANTS = {"deepseek_v3": "```json", "mistral": "[ARGS]", "granite": "", "granite31": ""}
"""A text of the template of the writer's model."""


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_calls_are_constrained_as_the_family_writes_them(family: Family) -> None:
    name, template = family.name, VARIANTS.get(family.name, "")
    options: dict[str, Any] = {"calls": name, "template": template, "schema": True}
    if name == "gpt_oss":
        options |= {"reasoning": "gpt_oss", "tail": "<|start|>assistant"}
    written = WRITERS[name]([("w", {"city": "</x> \"'", "n": -5})])
    assert allows(written, PLAIN, **options)
    if name in ANY_OBJECT:
        assert not family.tags
        return
    assert not allows(WRITERS[name]([("v", {"city": "x"})]), PLAIN, **options), "an unknown function"
    assert not allows(written[:-1], PLAIN, **options) or written[-1].isspace()
    strict = options | {"strict": True}
    holds_strict = family.tags[-1].holds_strict
    assert allows(written, PLAIN, **strict)
    assert allows(WRITERS[name]([("w", {"n": 5})]), PLAIN, **strict) != holds_strict, "city is required"
    assert allows(WRITERS[name]([("w", {"city": "x", "n": "y"})]), PLAIN, **strict) != holds_strict, "n is a number"


def test_harmony_answers_in_the_final_channel_or_calls() -> None:
    options: dict[str, Any] = {"calls": "gpt_oss", "schema": True, "reasoning": "gpt_oss", "tail": "<|start|>assistant"}
    final, thought = f"<|channel|>final<|message|>{JSON}", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.w <|constrain|>json<|message|>{}<|call|>"
    assert all(allows(text, HARMONY, **options) for text in (final, thought + final, thought * 2 + call))
    assert not allows("<|channel|>final<|message|>x", HARMONY, **options) and not allows(JSON, HARMONY, **options)
    assert not allows(call.replace("{}", "{"), HARMONY, **options)
    alone = options | {"calls": None}
    assert allows(thought + final, HARMONY, **alone) and not allows(call, HARMONY, **alone)


def test_a_budget_ends_the_reasoning_of_harmony() -> None:
    options: dict[str, Any] = {"reasoning": "gpt_oss", "tail": "<|start|>assistant", "budget": 3}
    thought, final = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant", "<|channel|>final<|message|>So."
    assert all(allows(thought.format(text) + final, HARMONY, **options) for text in ("abc", "a", ""))
    assert allows(final, HARMONY, **options) and not allows(thought.format("abcd") + final, HARMONY, **options)
    assert not allows(thought.format("a") * 2 + final, HARMONY, **options), "one message"
    none = options | {"budget": 0}
    assert allows(final, HARMONY, **none) and not allows(thought.format("") + final, HARMONY, **none)


def tool(schema: dict[str, Any], strict: bool) -> Tool:
    function = {"name": "odd", "strict": strict, "parameters": {"type": "object", "properties": {"v": schema}}}
    return Tool.model_validate({"type": "function", "function": function})


def test_what_a_grammar_cannot_hold_is_a_warning_or_with_strict_an_error() -> None:
    odd = {"type": "string", "format": "uuid4"}
    warnings = RequestWarnings()
    (_, loose), is_lenient = loose_tools([WEATHER, tool(odd, False)], warnings)
    assert is_lenient and loose.function.name == "odd" and "tool 'odd'" in warnings.sentences[0]
    with pytest.raises(ApiError, match="tool 'odd' cannot be held whole"):
        loose_tools([WEATHER, tool(odd, True)], warnings)
    with pytest.raises(ApiError, match=r"tool 'odd' cannot be used: .*back to itself"):
        loose_tools([tool({"$ref": "#/properties/v"}, False)], warnings)
    for strict in (False, True):
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": strict, "schema": odd}}
        body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "response_format": form})
        if strict:
            with pytest.raises(ApiError, match="schema of response_format cannot be held whole"):
                loose_format(body, warnings)
        else:
            assert loose_format(body, warnings).response_format != body.response_format
