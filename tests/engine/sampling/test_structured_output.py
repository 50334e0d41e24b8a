"""Structured outputs of the demo model: valid at any temperature, without effect on other requests."""

from __future__ import annotations

import json
import re
import string
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchweave
from tests.engine import fake
from torchweave import LLM, SamplingParams
from torchweave.config.model_source import resolve
from torchweave.config.options import TorchCompileConfig
from torchweave.engine.request import InferenceRequest, StructuredOutputs
from torchweave.engine.sampling import structured_output
from torchweave.engine.sampling.structured_output import Constraint, GrammarManager, rejection_reason
from torchweave.report import Report
from torchweave.tokenizer import Tokenizer

PLAIN = TorchCompileConfig(enable_fullgraph=False)  # starts at once; what is tested is behind the model
HOT = SamplingParams(temperature=1.5, max_tokens=80, seed=1)
PROMPTS = [f"sort: {' '.join(words)}" for words in (["pear", "fig"], ["plum", "apple", "kiwi"], ["olive"])]

pytest.importorskip("llguidance")


def engine(**options: Any) -> LLM:
    return LLM("demo", device="cpu", block_size=16, torch_compile_config=PLAIN, report=Report(show=False), **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine() as found:
        yield found
        scheduler = found.engine.scheduler
        scheduler.kv.check()
        assert scheduler.num_active == 0 and scheduler.kv.num_free == scheduler.kv.num_blocks


def form(params: SamplingParams = HOT, **how: Any) -> SamplingParams:
    return replace(params, structured_outputs=StructuredOutputs(**how))


def texts(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[str]:
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert all(output.finish_reason == "stop" for output in outputs), [output.text for output in outputs]
    return [output.text for output in outputs]


def test_grammar_that_only_allows_stop_tokens_fails_before_min_tokens(llm: LLM) -> None:
    (ending,) = llm.get_tokenizer().encode("x")[1:]
    held = replace(HOT, stop_token_ids=[ending], min_tokens=9)
    assert re.fullmatch("[0-9]{2}", texts(llm, PROMPTS[:1], [form(held, regex="[0-9]{2}x?")])[0])
    with pytest.raises(RuntimeError, match="only stop tokens can follow here, but min_tokens bans them"):
        llm.generate(PROMPTS[:1], form(held, regex="[0-9]{2}x"))


def test_a_grammar_is_validated_once_for_many_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[StructuredOutputs] = []
    monkeypatch.setattr(
        "torchweave.engine.llm.rejection_reason", lambda form: looked_at.append(form) or rejection_reason(form)
    )
    digits, word = form(regex="[0-9]"), form(choice=["word"])
    found = texts(llm, PROMPTS * 2, [digits] * 5 + [replace(word, n=2)])
    assert all(map(str.isdigit, found[:5])) and found[5] == "word"
    assert looked_at == [digits.structured_outputs, word.structured_outputs]


# -- forms -------------------------------------------------------------------------------------------------------------

NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=4)
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.tuples(st.integers(-50, 50), st.integers(0, 100)).map(
        lambda two: {"type": "integer", "minimum": two[0], "maximum": two[0] + two[1]}
    ),
    st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
    st.lists(st.one_of(NAMES, st.integers(-9, 9), st.booleans()), min_size=1, max_size=3).map(
        lambda some: {"enum": some}
    ),
    NAMES.map(lambda text: {"const": text}),
)


def compound(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda it: {"type": "array", "items": it[0], "minItems": it[1], "maxItems": it[1] + it[2]}
    )
    objects = st.tuples(st.dictionaries(NAMES, inner, max_size=3), st.sets(NAMES, max_size=1)).map(
        lambda it: {
            "type": "object", "properties": it[0], "required": sorted(set(it[0]) - it[1]), "additionalProperties": False
        }
    )  # fmt: skip
    return st.one_of(arrays, objects, st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some}))


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    schema=st.recursive(LEAVES, compound, max_leaves=3),
    temperature=st.sampled_from([0.0, 0.7, 1.5, 5.0]),
    tight=st.booleans(),
    as_text=st.booleans(),
)
def test_output_is_valid_under_its_json_schema(
    llm: LLM, schema: dict[str, Any], temperature: float, tight: bool, as_text: bool
) -> None:
    given_as = json.dumps(schema) if as_text else schema
    settings = replace(HOT, temperature=temperature, max_tokens=200 if tight else 40)
    for output in llm.generate(PROMPTS[:2], form(settings, json=given_as, disable_any_whitespace=tight)):
        answer = output.outputs[0]
        if tight:  # else white space may go on until the tokens are used up
            assert answer.finish_reason == "stop", answer.text
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), schema)


