"""Structural tags: what an answer may hold, token by token, with special tokens and with texts as markers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchweave.engine.request import StructuredOutputs
from torchweave.engine.sampling.json_schema import endless_ref, rebase_refs
from torchweave.engine.sampling.structured_output import GrammarManager, loosen_schema, rejection_reason

SPECIAL = ("<|eos|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


class Texts:
    """A tokenizer of single bytes and special tokens, as the engine's."""

    def __init__(self, special: tuple[str, ...] = SPECIAL) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        self.tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        self.tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        self.special = special
        self.eos_token_id = self.tokenizer.token_to_id("<|eos|>")

    def tokenizer_json(self) -> str:
        return self.tokenizer.to_str()

    def added_tokens(self) -> dict[str, int]:
        return {text: self.tokenizer.token_to_id(text) for text in self.special}

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()


TOKENS, PLAIN = Texts(), Texts(("<|eos|>",))


def accepts(structured: StructuredOutputs, text: str, tokenizer: Texts = TOKENS) -> str:
    """`whole` if an answer may be a text, `begun` if more must follow, else how much of it may be written."""
    manager: Any = GrammarManager(tokenizer, len(tokenizer), [tokenizer.eos_token_id])  # type: ignore[arg-type]
    matcher = manager.matcher(structured)
    ids = tokenizer.tokenizer.encode(text).ids
    taken = matcher.try_consume_tokens(ids)
    if taken < len(ids):
        return tokenizer.tokenizer.decode(ids[:taken], skip_special_tokens=False)
    return "whole" if matcher.is_accepting() else "begun"


def tag(form: dict[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": form})


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {"type": "tag", "begin": "<tool_call>", "content": JSON, "end": "</tool_call>"}
WRITTEN = '<tool_call>{"a": true}</tool_call>'
ANY = {"type": "any_text"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [TAG]}
REASONING = {"type": "reasoning", "opened": True, "closing": ["</think>"]}
CASES: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"type": "const_string", "value": "a\n"}, {"a\n": "whole", "a": "begun", "b": ""}),
    (JSON, {'{"a": true}': "whole", '{"a": 1': '{"a": '}),
    ({"type": "regex", "pattern": "a/b+"}, {"a/b": "whole", "ab": "a"}),
    ({"type": "grammar", "grammar": 'start: "a" b\nb: "b"'}, {"ab": "whole", "b": ""}),
    ({"type": "any_text"}, {"a<tool_call>": "whole", "": "whole"}),
    (TAG, {'<tool_call>{"a": true}</tool_call>': "whole", "<tool_call>x": "<tool_call>"}),
    ({**TAG, "content": {"type": "any_text"}}, {"<tool_call>x\ny</tool_call>": "whole", "<tool_call>x": "begun"}),
    ({**TAG, "end": ["</tool_call>", "."]}, {'<tool_call>{"a": true}.': "whole"}),
    ({"type": "sequence", "elements": [TAG, TAG]}, {'<tool_call>{"a": true}</tool_call>': "begun"}),
    ({"type": "or", "elements": [TAG, {"type": "const_string", "value": "no"}]}, {"no": "whole", "nn": "n"}),
    ({"type": "optional", "content": TAG}, {"": "whole", "x": ""}),
    ({"type": "star", "content": {"type": "const_string", "value": "ab"}}, {"": "whole", "abab": "whole", "aba": "begun"}),
    ({"type": "plus", "content": {"type": "const_string", "value": "ab"}}, {"": "begun", "ab": "whole"}),
    ({"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "a"}}, {"": "begun", "aaa": "aa"}),
    (TRIGGERED, {"Text.": "whole", 'I <tool_call>{"a": true}</tool_call> look.': "whole", "I <tool_call>x": "I <tool_call>"}),
    ({**TRIGGERED, "at_least_one": True}, {"Text.": "begun", '<tool_call>{"a": true}</tool_call>': "whole"}),
    ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, {f"{WRITTEN}x": WRITTEN}),
    (
        {"type": "tags_with_separator", "tags": [TAG], "separator": ",", "at_least_one": True},
        {'<tool_call>{"a": true}</tool_call>,<tool_call>{"a": false}</tool_call>': "whole", "": "begun"},
    ),
    ({**ANY, "excludes": ["no/", "never"]}, {"now": "whole", "I no/": "I no", "nevex\n": "whole", "": "whole"}),
    ({**TAG, "content": {**ANY, "excludes": ["b"]}}, {"<tool_call>a</tool_call>": "whole", "<tool_call>ab": "<tool_call>a"}),
    ({**TRIGGERED, "excludes": ["ab"]}, {"axb": "whole", "ab": "a", f"a{WRITTEN}b": "whole", f"{WRITTEN}ab": f"{WRITTEN}a"}),
    ({"type": "sequence", "elements": [REASONING, JSON]}, {"hmm {": "begun", "hmm</think>x": "hmm</think>"}),
    (
        {"type": "sequence", "elements": [{**REASONING, "opened": False, "opening": ["<think>"]}, JSON]},
        {'<think>hmm</think>{"a": true}': "whole", '{"a": true}': "whole", "x": ""},
    ),
    ({"type": "sequence", "elements": [{**REASONING, "max_tokens": 3}, JSON]}, {"hmmm": "hmm", 'hm</think>{"a": true}': "whole"}),
    ({"type": "sequence", "elements": [{**REASONING, "max_tokens": 0}, JSON]}, {"h": "", '</think>{"a": true}': "whole"}),
    ({"type": "sequence", "elements": [{**REASONING, "max_tokens": 3}, ANY]}, {"hmm</think>So <tool_call>": "whole"}),
]  # fmt: skip


