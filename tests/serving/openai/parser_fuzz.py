"""Fuzz the parsers of tool calls: answers are generated, written as a family's template does, cut, and parsed.

Half of them begin with reasoning, which the prompt opens or they. Each way to cut an answer gives the same reasoning, text and
calls; the calls are those that were generated, with valid JSON; and reasoning and text are what was generated. Run
`python -m tests.serving.openai.parser_fuzz [--count N] [PARSER ...]`; it exits with 1 on a difference.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.serving.openai.answer_writers import ONLY_CALLS, WRITERS, CallText
from torchweave.serving.openai.answer_parser import AnswerFormat, AnswerParser, WholeAnswer
from torchweave.serving.openai.protocol import Tool
from torchweave.serving.openai.reasoning import FORMATS
from torchweave.serving.openai.tools import ToolUse, make_tool_parser

SHORT = 160  # characters of an answer that is cut at every place
NAMES = ("now", "write_file", "get-weather", "mcp__server__read", "f.g")
PROPERTIES = {
    "path": {"type": "string"},
    "content": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"$ref": "#/$defs/Ratio"},
    "flag": {"type": "boolean"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "sizes": {"type": "array", "items": {"type": "integer"}},
    "labels": {"properties": {}, "additionalProperties": {"type": "string"}},
}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": PROPERTIES, "$defs": {"Ratio": {"type": "number"}}}}})
    for name in NAMES
]  # fmt: skip
WORDS = (
    "a", "Zürich", "日本", "👍🏽", " ", "  ", "\n", "\n\n", "\t", '"', "'", "\\", "\\n", "\\u00e9", "{", "}", "[", "]", ",", ":",
    "=", "<", ">", "&amp;", "null", "5", "true", "```", "```json\n", "</think>", "<|im_end|>", "[TOOL_CALLS]", "\x0b", "\x7f",
    "\u2028", "(", ")", '"""', "%", "#",
)  # fmt: skip
TAGS = (
    "</tool_call>", "</parameter>", "</function>", "</arg_value>", "</invoke>", "<parameter=e>", '<parameter name="e">',
    "<tool_call>", "</parameter>\n</function>", "<parameter=e>\n1\n</parameter>", "</steptml:parameter>", "<|close|>argument",
    "</｜DSML｜parameter>", "<|close|>argument<|sep|>",
)  # fmt: skip
PLAIN = ("I look it up.", "Für dich 👍", "a < b", "{x}", "Done!", "1, 2", "`code`", "\n\n", " ", "It's \\ it")
DELIMITERS = {"functiongemma": "<escape>", "gemma4": '<|"|>', "minimax_m3": "]<]minimax[>["}


class Texts:
    """Texts of the arguments of one answer. Tags of formats, balanced or not, are in one of them.

    Two values with unbalanced tags could be one value with balanced tags, which no parser can tell apart.
    """

    def __init__(self, random_: random.Random, parser: str) -> None:
        self._random, self._parser, self._has_tags = random_, parser, False

    def new(self) -> str:
        """A text, often with characters that formats use."""
        words = WORDS
        if not self._has_tags and self._random.random() < 0.5:
            words, self._has_tags = WORDS + TAGS * 3, True
        text = "".join(self._random.choices(words, k=self._random.choice((0, 1, 2, 3, 8, 20))))
        return text.replace(DELIMITERS.get(self._parser, "\0"), "")


def arguments(random_: random.Random, texts: Texts) -> dict[str, Any]:
    """Arguments of a call, none or several."""
    note = None if random_.random() < 0.3 else texts.new
    make: dict[str, Callable[[], Any]] = {
        "path": texts.new,
        "content": texts.new,
        "count": lambda: random_.choice((0, -1, 7, 10**20)),
        "ratio": lambda: random_.choice((0.5, -2.25, 1e-7, 3)),
        "flag": lambda: random_.random() < 0.5,
        "note": lambda: None if note is None else f"x{note()}",  # "null" is null
        "sizes": lambda: [random_.randrange(100) for _ in range(random_.randrange(4))],
        "labels": lambda: {key: texts.new() for key in random_.sample(("a", "b_c", "d-e"), random_.randrange(1, 4))},
    }
    return {key: make[key]() for key in random_.sample(list(make), random_.choice((0, 1, 2, 3, len(make))))}