REGEXES = [
    r"[a-c]{2,5}x?",
    r"\d{3}-\d{4}",
    r"(yes|no|maybe)( indeed)?",
    r"[A-Z][a-z]{1,9} = -?\d{1,9}(\.\d{1,3})?",
    r"(ab){0,9}c",
]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 4.0])
def test_output_fully_matches_its_regex(llm: LLM, temperature: float) -> None:
    params = [form(replace(HOT, temperature=temperature), regex=regex) for regex in REGEXES]
    for regex, output in zip(REGEXES, llm.generate([PROMPTS[0]] * len(REGEXES), params), strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop" and re.fullmatch(regex, answer.text), (regex, answer.text)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    choices=st.lists(st.text([chr(c) for c in range(32, 127)] + ["\n"], min_size=1, max_size=8), min_size=1, max_size=4)
)
def test_output_is_one_of_the_choices(llm: LLM, choices: list[str]) -> None:
    assert set(texts(llm, PROMPTS, [form(choice=choices)] * 3)) <= set(choices)


def test_choices_may_be_many_with_any_characters(llm: LLM) -> None:
    many = [f"{number}." for number in range(5000)]
    assert set(texts(llm, PROMPTS, [form(choice=many)] * 3)) <= set(many)
    assert rejection_reason(StructuredOutputs(choice=["a\x7fb", "\u2028", "(?i)[x]|\\d+"])) == ""


def test_output_follows_a_lark_grammar(llm: LLM) -> None:
    grammar = """
        start: term (("+" | "-") term){1,3} "=" NUMBER
        term: NUMBER | "(" NUMBER "*" NUMBER ")"
        NUMBER: /[0-9]{1,3}/
    """
    number = r"\d{1,3}"
    term = rf"({number}|\({number}\*{number}\))"
    for text in texts(llm, PROMPTS, [form(grammar=grammar)] * 3):
        assert re.fullmatch(rf"{term}([+-]{term}){{1,3}}={number}", text), text


def test_json_object_output(llm: LLM) -> None:
    for output in llm.generate(PROMPTS[:2], form(json_object=True, disable_any_whitespace=True)):
        answer = output.outputs[0]
        assert answer.text.startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)


# -- ends --------------------------------------------------------------------------------------------------------------


def test_output_ends_when_the_grammar_accepts(llm: LLM) -> None:
    for more in ({}, {"min_tokens": 30}, {"ignore_eos": True}, {"include_stop_str_in_output": True}):
        answer = llm.generate(PROMPTS[0], form(replace(HOT, **more), regex="[0-9]{7}"))[0].outputs[0]
        assert re.fullmatch("[0-9]{7}", answer.text) and answer.finish_reason == "stop"
        assert len(answer.token_ids) == 7, "no end token had to be drawn"
    for more in ({"min_tokens": 12}, {"ignore_eos": True}):
        answer = llm.generate(PROMPTS[0], form(replace(HOT, max_tokens=20, **more), regex="[0-9]+"))[0].outputs[0]
        assert re.fullmatch("[0-9]{12,20}", answer.text)


def test_stop_strings_and_limits_end_an_answer_before_its_form_is_complete(llm: LLM) -> None:
    schema = {"const": "a long enough text"}
    stopped = llm.generate(PROMPTS[0], form(replace(HOT, stop="enough"), json=schema))[0].outputs[0]
    assert (stopped.text, stopped.finish_reason) == ('"a long ', "stop")
    cut = llm.generate(PROMPTS[0], form(replace(HOT, max_tokens=5), json=schema))[0].outputs[0]
    assert (cut.text, cut.finish_reason) == ('"a lo', "length")
    token = llm.get_tokenizer().encode("g")[-1]
    at_token = llm.generate(PROMPTS[0], form(replace(HOT, stop_token_ids=[token]), json=schema))[0].outputs[0]
    assert (at_token.text, at_token.finish_reason) == ('"a lon', "stop")


def test_grammar_overrides_bad_words(llm: LLM) -> None:
    barred = replace(HOT, bad_words=["y", "no"], logit_bias={llm.get_tokenizer().encode("m")[-1]: -100.0})
    assert set(texts(llm, PROMPTS, [form(barred, choice=["yes", "no!", "maybe"])] * 3)) <= {"maybe", "no!"}
    assert texts(llm, PROMPTS, [form(barred, choice=["yes"])] * 3) == ["yes"] * 3


# -- beside others -----------------------------------------------------------------------------------------------------

MIXED = [
    form(
        json={"type": "array", "items": {"enum": [1, 23, 456]}, "minItems": 6, "maxItems": 6},
        disable_any_whitespace=True,
    ),
    form(regex="[a-z ]{25}"),
    form(replace(HOT, repetition_penalty=1.5, presence_penalty=0.5, logprobs=1), regex="([a-f]{4}-){4}"),
]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """Tokens of each of MIXED alone."""
    params = [replace(each, seed=5 + number) for number, each in enumerate(MIXED)]
    return [llm.generate(prompt, each)[0].outputs[0].token_ids for prompt, each in zip(PROMPTS, params, strict=True)]


