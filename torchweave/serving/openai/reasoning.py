"""Formats of reasoning, and the parser that separates a model's reasoning from its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import regex

from torchweave.plug_points import REASONING_PARSERS
from torchweave.serving.openai.tools.base import ArgumentsDelta, Call, TextDelta, split_at
from torchweave.serving.openai.tools.grammar import CallParser, Grammar, Parsing
from torchweave.serving.openai.tools.source import END, Output, Source, Steps
from torchweave.tokenizer import IncrementalDetokenizer


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model writes its reasoning.

    Attributes:
        opening: texts that begin the reasoning.
        closing: texts that end it.
        is_implicit: an answer without the opening text begins with reasoning, too.
        keep_special: these texts are special tokens.
        ignored: texts that are no part of the answer.
        in_channels: the whole answer is in the harmony format, which `HarmonyGrammar` reads.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    is_implicit: bool = False
    keep_special: bool = False
    ignored: tuple[str, ...] = ()
    in_channels: bool = False


_THINK = ReasoningFormat(("<think>",), ("</think>",))
_IMPLICIT_THINK = ReasoningFormat(("<think>",), ("</think>",), is_implicit=True)
FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": _IMPLICIT_THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "minimax_m2": _IMPLICIT_THINK,
    "kimi_vl": ReasoningFormat(("◁think▷",), ("◁/think▷",)),
    "gpt_oss": ReasoningFormat(("<|channel|>analysis<|message|>",), ("<|end|>",), keep_special=True, in_channels=True),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",), keep_special=True),
    "step3": _IMPLICIT_THINK,
    "ernie45": ReasoningFormat(("<think>",), ("</think>",), True, ignored=("<response>", "</response>")),
    "cohere": ReasoningFormat(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        keep_special=True,
        ignored=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "gemma4": ReasoningFormat(("<|channel>thought",), ("<channel|>",), keep_special=True),
    "kimi_k3": ReasoningFormat(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        keep_special=True,
        ignored=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
    ),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
}
for _name, _format in FORMATS.items():
    REASONING_PARSERS.register(_name, _format)
# Text of a chat template, and the format that it implies; the most specific first.
_TEMPLATE_MARKERS = (
    ("[THINK]", "mistral"),
    ("<|channel|>", "gpt_oss"),
    ("◁think▷", "kimi_vl"),
    ("<|START_THINKING|>", "cohere"),
    ("<|channel>thought", "gemma4"),
    ("<|open|>think", "kimi_k3"),
    ("<seed:think>", "seed_oss"),
    ("Here is my thought process", "granite"),
    ("<think>", "qwen3"),
    ("</think>", "qwen3"),
)
_SPACE = regex.compile(r"\s*(?=\S)")
TAIL_TOKENS = 32
"""Tokens at the end of a prompt that tell whether it has opened the reasoning already."""


def detect_reasoning_format(template: str) -> str | None:
    """Detect the reasoning format from a chat template; None if it has none."""
    return next((name for marker, name in _TEMPLATE_MARKERS if marker in template), None)


class ReasoningGrammar:
    """An answer that may begin with reasoning: white space around it belongs neither to it nor to what follows.

    A call that the model writes before the end of its reasoning is a call if the answer ends with it, and part of the reasoning if
    more follows after the reasoning's end.

    Args:
        prompt_tail: the end of the prompt's text. Templates may open the reasoning there, or open and close it.
        continued: text of the answer that the prompt holds already.
        calls: parser of the calls; None: there are none.
    """

    def __init__(self, form: ReasoningFormat, prompt_tail: str, continued: str, calls: CallParser | None) -> None:
        self._form, self._calls = form, calls
        self._marked = None if calls is None else calls.marked
        self._state, self._is_continued = initial_state(form, prompt_tail, continued)
        self._opening = regex.compile(rf"\s*(?:{'|'.join(map(regex.escape, form.opening))})")

    def parse(self, source: Source, output: Output) -> Steps[None]:
        """Parse an answer."""
        if self._state == "reasoning" or (
            self._state == "start" and ((yield from source.accept(self._opening)) is not None or self._form.is_implicit)
        ):
            yield from self._read_reasoning(source, output)
        if self._calls is not None:
            yield from self._calls.parse(source, output)
        else:
            while marker := (yield from source.read_until(output.text, *self._form.ignored)):
                source.take(len(marker))

    def _read_reasoning(self, source: Source, output: Output) -> Steps[None]:
        reasoning = _ReasoningText(output, self._is_continued)
        closing, markers = self._form.closing, self._marked.opening if self._marked is not None else ()
        while marker := (yield from source.read_until(reasoning.add, *closing, *markers)):
            if marker in closing:
                source.take(len(marker))
                yield from source.accept(_SPACE)
                return
            assert self._marked is not None and self._calls is not None
            yield from self._read_calls(Parsing(source, Output(), self._calls.tools), self._marked, output, reasoning)

    def _read_calls(self, state: Parsing, grammar: Grammar, output: Output, reasoning: _ReasoningText) -> Steps[None]:
        """Read calls, or mentions of their marker, within the reasoning."""
        source, found = state.source, state.output
        source.record()
        yield from grammar.read_section(state)
        while found.num_calls:
            end = yield from source.read_until(found.text, *self._form.closing, *grammar.opening)
            if end not in grammar.opening:
                source.take(len(end))
                yield from source.accept(_SPACE)
                break
            yield from grammar.read_section(state)
        text = source.recorded()
        before, closing, after = split_at(text, *self._form.closing)
        is_last = bool(found.num_calls) and (yield from source.peek()) == END
        if is_last and not (state.is_open and closing):
            _add_calls(found, output, reasoning)
            return
        reasoning.add(before if closing else text)
        source.put_back(closing + after if closing else "")


def _add_calls(found: Output, output: Output, reasoning: _ReasoningText) -> None:
    """Add calls to an answer; the text between them is reasoning."""
    deltas = found.drain()
    reasoning.add("".join(delta.text for delta in deltas if isinstance(delta, TextDelta)))
    for delta in deltas:
        if isinstance(delta, Call):
            output.call(delta.name)
        elif isinstance(delta, ArgumentsDelta):
            output.arguments(delta.text)


class _ReasoningText:
    """Writes reasoning without the white space around it.

    Args:
        is_continued: reasoning precedes in the prompt.
    """

    def __init__(self, output: Output, is_continued: bool) -> None:
        self._output, self._is_first = output, not is_continued
        self._space: list[str] = []  # held back: the end may follow

    def add(self, text: str) -> None:
        if self._is_first:
            text = text.lstrip()
        stripped = text.rstrip()
        if stripped:
            self._output.reasoning("".join((*self._space, stripped)))
            self._space, self._is_first = [], False
        self._space.append(text[len(stripped) :])


def initial_state(form: ReasoningFormat, prompt_tail: str, continued: str) -> tuple[str, bool]:
    """What an answer begins with (its start, reasoning, or the answer proper), and whether it continues reasoning."""
    if continued.strip():
        opened, opening = max((continued.rfind(text), text) for text in form.opening)
        closed = max(continued.rfind(text) for text in form.closing)
        if opened > closed:
            return "reasoning", bool(continued[opened + len(opening) :].strip())
        if opened >= 0 or closed >= 0:
            return "answer", False
    tail = prompt_tail.rstrip()
    if tail.endswith(form.opening):
        return "reasoning", False
    return "answer" if tail.endswith(form.closing) or continued.strip() else "start", False


def num_reasoning_tokens(
    ids: Sequence[int], form: ReasoningFormat, closing_token: int | None, text: IncrementalDetokenizer
) -> int:
    """Number of tokens up to the end of the reasoning; all if it has not ended.

    Args:
        closing_token: token of the closing text; None if the text is several tokens, which are then found by `text`.
    """
    if closing_token is not None:
        return ids.index(closing_token) + 1 if closing_token in ids else len(ids)
    longest, tail = max(map(len, form.closing)), ""
    for count, token in enumerate(ids, 1):
        tail += text.feed([token])
        if any(closing in tail for closing in form.closing):
            return count
        tail = tail[-longest:]
    return len(ids)
