"""What the parser of a model family is made of."""

from __future__ import annotations

from dataclasses import dataclass

from torchweave.serving.openai.tools.call_tags import CallTags
from torchweave.serving.openai.tools.grammar import AnswerGrammar


@dataclass(frozen=True)
class Family:
    """Models that write calls in one format.

    Attributes:
        name: value of the option `tool_call_parser`.
        models: who writes it.
        source: where the format is specified.
        grammar: the format.
        tags: how calls are written where a constraint holds the model to them; of several, the first that the template implies.
        template: texts, any of which in a chat template implies the format.
        special_tokens: the markers are special tokens, or may be.
        id_form: form of the ids of calls that the template takes: `call`, `nine` letters or digits, `counted`.
        aliases: further values of the option.
    """

    name: str
    models: str
    source: str
    grammar: AnswerGrammar
    tags: tuple[CallTags, ...] = ()
    template: tuple[str, ...] = ()
    special_tokens: bool = False
    id_form: str = "call"
    aliases: tuple[str, ...] = ()
