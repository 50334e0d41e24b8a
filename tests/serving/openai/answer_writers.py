"""Writes answers with calls as the chat template of each family does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

CallText = tuple[str, dict[str, Any]]
Writer = Callable[[Sequence[CallText]], str]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(name: str, arguments: dict[str, Any], names: tuple[str, str] = ("name", "arguments")) -> str:
    return _json({names[0]: name, names[1]: arguments})


def _each(before: str, after: str, between: str = "\n", arguments: str = "arguments") -> Writer:
    """A JSON object between markers for each call."""
    return lambda calls: between.join(f"{before}{_object(*call, ('name', arguments))}{after}" for call in calls)


def _list(before: str, after: str, names: tuple[str, str] = ("name", "arguments")) -> Writer:
    """A JSON list of calls between markers."""
    return lambda calls: f"{before}[{', '.join(_object(*call, names) for call in calls)}]{after}"


def _jamba(calls: Sequence[CallText]) -> str:
    lines = ",\n".join(_object(*call) for call in calls)
    return f"<tool_calls>[\n{lines}\n]</tool_calls>"


def _cohere(calls: Sequence[CallText]) -> str:
    objects = (
        _json({"tool_call_id": str(number), "tool_name": name, "parameters": arguments})
        for number, (name, arguments) in enumerate(calls)
    )
    lines = ",\n    ".join(objects)
    return f"<|START_ACTION|>[\n    {lines}\n]<|END_ACTION|>"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _functions(section: str) -> Writer:
    def write(calls: Sequence[CallText]) -> str:
        parts = []
        for name, arguments in calls:
            values = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())
            parts.append(f"<{section}>\n<function={name}>\n{values}</function>\n</{section}>")
        return "\n".join(parts)

    return write


def _invokes(before: str, after: str, prefix: str = "", typed: bool = False) -> Writer:
    def write(calls: Sequence[CallText]) -> str:
        parts = []
        for name, arguments in calls:
            parts.append(f'<{prefix}invoke name="{name}">\n')
            for key, value in arguments.items():
                kind = f' string="{"true" if isinstance(value, str) else "false"}"' if typed else ""
                parts.append(f'<{prefix}parameter name="{key}"{kind}>{_text(value)}</{prefix}parameter>\n')
            parts.append(f"</{prefix}invoke>\n")
        return f"{before}\n{''.join(parts)}{after}"

    return write


def _glm(calls: Sequence[CallText]) -> str:
    parts = []
    for name, arguments in calls:
        pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for key, v in arguments.items())
        parts.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return "\n".join(parts)


def _hunyuan(calls: Sequence[CallText]) -> str:
    parts = []
    for name, arguments in calls:
        pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for key, v in arguments.items())
        parts.append(f"<tool_call>{name}<tool_sep>\n{''.join(pairs)}</tool_call>\n")
    return f"<tool_calls>\n{''.join(parts)}</tool_calls>"


def _step3(calls: Sequence[CallText]) -> str:
    parts = []
    for name, arguments in calls:
        values = "".join(
            f'<steptml:parameter name="{key}">{_text(value)}</steptml:parameter>' for key, value in arguments.items()
        )
        parts.append(
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{values}</steptml:invoke><｜tool_call_end｜>'
        )
    return f"<｜tool_calls_begin｜>{''.join(parts)}<｜tool_calls_end｜>"


def _minimax_m3(calls: Sequence[CallText]) -> str:
    token = "]<]minimax[>["

    def element(key: str, value: Any) -> str:
        if isinstance(value, dict):
            inner = "".join(element(*item) for item in value.items())
        elif isinstance(value, list):
            inner = "".join(element("item", item) for item in value)
        else:
            inner = _text(value)
        return f"{token}<{key}>{inner}{token}</{key}>"

    parts = []
    for name, arguments in calls:
        values = "".join(element(*item) for item in arguments.items())
        parts.append(f'{token}<invoke name="{name}">{values}{token}</invoke>\n')
    return f"{token}<tool_call>\n{''.join(parts)}{token}</tool_call>"


def _kimi_k3(calls: Sequence[CallText]) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    parts = []
    for number, (name, arguments) in enumerate(calls, 1):
        parts.append(f'<|open|>call tool="{name}" index="{number}"<|sep|>')
        for key, value in arguments.items():
            kind = kinds.get(type(value), "null")
            parts.append(f'<|open|>argument key="{key}" type="{kind}"<|sep|>{_text(value)}<|close|>argument<|sep|>')
        parts.append("<|close|>call<|sep|>")
    return f"<|open|>tools<|sep|>{''.join(parts)}<|close|>tools<|sep|>"


def _deepseek(calls: Sequence[CallText]) -> str:
    parts = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[CallText]) -> str:
    parts = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(a)}<｜tool▁call▁end｜>" for name, a in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(parts)}<｜tool▁calls▁end｜>"


def _kimi_k2(calls: Sequence[CallText]) -> str:
    parts = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"


def _mistral(calls: Sequence[CallText]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _harmony(calls: Sequence[CallText]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def _gemma(before: str, after: str, quote: str) -> Writer:
    def value(given: Any) -> str:
        if isinstance(given, str):
            return f"{quote}{given}{quote}"
        if isinstance(given, dict):
            return "{" + ",".join(f"{key}:{value(item)}" for key, item in given.items()) + "}"
        return f"[{','.join(map(value, given))}]" if isinstance(given, list) else _json(given)

    return lambda calls: "".join(f"{before}call:{name}{value(arguments)}{after}" for name, arguments in calls)


def _python(between: str) -> Callable[[Sequence[CallText]], str]:
    def write(calls: Sequence[CallText]) -> str:
        return between.join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
        )

    return write


def _wrapped(before: str, after: str, write: Writer) -> Writer:
    return lambda calls: f"{before}{write(calls)}{after}"


_DSML = "｜DSML｜"
WRITERS: dict[str, Writer] = {
    "hermes": _each("<tool_call>\n", "\n</tool_call>"),
    "ernie45": _each("\n<tool_call>\n", "\n</tool_call>\n"),
    "granite": _list("<|tool_call|>", ""),
    "granite31": _each("<tool_call>\n", "\n</tool_call>"),
    "phi4_mini": _list("functools", ""),
    "phi4_tool_call": _list("<|tool_call|>", "<|/tool_call|>"),
    "internlm": _each("<|action_start|><|plugin|>\n", "<|action_end|>", between="", arguments="parameters"),
    "jamba": _jamba,
    "llama3_json": lambda calls: "; ".join(_object(*call, ("name", "parameters")) for call in calls),
    "longcat": _each("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    "nemotron_json": _list("<TOOLCALL>", "</TOOLCALL>"),
    "cohere": _cohere,
    "xlam": _list("", ""),
    "mistral": _mistral,
    "deepseek_v3": _deepseek,
    "deepseek_v31": _deepseek_v31,
    "kimi_k2": _kimi_k2,
    "kimi_k3": _kimi_k3,
    "gpt_oss": _harmony,
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "pythonic": _wrapped("[", "]", _python(", ")),
    "lfm2": _wrapped("<|tool_call_start|>[", "]<|tool_call_end|>", _python(", ")),
    "olmo3": _wrapped("<function_calls>", "</function_calls>", _python("\n")),
    "qwen3_coder": _functions("tool_call"),
    "seed_oss": _functions("seed:tool_call"),
    "glm45": _glm,
    "hy_v3": _hunyuan,
    "minimax_m2": _invokes("<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax_m3": _minimax_m3,
    "deepseek_v32": _invokes(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>", _DSML, typed=True),
    "deepseek_v4": _invokes(f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>", _DSML, typed=True),
    "step3": _step3,
}
"""By the name of a parser."""
ONLY_CALLS = {"llama3_json", "xlam", "pythonic"}
"""Families whose answers are calls without text around them."""
