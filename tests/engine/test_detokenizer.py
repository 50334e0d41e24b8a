"""Incremental detokenization: stop strings across tokens, withheld text, partial reads."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import pytest

from torchweave.engine.detokenizer import CompletionBuilder
from torchweave.engine.request import SamplingParams, TokenLogprobs
from torchweave.utils.stop_regex import _compiled


class Letters:
    """One character an id."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def finish(self) -> str:
        return ""


def answer(**params: object) -> CompletionBuilder:
    return CompletionBuilder(SamplingParams(**params), Letters(), 0)  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_stop_string_across_tokens_ends_text_and_tokens() -> None:
    it = answer(stop=["END", "ZZ"])
    assert not it.add(ids("abcE"), None)
    assert not it.add(ids("N"), None)
    assert it.add(ids("Dxyz"), None)
    assert (it.text, it.finish_reason) == ("abc", "stop")
    assert it.token_ids == ids("abcEND")
    assert not it.add(ids("more"), "cancelled")
    assert it.result().text == "abc" and it.result().finish_reason == "stop"


def test_the_first_of_several_stop_strings_wins() -> None:
    it = answer(stop=["bcd", "b"])
    assert it.add(ids("abcd"), None)
    assert it.text == "a"


def test_a_stream_holds_back_what_may_begin_a_stop_string() -> None:
    it = answer(stop="END")
    seen = ""
    for letter in "abEcENx":
        it.add(ids(letter), None)
        seen += it.take_delta().text
        assert "EN" not in seen
    it.add([], "length")
    assert seen + it.take_delta().text == "abEcENx"


@pytest.mark.parametrize("size", [1, 2, 3, 10])
@pytest.mark.parametrize(
    ("stop", "min_tokens", "text", "num_tokens"),
    [
        ("ab", 0, "", 2), ("ab", 1, "", 2), ("ab", 2, "ab", 4), ("ab", 3, "ab", 4), ("ab", 4, "abab", 6),
        (["b", "abab"], 3, "", 4), (["b", "bab"], 2, "a", 4), ("c", 6, "ababab", 7), ("ab", 7, "abababcd", 8),
    ],
)  # fmt: skip
def test_stop_strings_are_ignored_before_min_tokens(
    stop: str | list[str], min_tokens: int, text: str, num_tokens: int, size: int
) -> None:
    """As stop tokens; a string may begin among them."""
    it, whole = answer(stop=stop, min_tokens=min_tokens), "abababcd"
    parts = [whole[at : at + size] for at in range(0, len(whole), size)]
    seen = ""
    for part in parts:
        it.add(ids(part), "length" if part is parts[-1] else None)
        seen += it.take_delta().text
    assert (it.text, len(it.token_ids)) == (text, num_tokens) and seen == text


def test_stop_token_is_returned_without_text() -> None:
    it = answer()
    it.add(ids("ab"), None)
    it.add(ids("c$"), "stop")
    assert it.text == "abc" and it.token_ids == ids("abc$")


@pytest.mark.parametrize("chunks", [["hello"], list("hello"), ["he", "llo"]])
def test_deltas_add_up_to_the_completion(chunks: list[str]) -> None:
    it = answer()
    text, tokens = "", []
    for number, chunk in enumerate(chunks):
        it.add(ids(chunk), "length" if number == len(chunks) - 1 else None)
        delta = it.take_delta()
        text += delta.text
        tokens += delta.token_ids
    assert (text, tokens, delta.finish_reason) == ("hello", ids("hello"), "length")


def test_logprobs_are_given_in_vllms_form() -> None:
    it = answer(logprobs=1)
    it.add([5, 6], "length", [TokenLogprobs(5, -1.0, 2, {7: -0.5}), TokenLogprobs(6, -0.25, 1, {6: -0.25})])
    result = it.result()
    assert result.logprobs == [{7: -0.5, 5: -1.0}, {6: -0.25}]
    assert result.cumulative_logprob == -1.25


def test_logprobs_of_deltas_add_up() -> None:
    it = answer(logprobs=0)
    it.add([5, 6], None, [TokenLogprobs(5, -1.0, 2, {}), TokenLogprobs(6, -0.25, 1, {})])
    first = it.take_delta()
    it.add([7], "length", [TokenLogprobs(7, -2.0, 1, {})])
    second = it.take_delta()
    assert (first.logprobs, first.cumulative_logprob) == ([{5: -1.0}, {6: -0.25}], -1.25)
    assert (second.logprobs, second.cumulative_logprob) == ([{7: -2.0}], -3.25)
    assert it.result().logprobs == [{5: -1.0}, {6: -0.25}, {7: -2.0}]


