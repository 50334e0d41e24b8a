"""Calls to which an answer is constrained: a JSON list of calls, or the arguments of one function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchweave.serving.openai.tools.grammar import JsonCall, Parsing
from torchweave.serving.openai.tools.source import END, Output, Source, Steps
from torchweave.serving.openai.tools.values import ValueReader

_CALL = JsonCall(arguments=("parameters",))


@dataclass(frozen=True)
class ForcedGrammar:
    """An answer that is constrained to `forced_schema`. What is left of a call that was cut off is no text.

    Attributes:
        named: the function whose arguments are the answer; None: the answer is a list of calls.
    """

    named: str | None

    def parse(self, source: Source, output: Output, tools: Mapping[str, Any]) -> Steps[None]:
        """Parse an answer."""
        if self.named is not None:
            output.call(self.named)
            yield from source.read_value(ValueReader(output.arguments))
            return
        state = Parsing(source, output, tools)
        while (yield from source.peek()) != END:
            yield from source.skip(" \t\r\n,[]")
            if not (yield from _CALL.read(state)):
                return
