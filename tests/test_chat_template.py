"""What chat templates take is found by rendering, and messages are brought into that form without losing any."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from torchweave.chat_template import Messages, TemplateTraits, adapt, probe

TURN = "<|{{ m.role }}|>{{ m.content }}"
LENIENT = "{% for m in messages %}" + TURN + "{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}(ARGS){% endfor %}"


def with_calls(arguments: str, before: str = "") -> str:
    """A template whose calls are written as `arguments`, an expression of the call `c`."""
    return "{% for m in messages %}" + before + TURN + CALLS.replace("ARGS", arguments) + "{% endfor %}"


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
)
SYSTEM_FIRST += TURN + "{% endfor %}"
SYSTEM_LOST = "{% if messages[0].role == 'system' %}<|system|>{{ messages[0].content }}{% endif %}"
SYSTEM_LOST += "{% for m in messages %}{% if m.role != 'system' %}" + TURN + "{% endif %}{% endfor %}"
ALTERNATES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    + TURN
    + "{% endfor %}"
)
PARTS = "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
PARTS += "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
ONLY_PARTS = "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
DEEPSEEK = with_calls("{{ c['function']['name'] + ' ' + c['function']['arguments'] }}")
PRINTED = with_calls("{{ c.function.name }} {{ c.function.arguments }}")
AS_JSON = with_calls("{{ c.function.name }} {{ c.function.arguments | tojson }}")
AS_ITEMS = with_calls("{{ c.function.name }}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}")
NULL_CONTENT = (
    "{% for m in messages %}{% if m.tool_calls and m.content is none %}{{ m.tool_calls[0].function.arguments }}{% else %}"
    + TURN
    + "{% endif %}{% endfor %}"
)
ONE_CALL = with_calls(
    "{{ c.function.name }} {{ c.function.arguments | tojson }}",
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}",
)
NINE = with_calls(
    "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.id }} {{ c.function.arguments | tojson }}"
)
NAMED = with_calls("{{ c.id }} {{ c.function.arguments | tojson }}")
HARMONY = with_calls(
    "{{ c.function.name }} {{ c.function.arguments | tojson }}",
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if m.thinking %}<|analysis|>{{ m.thinking }}{% endif %}",
)


def renderer(template: str) -> Callable[..., str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: Messages, **variables: Any) -> str:
        rendered, _ = render_jinja_template(conversations=[messages], chat_template=template, **variables)
        return rendered[0]

    return render


def prompt(template: str, messages: Messages, **options: Any) -> str:
    render = renderer(template)
    return render(adapt(messages, probe(render, template), **options))


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


USER, ANSWER, SYSTEM = message("user", "hi"), message("assistant", "yes"), message("system", "Be brief.")


def call(number: int = 0, arguments: Any = '{"a": "ü"}') -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": f"f{number}", "arguments": arguments}}


def turn(*calls: dict[str, Any], **fields: Any) -> Messages:
    results = [message("tool", f"r{number}", tool_call_id=each["id"]) for number, each in enumerate(calls)]
    return [USER, message("assistant", None, tool_calls=list(calls)) | fields, *results]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (LENIENT, [USER, ANSWER, SYSTEM, USER], "<|user|>hi<|assistant|>yes<|system|>Be brief.<|user|>hi"),
        (LENIENT, [SYSTEM, SYSTEM, USER], "<|system|>Be brief.<|system|>Be brief.<|user|>hi"),
        (LENIENT, [message("developer", "Be kind."), USER], "<|system|>Be kind.<|user|>hi"),
        (SYSTEM_FIRST, [USER, ANSWER, SYSTEM, USER], "<|user|>hi<|assistant|>yes<|user|>Be brief.<|user|>hi"),
        (SYSTEM_FIRST, [USER, SYSTEM], "<|user|>hi<|user|>Be brief."),
        (SYSTEM_FIRST, [SYSTEM, message("developer", "Be kind."), USER], "<|system|>Be brief.\n\nBe kind.<|user|>hi"),
        (SYSTEM_LOST, [SYSTEM, SYSTEM, USER, SYSTEM], "<|system|>Be brief.\n\nBe brief.<|user|>hi<|user|>Be brief."),
        (ALTERNATES, [SYSTEM, USER, ANSWER, SYSTEM, USER], "<|user|>Be brief.\n\nhi<|assistant|>yes<|user|>Be brief.\n\nhi"),
        (ALTERNATES, [USER, USER], "<|user|>hi\n\nhi"),
    ],
)  # fmt: skip
def test_system_messages_stay_in_order_where_the_template_takes_them(
    template: str, messages: Messages, expected: str
) -> None:
    assert prompt(template, messages) == expected


TEXTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "content", "form", "expected"),
    [
        (LENIENT, TEXTS, "auto", "a\nb"),
        (PARTS, TEXTS, "auto", "[a][b]"),
        (PARTS, TEXTS, "string", "a\nb"),
        (PARTS, TEXTS, "openai", "[a][b]"),
        (PARTS, "a", "auto", "a"),
        (PARTS, "a", "openai", "[a]"),
        (ONLY_PARTS, "a", "auto", "[a]"),
        (ONLY_PARTS, TEXTS, "auto", "[a][b]"),
    ],
)
def test_contents_have_the_form_that_the_template_reads(template: str, content: Any, form: Any, expected: str) -> None:
    assert prompt(template, [message("user", content)], content_format=form) == f"<|user|>{expected}"
    assert prompt(template, [USER, message("assistant", content)], content_format=form).endswith(expected)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (DEEPSEEK, '(f0 {"a": "ü"})'),
        (PRINTED, '(f0 {"a": "ü"})'),
        (AS_JSON, '(f0 {"a": "ü"})'),
        (AS_ITEMS, "(f0 a=ü)"),
        (NULL_CONTENT, '{"a": "ü"}'),
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": "ü"}', {"a": "ü"}], ids=("text", "object"))
def test_arguments_have_the_form_that_the_template_shows(template: str, shown: str, arguments: Any) -> None:
    assert shown in prompt(template, turn(call(arguments=arguments)))


@pytest.mark.parametrize("template", [DEEPSEEK, AS_JSON, AS_ITEMS])
def test_calls_without_arguments_are_shown(template: str) -> None:
    for arguments in ("", "{}", None, {}):
        assert "(f0" in prompt(template, turn(call(arguments=arguments)))


def test_several_calls_become_one_each_with_its_result() -> None:
    text = prompt(ONE_CALL, [*turn(call(0), call(1)), USER])
    assert text.index("f0") < text.index("r0") < text.index("f1") < text.index("r1") < text.rindex("hi")


def test_ids_of_calls_are_those_that_the_template_takes() -> None:
    text = prompt(NINE, turn(call()))
    assert "call_0" not in text
    own = call() | {"id": "aB3dE6gH9"}
    assert "aB3dE6gH9" in prompt(NINE, turn(own))
    adapted = adapt(turn(call()), probe(renderer(NINE), NINE))
    assert adapted[1]["tool_calls"][0]["id"] == adapted[2]["tool_call_id"]
    text = prompt(NAMED, [*turn(call(0), call(1)), *turn(call(2))])
    assert [f"functions.f{number}:{number}" in text for number in range(3)] == [True] * 3
    assert "functions.f0:7" in prompt(NAMED, turn(call() | {"id": "functions.f0:7"}))


def test_reasoning_has_the_name_that_the_template_reads() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        text = prompt(HARMONY, turn(call(), **{name: "hmm"}))
        assert "<|analysis|>hmm" in text
        both = prompt(HARMONY, turn(call(), **{name: "hmm", "content": "I look."}))
        assert "hmm" in both and "I look." in both


def test_a_template_that_needs_more_is_given_the_messages_as_they_are() -> None:
    needs = "{% if not needed %}{{ raise_exception('needed') }}{% endif %}" + AS_JSON
    assert probe(renderer(needs), needs) == TemplateTraits()


def test_efforts_that_a_template_refuses_are_replaced_by_the_nearest() -> None:
    raises = "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'high'] %}"
    raises += "{{ raise_exception('level') }}{% endif %}"
    traits = probe(renderer(raises + LENIENT), raises + LENIENT)
    nearest = {level: traits.nearest_effort(level) for level in ("minimal", "low", "medium", "high", "max", "banana")}
    assert nearest == {
        "minimal": "low",
        "low": "low",
        "medium": "low",
        "high": "high",
        "max": "high",
        "banana": "banana",
    }


def test_messages_are_not_changed() -> None:
    messages = [SYSTEM, SYSTEM, *turn(call(0), call(1))]
    before = json.dumps(messages)
    for template in (SYSTEM_FIRST, ONE_CALL, NINE, NAMED, DEEPSEEK):
        prompt(template, messages)
    assert json.dumps(messages) == before
