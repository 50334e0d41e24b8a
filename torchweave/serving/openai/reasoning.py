"""Reasoning parsers: separate a model's reasoning from its answer, incrementally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchweave.serving.openai.tools.base import ParserDelta, ReasoningDelta, TextDelta, split_at
from torchweave.tokenizer import IncrementalDetokenizer


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model writes its reasoning.

    Attributes:
        opening: texts that begin the reasoning.
        closing: texts that end it.
        is_implicit: an answer without the opening text begins with reasoning, too.
        keep_special: these texts are special tokens.
        in_channels: the whole answer is in the harmony format, which `HarmonyParser` reads.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    is_implicit: bool = False
    keep_special: bool = False
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
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
}
# Text of a chat template, and the format that it implies; the most specific first.
_TEMPLATE_MARKERS = (
    ("[THINK]", "mistral"),
    ("<|channel|>", "gpt_oss"),
    ("◁think▷", "kimi_vl"),
    ("<seed:think>", "seed_oss"),
    ("Here is my thought process", "granite"),
    ("<think>", "qwen3"),
    ("</think>", "qwen3"),
)
TAIL_TOKENS = 32
"""Tokens at the end of a prompt that tell whether it has opened the reasoning already."""


def detect_reasoning_format(template: str) -> str | None:
    """Detect the reasoning format from a chat template; None if it has none."""
    return next((name for marker, name in _TEMPLATE_MARKERS if marker in template), None)


class ReasoningParser:
    """Parses one answer incrementally: white space around the reasoning belongs neither to it nor to the answer.

    Args:
        prompt_tail: the end of the prompt's text. Templates may open the reasoning there, or open and close it.
    """

    def __init__(self, form: ReasoningFormat, prompt_tail: str) -> None:
        self._form = form
        self._state = _initial_state(form, prompt_tail)
        self._buffer = ""
        self._after_reasoning = False
        self._has_reasoning_text = False

    def feed(self, text: str) -> list[ParserDelta]:
        """Add text of the answer; returns the parts that are unambiguous by now."""
        self._buffer += text
        pieces: list[ParserDelta] = []
        if self._state == "start":
            self._read_opening()
        if self._state == "reasoning":
            self._read_reasoning(pieces)
        if self._state == "answer":
            self._read_answer(pieces)
        return pieces

    def finish(self) -> list[ParserDelta]:
        """End the answer; returns the text that was held back."""
        rest, self._buffer = self._buffer, ""
        if self._state == "reasoning":
            rest = rest.rstrip()
            return [ReasoningDelta(rest if self._has_reasoning_text else rest.lstrip())] if rest.strip() else []
        return [TextDelta(rest)] if rest and not self._after_reasoning else []

    def _read_opening(self) -> None:
        text = self._buffer.lstrip()
        opening = next((each for each in self._form.opening if text.startswith(each)), None)
        if opening is not None:
            self._state, self._buffer = "reasoning", text[len(opening) :]
        elif not any(each.startswith(text) for each in self._form.opening):
            self._state = "reasoning" if self._form.is_implicit else "answer"

    def _read_reasoning(self, pieces: list[ParserDelta]) -> None:
        before, closing, after = split_at(self._buffer, *self._form.closing)
        text = before.rstrip()
        if closing:
            self._buffer, self._state, self._after_reasoning = after, "answer", True
        else:
            self._buffer = self._buffer[len(text) :]
        if not self._has_reasoning_text:
            text = text.lstrip()
        if text:
            self._has_reasoning_text = True
            pieces.append(ReasoningDelta(text))

    def _read_answer(self, pieces: list[ParserDelta]) -> None:
        text = self._buffer.lstrip() if self._after_reasoning else self._buffer
        if text:
            self._buffer, self._after_reasoning = "", False
            pieces.append(TextDelta(text))


def _initial_state(form: ReasoningFormat, prompt_tail: str) -> str:
    tail = prompt_tail.rstrip()
    if tail.endswith(form.opening):
        return "reasoning"
    return "answer" if tail.endswith(form.closing) else "start"


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