def answer(random_: random.Random, parser: str) -> tuple[str, str, list[CallText]]:
    """An answer as the family writes it, its text, and its calls."""
    texts = Texts(random_, parser)
    calls = [(random_.choice(NAMES), arguments(random_, texts)) for _ in range(random_.choice((0, 1, 1, 1, 2, 3)))]
    before = "".join(random_.choices(PLAIN, k=random_.randrange(4)))
    if parser in ONLY_CALLS:
        return (WRITERS[parser](calls), "", calls) if calls else (f"A {before}", f"A {before}", [])
    written = before + (WRITERS[parser](calls) if calls else "")
    after = "".join(random_.choices(PLAIN, k=random_.randrange(3))) if calls and random_.random() < 0.2 else ""
    if parser == "gpt_oss" and after:
        return f"{written}<|start|>assistant<|channel|>final<|message|>{after}", before + after, calls
    return written + after, before + after, calls


def cuts(random_: random.Random, text: str) -> Iterator[list[str]]:
    """Ways to cut a text into parts: at each place if it is short, else at some."""
    if len(text) <= SHORT:
        yield list(text)
        yield from ([text[:at], text[at:]] for at in range(1, len(text)))
        return
    for _ in range(12):
        places = sorted(random_.sample(range(1, len(text)), random_.randrange(1, 24)))
        yield [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def reasoned(random_: random.Random, parser: str, written: str) -> tuple[str, str, AnswerFormat]:
    """An answer after reasoning, or as it is; the reasoning; and how both are parsed."""
    tools = ToolUse([], None, make_tool_parser(parser, TOOLS))
    thought = "".join(random_.choices(PLAIN, k=random_.randrange(1, 5))).strip()
    if parser == "gpt_oss":
        if not thought or not written.startswith("<|"):
            return written, "", AnswerFormat(tools, FORMATS[parser])
        before = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        return before + written, thought, AnswerFormat(tools, FORMATS[parser])
    if random_.random() < 0.5:
        return written, "", AnswerFormat(tools)
    is_open = random_.random() < 0.5
    form = AnswerFormat(tools, FORMATS["qwen3"], prompt_tail="<think>\n" if is_open else "assistant\n")
    return f"{'' if is_open else '<think>'}{thought}\n</think>\n\n{written}", thought, form


def parse(form: AnswerFormat, parts: Sequence[str]) -> WholeAnswer:
    """Parse an answer that comes in parts."""
    parser = AnswerParser(form)
    fed = [parser.feed(part, number == len(parts) - 1, is_cut=False) for number, part in enumerate(parts)]
    return WholeAnswer.of([piece for pieces in fed for piece in pieces])


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def difference(random_: random.Random, parser: str) -> str | None:
    """Generate, write and parse one answer; returns what differs."""
    written, text, calls = answer(random_, parser)
    written, thought, form = reasoned(random_, parser, written)
    whole = parse(form, [written])
    try:
        found = [(name, json.loads(given, parse_constant=_refuse)) for name, given in whole.calls]
    except ValueError as error:
        return f"{parser}: {written!r} gives arguments that are not JSON: {whole.calls!r} ({error})"
    if found != calls:
        return f"{parser}: {written!r} gives the calls {found!r} instead of {calls!r}"
    if whole.reasoning != thought:
        return f"{parser}: {written!r} gives the reasoning {whole.reasoning!r} instead of {thought!r}"
    if "".join(whole.text.split()) != "".join(text.split()):
        return f"{parser}: {written!r} gives the text {whole.text!r} instead of {text!r}"
    for parts in cuts(random_, written):
        if (streamed := parse(form, parts)) != whole:
            return f"{parser}: {parts!r} gives {streamed!r} instead of {whole!r}"
    return None


def main() -> int:
    """Fuzz the parsers that the command line names, or all."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("parsers", nargs="*", default=list(WRITERS))
    options.add_argument("--count", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    num_different = 0
    for parser in chosen.parsers:
        found = [difference(random.Random(f"{parser} {chosen.seed} {at}"), parser) for at in range(chosen.count)]
        differences = [each for each in found if each is not None]
        num_different += len(differences)
        print(
            f"{parser}: {chosen.count} answers, {len(differences)} differences",
            *differences[:3],
            sep="\n  ",
            flush=True,
        )
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