def test_without_a_tokenizer_there_are_only_tokens() -> None:
    it = CompletionBuilder(SamplingParams(stop="x"), None, 0)
    it.add([1, 2], "length")
    assert it.result().token_ids == [1, 2] and it.text == ""


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 20}, "must not exceed"),
        ({"n": 0}, "n must be from 1 to 16384"),
        ({"n": 10**9}, "n must be from 1 to 16384, but is 1000000000"),
        ({"stop": [""]}, "empty string"),
        ({"seed": -1}, "seed"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": True}, "logprobs must be a whole number, but is True"),
        ({"temperature": True}, "temperature must be a number"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be True or False"),
        ({"structured_outputs": ["a"]}, "structured_outputs must be a StructuredOutputs"),
        ({"stop_token_ids": np.array([1, 2])}, "stop_token_ids must be a list"),
    ],
)
def test_bad_parameters_are_refused_in_one_sentence(params: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        SamplingParams(**params)
    assert str(error.value).endswith(".")


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(n=np.int64(2), seed=np.int64(3), logprobs=np.int8(2), temperature=np.float64(0.5))  # type: ignore[arg-type]
    assert [type(getattr(params, name)) for name in ("n", "seed", "logprobs", "temperature")] == [int, int, int, float]
    assert [each.seed for each in params.each()] == [3, 4]


def test_vocabulary_sized_parameter_lists_are_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the HTTP process, whose streams wait for it, for all answers together."""
    params = SamplingParams(n=3, seed=2**64 - 1, prompt_logprobs=1, allowed_token_ids=list(range(200_000)))
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda _: pytest.fail("they were checked before"))
    found = params.each()
    assert [(each.seed, each.prompt_logprobs, each.n) for each in found] == [
        (2**64 - 1, 1, 3),
        (0, None, 3),
        (1, None, 3),
    ]


@pytest.mark.parametrize("pieces", [["abcENDxyz"], list("abcENDxyz"), ["abcE", "ND", "xyz"]])
def test_include_stop_str_in_output(pieces: list[str]) -> None:
    it = answer(stop=["END", "NDx"], include_stop_str_in_output=True)
    streamed = ""
    for piece in pieces:
        ended = it.add(ids(piece), None)
        streamed += it.take_delta().text
        if ended:
            break
    assert (it.text, streamed, it.finish_reason) == ("abcEND", "abcEND", "stop")
    assert it.token_ids == ids("abcEND")


def test_shorter_of_two_stop_strings_with_a_common_prefix_wins() -> None:
    it = answer(stop=["ENDS", "END"], include_stop_str_in_output=True)
    assert it.add(ids("aENDS"), None)
    assert it.text == "aEND"


def test_include_text_of_a_stop_token() -> None:
    with_it, without = answer(include_stop_str_in_output=True), answer()
    with_it.add(ids("ab!"), "stop")
    without.add(ids("ab!"), "stop")
    assert (with_it.text, without.text) == ("ab!", "ab")


def test_the_automaton_finds_what_a_search_for_each_string_finds() -> None:
    chance = random.Random(3)
    for _ in range(400):
        stops = ["".join(chance.choices("abc", k=chance.randint(1, 5))) for _ in range(chance.randint(1, 6))]
        pieces = ["".join(chance.choices("abc", k=chance.randint(0, 4))) for _ in range(12)]
        it = CompletionBuilder(SamplingParams(stop=stops), Pieces(pieces), 0)
        text = ""
        for number, piece in enumerate(pieces):
            text += piece
            found = [(text.find(stop), len(stop)) for stop in stops if stop in text]
            assert it.add([number], None) == bool(found)
            if found:
                text = text[: min(found)[0]]
                break
        assert it.text == text


def test_the_time_for_a_token_does_not_depend_on_the_number_of_stop_strings() -> None:
    it = answer(stop=[f"{number:016d}" for number in range(1000)])
    begin = time.thread_time()
    it.add(ids("0123456789" * 2000), None)
    assert time.thread_time() - begin < 2  # 20 seconds with a search for each string
    assert it.token_ids == ids("0123456789" * 2000)


class Pieces:
    """The text of each id is given."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[token] for token in token_ids)

    def finish(self) -> str:
        return ""


def test_patterns_are_compiled_once_for_all_answers() -> None:
    """Eight for each of 32 answers took 2.3 s in the event loop."""
    pytest.importorskip("llguidance")
    patterns = [rf"once{number}\d+" for number in range(8)]
    before = _compiled.cache_info().misses
    params = SamplingParams(stop_regex=patterns, n=32)
    answers = [CompletionBuilder(each, Letters(), 0) for each in params.each()]  # type: ignore[arg-type]
    assert _compiled.cache_info().misses - before == 8
    assert not answers[0].add(ids("once3"), None) and not answers[1].add(ids("7"), None)
    assert answers[0].add(ids("5"), None) and answers[0].text == "once35"  # each reads its own text