def test_other_rows_of_the_batch_are_unaffected(llm: LLM, expected: list[list[int]]) -> None:
    plain = [SamplingParams(temperature=0.9, seed=number, max_tokens=40, ignore_eos=True) for number in range(5)]
    prompts = [*PROMPTS, *PROMPTS[:2]]
    alone = [llm.generate(prompt, each)[0].outputs[0].token_ids for prompt, each in zip(prompts, plain, strict=True)]
    params = [replace(each, seed=5 + number) for number, each in enumerate(MIXED)]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts + PROMPTS, plain + params)]
    assert together == alone + expected


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_tokens": 17},
        {"num_kv_blocks": 8, "capacity_scheduler_policy": "max_utilization", "max_num_tokens": 48},
        {"run_ahead": 0, "enable_prefix_caching": False},
        {"capacity_scheduler_policy": "static_batch", "run_ahead": 3},
    ],
    ids=["chunked", "paused", "no run-ahead", "static"],
)
def test_pauses_chunking_and_prefix_caching_change_no_token(expected: list[list[int]], options: dict[str, Any]) -> None:
    params = [replace(each, seed=5 + number) for number, each in enumerate(MIXED)]
    with engine(**options) as llm:
        for _ in range(2):
            beside = [SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)] * 2
            found = llm.generate([*PROMPTS, *PROMPTS[:2]], [*params, *beside])
            assert [output.outputs[0].token_ids for output in found[:3]] == expected
        if "num_kv_blocks" in options:
            assert llm.engine.scheduler.paused_total > 0


def test_streamed_text_is_the_whole_text(llm: LLM, expected: list[list[int]]) -> None:
    pieces = list(llm.stream(PROMPTS[0], replace(MIXED[0], seed=5)))
    assert [token for piece in pieces for token in piece.token_ids] == expected[0]
    assert pieces[-1].finish_reason == "stop" and len(json.loads("".join(piece.text for piece in pieces))) == 6


def test_an_abandoned_stream_frees_its_slot(llm: LLM) -> None:
    for _ in range(3):
        next(iter(llm.stream(PROMPTS[0], form(regex="[a-z]{300}"))))
    assert texts(llm, PROMPTS, [form(choice=["left"])] * 3) == ["left"] * 3


# -- what cannot be ----------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a(b"}, r"structured_outputs\.regex cannot be used: unclosed group\.$"),
    ({"regex": "(?=a)b"}, "cannot be used: look-around, including look-ahead and look-behind, is not supported"),
    ({"json": "{3"}, r"structured_outputs.json cannot be used: it is not JSON: .*\.$"),
    ({"json": "[3]"}, "a JSON schema must be an object"),
    ({"json": {"type": "foo"}}, "Invalid type: foo"),
    (
        {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
        "structured_outputs.json cannot be used: (it is nested too deeply|recursion limit exceeded)",  # Python's, llguidance's
    ),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"grammar": "start: a\na: b"}, r'cannot be used: line 2, column 4: unknown name: "b"\.$'),
    ({"grammar": "start"}, r"line 1, column 6: Expected token ':', found"),
    ({"grammar": "b: /x/"}, "no start rule"),
    ({"regex": "ä"}, "none of the model's tokens can continue the answer here"),
]


@pytest.mark.parametrize(("how", "words"), BAD, ids=[str(how)[:60] for how, _ in BAD])
def test_invalid_grammar_gives_a_one_line_error(llm: LLM, how: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=words) as refusal:
        llm.generate(PROMPTS[0], form(**how))
    assert "\n" not in str(refusal.value)


def test_grammar_and_allowed_token_ids_conflict(llm: LLM) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        llm.generate(PROMPTS[0], form(replace(HOT, allowed_token_ids=[3]), regex="a"))