@pytest.mark.parametrize("tokenizer", [TOKENS, PLAIN], ids=("special tokens", "texts"))
@pytest.mark.parametrize(("form", "answers"), CASES, ids=lambda value: json.dumps(value)[:60])
def test_an_answer_holds_what_its_parts_allow(form: dict[str, Any], answers: dict[str, str], tokenizer: Texts) -> None:
    for text, expected in answers.items():
        if '"max_tokens"' in json.dumps(form) and tokenizer is PLAIN:
            continue  # an end that is no token is not forced
        assert accepts(tag(form), text, tokenizer).replace(" ", "") == expected.replace(" ", ""), text
    assert rejection_reason(tag(form)) == ""


def test_the_older_form_of_vllm() -> None:
    structures = [
        {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=b>", "schema": SCHEMA, "end": "</f>"},
    ]
    form = StructuredOutputs(structural_tag={"type": "structural_tag", "structures": structures, "triggers": ["<f="]})
    assert accepts(form, 'Well. <f=b>{"a": true}</f> So.') == "whole" and accepts(form, "<f=c").startswith("<f=")
    as_text = StructuredOutputs(structural_tag=json.dumps({"structures": structures, "triggers": ["<f="]}))
    assert accepts(as_text, "Well.") == "whole"


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"type": "verse"}, "use one of"),
        ({"type": "sequence", "elements": []}, "at least one element"),
        ({"type": "tag", "begin": "a", "content": JSON}, "a tag needs end"),
        ({"type": "triggered_tags", "triggers": ["x"], "tags": [TAG]}, "no trigger begins the tag"),
        ({"type": "json_schema", "json_schema": 5}, "an object"),
        ({**ANY, "excludes": [""]}, "a list of texts"),
        ({**ANY, "excludes": "a"}, "needs excludes, a list"),
        ({"type": "json_schema", "json_schema": {"type": "verse"}}, "verse"),
    ],
)
def test_an_invalid_tag_is_one_sentence(form: dict[str, Any], said: str) -> None:
    reason = rejection_reason(tag(form))
    assert reason.startswith("structured_outputs.structural_tag cannot be used: ") and said in reason


@pytest.mark.parametrize(
    "fields",
    [{"choice": ["<think>", "b"]}, {"regex": "<think>|b"}, {"json": {"const": "<think>"}}],
    ids=("choice", "regex", "json"),
)
def test_the_text_of_a_special_token_is_spelled(fields: dict[str, Any]) -> None:
    structured = StructuredOutputs(**fields)
    manager: Any = GrammarManager(TOKENS, len(TOKENS), [TOKENS.eos_token_id])  # type: ignore[arg-type]
    matcher, quote = manager.matcher(structured), '"' if structured.json is not None else ""
    for byte in f"{quote}<think>{quote}":
        token = TOKENS.tokenizer.token_to_id(byte)
        mask = matcher.compute_bitmask()
        assert mask[token // 8] >> token % 8 & 1, byte
        assert matcher.consume_token(token)
    assert matcher.is_accepting()


LOOPS: list[tuple[dict[str, Any], bool]] = [
    ({"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}, True),
    ({"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"allOf": [{"$ref": "#/$defs/A"}]}}, "$ref": "#/$defs/A"}, True),
    ({"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}}, "properties": {"a": {"$ref": "#/$defs/A"}}}, True),
    ({"$ref": "#"}, True),
    ({"properties": {"a": {"$ref": "#"}}}, False),
    ({"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}}, "$ref": "#/$defs/A"}, False),
    ({"enum": [{"$ref": "#"}]}, False),
    ({"properties": {"enum": {"type": "string"}}}, False),
]


@pytest.mark.parametrize(("schema", "endless"), LOOPS)
def test_references_that_lead_back_to_themselves(schema: dict[str, Any], endless: bool) -> None:
    assert (endless_ref(schema) is not None) == endless
    if endless:
        assert "leads back to itself" in rejection_reason(StructuredOutputs(json=schema))


def test_references_in_data_stay() -> None:
    data = {"$ref": "#/a"}
    schema = {
        "enum": [data],
        "const": data,
        "default": data,
        "examples": [data],
        "properties": {"enum": {"$ref": "#/a"}},
    }
    rebased = rebase_refs(schema, "#/$defs/0")
    assert rebased == schema | {"properties": {"enum": {"$ref": "#/$defs/0/a"}}}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "format": "password"},
        {"type": "array", "uniqueItems": True},
        {"not": {"type": "null"}, "type": "boolean"},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "string", "pattern": "^(?!x)y$"},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"type": "object", "if": {}, "then": {}},
    ],
    ids=str,
)
def test_what_no_grammar_holds_is_left_out(part: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"pattern": part, "b": {"type": "string", "pattern": "^a$"}}}
    loose, left_out = loosen_schema(schema)
    assert left_out and loose["properties"]["b"] == schema["properties"]["b"]
    assert not rejection_reason(StructuredOutputs(json={**loose, "x-guidance": {"lenient": True}}))
    assert loosen_schema({"type": "string"}) == ({"type": "string"}, [])


@pytest.mark.parametrize(
    "part", [{"type": "verse"}, {"pattern": "(", "type": "string"}, {"$ref": "#/nowhere"}, {"enum": []}]
)
def test_an_invalid_schema_is_not_loosened(part: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        loosen_schema({"type": "object", "properties": {"a": part}, "required": ["a"]})
