"""One answer of a chat in parts: reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchweave.serving.openai.custom_tools import custom_input
from torchweave.serving.openai.reasoning import ReasoningFormat, ReasoningGrammar, num_reasoning_tokens
from torchweave.serving.openai.tools import (
    ArgumentsDelta,
    Call,
    ParserDelta,
    ReasoningDelta,
    StreamParser,
    TextDelta,
    ToolUse,
    make_tool_parser,
)
from torchweave.serving.openai.tools.response_template import TemplateGrammar
from torchweave.serving.openai.tools.source import Output, Source, Steps
from torchweave.serving.tokenization import AsyncTokenizer


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers of a request are parsed.

    Attributes:
        tools: tools of the request, and the parser of their calls.
        reasoning: format of the reasoning; None: it is not parsed.
        prompt_tail: the end of the prompt's text, which may open the reasoning.
        continued: text of the answer's message that the prompt holds already (`continue_final_message`).
        template: the checkpoint's own description of its answers, which is used instead of `tools.parser` and `reasoning`.
        first_call_only: drop all calls but the first.
        with_reasoning: return the reasoning.
    """

    tools: ToolUse = field(default_factory=ToolUse)
    reasoning: ReasoningFormat | None = None
    prompt_tail: str = ""
    continued: str = ""
    template: TemplateGrammar | None = None
    first_call_only: bool = False
    with_reasoning: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether an answer is nothing but text."""
        return self.reasoning is None and self.tools.parser is None and self.template is None

    @property
    def keep_special(self) -> bool:
        """Whether special tokens mark parts of the answer."""
        by_reasoning = self.reasoning is not None and self.reasoning.keep_special
        return self.tools.keep_special or by_reasoning or self.template is not None


class AnswerParser:
    """Parses one answer incrementally.

    Attributes:
        has_calls: the answer has tool calls.
    """

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._format = answer_format
        self._parser = StreamParser(self._grammar(answer_format))
        self.has_calls = self._has_reasoning = False

    @staticmethod
    def _grammar(answer_format: AnswerFormat) -> Callable[[Source, Output], Steps[object]]:
        form, calls = answer_format.reasoning, answer_format.tools.parser
        if answer_format.template is not None:
            return answer_format.template.parse
        if form is not None and form.in_channels:
            return (calls or make_tool_parser("gpt_oss", ())).parse
        if form is not None:
            return ReasoningGrammar(form, answer_format.prompt_tail, answer_format.continued, calls).parse
        return (lambda source, output: source.read_until(output.text)) if calls is None else calls.parse

    def feed(self, text: str, is_last: bool, is_cut: bool = False) -> list[ParserDelta]:
        """Add text of the answer; returns the parts that are unambiguous by now, all if this text is the last.

        Args:
            is_cut: the answer ends at a limit, such as `max_tokens`: a call may have lost its end.
        """
        pieces = self._parser.feed(text)
        if is_last:
            pieces += self._parser.finish(is_cut)
        self._has_reasoning = self._has_reasoning or any(isinstance(piece, ReasoningDelta) for piece in pieces)
        pieces = [piece for piece in pieces if self._is_returned(piece)]
        self.has_calls = self.has_calls or any(isinstance(piece, Call) for piece in pieces)
        return pieces

    def _is_returned(self, piece: ParserDelta) -> bool:
        if isinstance(piece, ReasoningDelta):
            return self._format.with_reasoning
        return not self._format.first_call_only or isinstance(piece, TextDelta) or piece.index == 0

    def num_reasoning_tokens(self, ids: list[int], tokenizer: AsyncTokenizer | None) -> int:
        """Number of the answer's tokens up to the end of its reasoning."""
        form = self._format.reasoning
        if form is None or tokenizer is None or not self._has_reasoning:
            return 0
        return num_reasoning_tokens(ids, form, tokenizer.token_of(form.closing[0]), tokenizer.stream([], False))


@dataclass(frozen=True)
class WholeAnswer:
    """An answer in parts. `calls` are (name, JSON text of the arguments)."""

    reasoning: str
    text: str
    calls: list[tuple[str, str]]

    @classmethod
    def of(cls, pieces: Sequence[ParserDelta]) -> WholeAnswer:
        """Join the parts of a whole answer."""
        arguments: dict[int, str] = {}
        for piece in pieces:
            if isinstance(piece, ArgumentsDelta):
                arguments[piece.index] = arguments.get(piece.index, "") + piece.text
        return cls(
            "".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta)),
            "".join(piece.text for piece in pieces if isinstance(piece, TextDelta)),
            [(piece.name, arguments.get(piece.index, "")) for piece in pieces if isinstance(piece, Call)],
        )


class CustomInputs:
    """Collects the inputs of custom calls while answers are parsed: a text is known when its JSON is whole.

    Args:
        names: of the custom tools.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._calls: set[tuple[int, int]] = set()
        self._open: dict[int, tuple[int, list[str]]] = {}  # by choice: index of the call, parts of its arguments

    def is_custom(self, choice: int, index: int) -> bool:
        """Whether the `index`-th call of a choice is one of a custom tool."""
        return (choice, index) in self._calls

    def gather(self, choice: int, parts: Sequence[ParserDelta], is_ended: bool) -> Sequence[ParserDelta]:
        """Parts of an answer in which the input of a custom call is one part, at the call's end."""
        if not self._names:
            return parts
        gathered: list[ParserDelta] = []
        for part in parts:
            if isinstance(part, ArgumentsDelta) and (choice, part.index) in self._calls:
                self._open[choice][1].append(part.text)
                continue
            if isinstance(part, Call):
                gathered += self._close(choice)
                if part.name in self._names:
                    self._calls.add((choice, part.index))
                    self._open[choice] = (part.index, [])
            gathered.append(part)
        return gathered + (self._close(choice) if is_ended else [])

    def _close(self, choice: int) -> list[ParserDelta]:
        index, parts = self._open.pop(choice, (0, []))
        return [ArgumentsDelta(index, custom_input("".join(parts)))] if parts else []