@pytest.mark.parametrize("vocab_size", [96, 103, 104, 105, 128, 129, 300])
def test_logits_may_be_wider_or_narrower_than_the_tokenizer(vocab_size: int) -> None:
    """llguidance cannot read the built-in model's tokenizer file, so each token is passed to it."""
    tokenizer = Tokenizer(resolve("demo").folder)
    grammars = GrammarManager(tokenizer, vocab_size, ())
    constraint = Constraint(SamplingParams(structured_outputs=StructuredOutputs(regex="7+")), grammars.eos)
    grammars._compile(constraint)
    assert not constraint.error and len(constraint.mask) == -(-vocab_size // 32)
    allowed = np.flatnonzero(np.unpackbits(constraint.mask.view(np.uint8), bitorder="little"))
    assert allowed.tolist() == tokenizer.encode("7", False)


def test_a_token_without_a_logit_is_not_allowed() -> None:
    """The tokenizer of Llama 3.2 Vision has one more token than its model has logits."""
    tokenizer = Tokenizer(resolve("demo").folder)
    last = max(tokenizer.encode("0123456789", False))
    grammars = GrammarManager(tokenizer, last, ())
    constraints = [
        Constraint(SamplingParams(structured_outputs=StructuredOutputs(regex=regex)), grammars.eos)
        for regex in ("[0-9]", re.escape(tokenizer.decode([last])))
    ]
    for constraint in constraints:
        grammars._compile(constraint)
    allowed = np.flatnonzero(np.unpackbits(constraints[0].mask.view(np.uint8), bitorder="little"))
    assert allowed.tolist() == sorted(set(tokenizer.encode("0123456789", False)) - {last})
    assert "none of the model's tokens can continue" in constraints[1].error


def test_missing_llguidance_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "torchweave[structured]" in rejection_reason(StructuredOutputs(regex="a"))


def test_structured_output_needs_a_tokenizer() -> None:
    scheduler, _ = fake.make()
    assert "needs a tokenizer" in scheduler.rejection_reason(InferenceRequest(0, np.arange(3), form(regex="a")))


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"type": "integer", "multipleOf": 9999991}, True),
        ({"type": "integer", "multipleOf": 5**10}, True),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, True),
        ({"type": "number", "multipleOf": 0.01}, False),
        ({"type": "integer", "multipleOf": 1e6}, False),
        ({"properties": {"multipleOf": {"type": "integer"}}}, False),
    ],
)
def test_schemas_of_too_many_remainders_are_refused(schema: dict[str, object], refused: bool) -> None:
    """Fifty bytes of schema took gigabytes, in the engine process."""
    reason = rejection_reason(StructuredOutputs(json=schema))
    assert ("least common multiple" in reason) is refused, reason
    lark = rejection_reason(StructuredOutputs(grammar=f"start: %json {json.dumps(schema)}"))
    assert ("least common multiple" in lark) is refused, lark


def test_nothing_is_compiled_for_a_request_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    waiting: list[Callable[[], None]] = []
    manager = GrammarManager.__new__(GrammarManager)
    compilers = SimpleNamespace(submit=lambda _, work: waiting.append(work))
    monkeypatch.setattr(manager, "_compile_threads", compilers, raising=False)
    monkeypatch.setattr(manager, "matcher", compiled.append, raising=False)
    monkeypatch.setattr(manager, "_compute_masks", lambda _: None, raising=False)
    monkeypatch.setattr(manager, "_on_ready", lambda: None, raising=False)
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    kept, left = (manager.constraint(params, ()) for _ in range(2))
    del left
    for work in waiting:
        work()
    assert kept.ready and compiled == [params.structured_outputs]


def test_grammars_are_compiled_by_client_and_masks_on_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of running requests waited for the grammars of one client, and another's first for 24 s."""
    manager = GrammarManager(Tokenizer(Path("none")), 8, (0,))
    compiling: list[str] = []
    threads = SimpleNamespace(submit=lambda client, _: compiling.append(client))
    monkeypatch.setattr(manager, "_compile_threads", threads)
    params, advanced = SamplingParams(structured_outputs=StructuredOutputs(regex="a")), threading.Event()
    first, _ = manager.constraint(params, (), "one"), manager.constraint(params, (), "another")
    assert compiling == ["one", "another"]
    monkeypatch.setattr(manager, "_advance", lambda _: advanced.set())
    first.ready = True
    manager.advance([(first, 5)])
    assert advanced.wait(60)


def test_compiled_grammars_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four that take gigabytes were kept, because they were counted."""
    tokenizer = Tokenizer(Path(torchweave.__file__).parent / "models" / "demo")
    manager, grown = (
        GrammarManager(tokenizer, len(tokenizer.hf_tokenizer), (tokenizer.eos_token_id or 0,)),
        iter(range(99)),
    )
    monkeypatch.setattr(structured_output, "_resident_bytes", lambda: next(grown) * (100 << 20))
    for number in range(4):
        manager.matcher(StructuredOutputs(regex=f"a{number}"))
    assert len(manager._compiled) == 2 and sum(manager._sizes.values()) <= structured_output._MAX_CACHED_BYTES


def test_a_panic_of_the_library_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As Rust's panics, which are no exceptions for Python."""

    def panicking(_: object) -> None:
        raise Panic("thread panicked at parser.rs:1")

    manager = GrammarManager.__new__(GrammarManager)
    monkeypatch.setattr(manager, "matcher", panicking, raising=False)
    monkeypatch.setattr(manager, "_on_ready", lambda: None, raising=False)
    constraint = Constraint(SamplingParams(structured_outputs=StructuredOutputs(regex="a")), ())
    manager._compile(constraint)
    assert constraint.ready and "grammar library fails" in constraint.error and "parser.rs" not in constraint.error
