"""Answers parsed by a checkpoint's own `response_template`: whole and streamed as transformers parses them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.models.test_tokenizer import byte_level
from tests.serving.openai.test_tools import cuts
from torchweave.serving.openai.answer_parser import AnswerFormat, AnswerParser, WholeAnswer
from torchweave.serving.openai.tools.response_template import TemplateGrammar, as_lenient, start_anchor, with_prompt
from torchweave.serving.tokenization import AsyncTokenizer

TEMPLATE = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True},
        "content": {"content": "text"},
    },
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
CALL = '<call>{"name": "f", "arguments": {"a": 5}}</call>'
ANSWERS = [  # end of the prompt, answer, reasoning, text, calls
    ("<assistant>", "Hi there.", "", "Hi there.", []),
    ("<assistant>", "<think>\nHm.\n</think>\n\nHi.", "Hm.", "Hi.", []),
    ("<assistant><think>\n", "Hm.\n</think>\n\nHi.", "Hm.", "Hi.", []),
    ("<assistant>", f"<think>Hm.</think>{CALL}\n{CALL}", "Hm.", "", [("f", {"a": 5}), ("f", {"a": 5})]),
    ("<assistant>", f"I call.\n{CALL}", "", "I call.", [("f", {"a": 5})]),
    ("<assistant>", "I call.\n<call>{no json</call> or not.", "", "I call.{no json or not.", []),
    ("<assistant>", '<call>{"name": "f", "arguments": {"a": NaN}}</call>', "", "", [("f", {"a": "NaN"})]),
    ("<assistant>", '<call>{"name": "f", "argu', "", '{"name": "f", "argu', []),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("response-template")
    made = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>", response_template=TEMPLATE)
    made.save_pretrained(folder)
    opened = asyncio.run(AsyncTokenizer.open(str(folder)))
    if opened.response_template is None:
        pytest.skip("this version of transformers has no response templates")
    yield opened
    opened.close()


@pytest.mark.parametrize(("prompt", "answer", "reasoning", "text", "calls"), ANSWERS, ids=range(len(ANSWERS)))
def test_answers_are_parsed_by_the_checkpoints_template(
    tokenizer: AsyncTokenizer, prompt: str, answer: str, reasoning: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    template = as_lenient(tokenizer.response_template or {})
    grammar = TemplateGrammar(
        lambda prefix: tokenizer.response_parser(template, prefix, TOOLS), "", True, start_anchor(template)
    )
    ids = asyncio.run(tokenizer.encode("<assistant>Before.<user>" + "Why? " * 60 + prompt))
    grammar = with_prompt(grammar, ids, tokenizer.decode)
    for parts in cuts(answer):
        parser = AnswerParser(AnswerFormat(template=grammar))
        whole = WholeAnswer.of(
            [piece for at, part in enumerate(parts, 1) for piece in parser.feed(part, at == len(parts))]
        )
        found = [(name, json.loads(arguments)) for name, arguments in whole.calls]
        assert (whole.reasoning, whole.text, found) == (reasoning, text, calls), parts


def test_a_tokenizer_without_a_template_and_a_template_of_the_server_have_none(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>").save_pretrained(tmp_path)
    opened = asyncio.run(AsyncTokenizer.open(str(tmp_path)))
    assert opened.response_template is None
    opened.close()
    PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="</s>", response_template=TEMPLATE
    ).save_pretrained(tmp_path)
    opened = asyncio.run(AsyncTokenizer.open(str(tmp_path), template="{{ messages }}"))
    assert opened.response_template is None
    opened.close()
