"""What peers' tests require of `/v1/completions`."""

from __future__ import annotations

import itertools
from typing import Any

from tests.serving.peers.requirement import COMPLETIONS, complete, events, require, require_all, texts
from tests.serving.running import ServerProcess

AREA = "completions"
IDS = [20, 21, 22, 23, 24]
FIVE: Any = {"prompt": IDS, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
CAR: Any = {
    "type": "object",
    "$defs": {"Kind": {"enum": ["sedan", "SUV"], "type": "string"}},
    "properties": {"kind": {"$ref": "#/$defs/Kind"}, "broken": "text"},
}

require_all(
    AREA,
    COMPLETIONS,
    [
        ("A prompt of token ids is answered with text.", FIVE, lambda body: bool(body["choices"][0]["text"])),
        (
            "`finish_reason` is length at max_tokens.",
            FIVE,
            lambda body: body["choices"][0]["finish_reason"] == "length",
        ),
        (
            "Answers have no log-probabilities unless they are requested.",
            FIVE | {"logprobs": None},
            lambda body: body["choices"][0]["logprobs"] is None and "prompt_logprobs" not in body["choices"][0],
        ),
        (
            "`logprobs: 0` returns the sampled token's log-probability alone.",
            FIVE | {"logprobs": 0},
            lambda body: all(len(each) == 1 for each in body["choices"][0]["logprobs"]["top_logprobs"]),
        ),
        (
            "`logprobs: 5` returns five or six tokens at each place.",
            FIVE | {"logprobs": 5},
            lambda body: all(5 <= len(each) <= 6 for each in body["choices"][0]["logprobs"]["top_logprobs"]),
        ),
        ("More log-probabilities than the server's limit are refused.", FIVE | {"logprobs": 101}, 400),
        ("They are refused in a stream, too, before it begins.", FIVE | {"logprobs": 101, "stream": True}, 400),
        (
            "`prompt_logprobs: -1` is refused where the vocabulary is above the limit.",
            FIVE | {"prompt_logprobs": -1},
            400,
        ),
        (
            "`prompt_logprobs: 0` returns one entry for each token but the first.",
            {"prompt": ["12+30=", "1+1="], "prompt_logprobs": 0},
            lambda body: [len(each["prompt_logprobs"]) for each in body["choices"]] == [7, 5],
        ),
        ("`stream_options` without a stream is refused.", FIVE | {"stream_options": {"include_usage": True}}, 400),
        (
            "`stream_options` of null values without a stream is refused.",
            FIVE | {"stream": False, "stream_options": {"include_usage": None}},
            400,
        ),
        (
            "`continuous_usage_stats` without a stream is refused.",
            FIVE | {"stream_options": {"continuous_usage_stats": True}},
            400,
        ),
        (
            "Two equal prompts have two equal answers.",
            {"prompt": ["12+30="] * 2, "temperature": 0},
            lambda body: [each["text"] for each in body["choices"]] == ["42", "42"],
        ),
        (
            "Prompts of token ids are a batch as texts are.",
            FIVE | {"prompt": [IDS, IDS]},
            lambda body: len({each["text"] for each in body["choices"]}) == 1 and len(body["choices"]) == 2,
        ),
        ("A broken JSON schema is refused.", FIVE | {"structured_outputs": {"json": CAR}}, 400),
        (
            "A broken regular expression is refused.",
            FIVE | {"structured_outputs": {"regex": "[.*"}, "stop": ["\n"]},
            400,
        ),
        ("A broken grammar is refused.", FIVE | {"structured_outputs": {"grammar": "root ::= nothingdefined"}}, 400),
        (
            "Two constraints in structured_outputs are refused.",
            FIVE | {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            400,
        ),
        ("A constraint of the wrong type is refused.", FIVE | {"structured_outputs": {"regex": {"1": "a"}}}, 400),
        ("A prompt of no texts is refused.", {"prompt": []}, 400),
        ("A request without a prompt is refused.", {"max_tokens": 1}, 400),
        ("A prompt of null is refused.", {"prompt": None}, 400),
        ("A token id outside the vocabulary is refused.", {"prompt": [999_999]}, 400),
        ("A negative token id is refused.", {"prompt": [-1]}, 400),
        ("Keys of logit_bias that are no token ids are refused.", FIVE | {"logit_bias": {"word": 1.0}}, 400),
        ("A token of logit_bias outside the vocabulary is refused.", FIVE | {"logit_bias": {"999999": 1.0}}, 400),
        ("A token of stop_token_ids outside the vocabulary is refused.", FIVE | {"stop_token_ids": [999_999]}, 400),
        ("A seed that no 64 bits hold is refused.", FIVE | {"seed": 2**64}, 400),
        ("A negative max_tokens is refused.", FIVE | {"max_tokens": -1}, 400),
        ("A prompt above the context length is refused.", {"prompt": [5] * 600}, 400),
        (
            "An answer ends at the context length, however large max_tokens is.",
            FIVE | {"prompt": IDS * 100, "max_tokens": 10**9},
            lambda body: body["usage"]["total_tokens"] == 512,
        ),
        (
            "`ignore_eos` generates max_tokens tokens.",
            {"prompt": "12+30=", "max_tokens": 20, "ignore_eos": True},
            lambda body: body["usage"]["completion_tokens"] == 20,
        ),
        (
            "`min_tokens` delays the end token.",
            {"prompt": "12+30=", "min_tokens": 6, "temperature": 0},
            lambda body: body["usage"]["completion_tokens"] >= 6,
        ),
        (
            "Biased tokens win.",
            FIVE | {"logit_bias": {"20": 100}, "return_token_ids": True},
            lambda body: body["choices"][0]["token_ids"] == [20] * 5,
        ),
        (
            "`allowed_token_ids` allows no other tokens.",
            FIVE | {"allowed_token_ids": [20, 21], "return_token_ids": True},
            lambda body: set(body["choices"][0]["token_ids"]) <= {20, 21},
        ),
        ("`best_of` 1 is taken.", FIVE | {"best_of": 1}, 200),
        ("`frequency_penalty` is taken.", FIVE | {"frequency_penalty": 1.0}, 200),
        ("`user` is taken.", FIVE | {"user": "someone"}, 200),
        ("`suffix` is refused.", FIVE | {"suffix": "!"}, 400),
        (
            "A text is completed by a JSON schema.",
            {
                "prompt": "1",
                "max_tokens": 60,
                "temperature": 0,
                "guided_json": {
                    "type": "object",
                    "properties": {"a": {"type": "integer", "maximum": 9}},
                    "required": ["a"],
                },
            },
            lambda body: body["choices"][0]["text"].lstrip().startswith("{"),
        ),
    ],
)


@require(AREA)
def an_answer_has_an_id_and_counts(server: ServerProcess) -> None:
    """An answer has an id, a time, one choice, and `usage` that adds up, with the cached tokens of the prompt."""
    body = complete(server, max_tokens=5, ignore_eos=True, cache_salt="an answer")
    assert body["id"] and body["created"] and body["object"] == "text_completion" and len(body["choices"]) == 1
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 5, 12)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@require(AREA)
def a_stream_equals_the_whole_answer(server: ServerProcess) -> None:
    """The texts of a stream make up the whole answer, and exactly one event has a finish reason, the last."""
    for extra in ({}, {"echo": True}):
        asked = {"prompt": "copy: abc", "max_tokens": 5, "ignore_eos": True, **extra}
        whole = complete(server, **asked)["choices"][0]
        chunks = events(server, COMPLETIONS, **asked)
        assert texts(chunks) == {0: whole["text"]}
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons[-1] == whole["finish_reason"] == "length" and set(reasons[:-1]) <= {None}
        assert chunks[-1]["choices"][0]["text"]


@require(AREA)
def several_answers_differ(server: ServerProcess) -> None:
    """`n` answers are numbered in order, differ at a temperature, end at different times, and stream under their index."""
    asked = {"prompt": "sort: ", "n": 3, "temperature": 2.0, "seed": 42, "max_tokens": 40}
    choices = complete(server, **asked, logprobs=0)["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2] and all(each["finish_reason"] for each in choices)
    assert len({each["text"] for each in choices}) == 3
    assert len({len(each["logprobs"]["tokens"]) for each in choices}) > 1
    chunks = events(server, COMPLETIONS, **asked)
    assert texts(chunks) == {each["index"]: each["text"] for each in choices}
    assert sum(choice["finish_reason"] is not None for chunk in chunks for choice in chunk["choices"]) == 3


@require(AREA)
def no_usage_unless_included(server: ServerProcess) -> None:
    """A stream has no usage without `include_usage`, whatever `continuous_usage_stats` says."""
    for options in ({}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}):
        chunks = events(server, COMPLETIONS, prompt="12+30=", stream_options=options)
        assert not any(chunk.get("usage") for chunk in chunks), options


@require(AREA)
def usage_comes_last(server: ServerProcess) -> None:
    """With `include_usage` one last event without choices has it, and it adds up."""
    chunks = events(server, COMPLETIONS, prompt="12+30=", stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1]) and chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] == 10


@require(AREA)
def usage_in_each_event(server: ServerProcess) -> None:
    """With `continuous_usage_stats` each event has usage, whose counts never fall."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server, COMPLETIONS, prompt="12+30=", max_tokens=8, ignore_eos=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 8
    assert all(chunk["usage"]["total_tokens"] == chunk["usage"]["completion_tokens"] + 7 for chunk in chunks)


@require(AREA)
def a_batch_streams_by_index(server: ServerProcess) -> None:
    """Two prompts stream in one response, a choice an event, under their index."""
    for prompts in (["12+30="] * 2, [IDS] * 2):
        chunks = events(server, COMPLETIONS, prompt=prompts, max_tokens=5)
        assert all(len(chunk["choices"]) == 1 for chunk in chunks)
        found = texts(chunks)
        assert found[0] == found[1]


@require(AREA)
def beams_of_a_batch(server: ServerProcess) -> None:
    """Beam search returns n different answers to a prompt, and the same to an equal prompt."""
    for prompts in (["1+1="] * 2, [IDS] * 2):
        made = complete(server, prompt=prompts, n=2, max_tokens=5, use_beam_search=True)["choices"]
        assert made[0]["text"] != made[1]["text"]
        assert [each["text"] for each in made[:2]] == [each["text"] for each in made[2:]]


@require(AREA)
def echo_has_log_probabilities(server: ServerProcess) -> None:
    """`echo` begins with the prompt's text, of token ids too; its first token has no log-probability."""
    for prompt, top in itertools.product(("12+30=", IDS), (0, 1)):
        choice = complete(server, prompt=prompt, echo=True, logprobs=top, max_tokens=5)["choices"][0]
        text = server.post("/detokenize", {"tokens": IDS}).json()["prompt"] if prompt == IDS else prompt
        assert choice["text"].startswith(text)
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert all(max(top, 1) <= len(each) <= top + 1 for each in found["top_logprobs"][1:])
        assert len({len(each) for each in found.values()}) == 1


@require(AREA)
def every_combination_of_a_completion(server: ServerProcess) -> None:
    """`echo`, `logprobs`, several prompts, `n` and token ids combine in every way, whole."""
    for echo, top, listed, n, ids in itertools.product((False, True), (None, 5), (False, True), (1, 2), (False, True)):
        prompt: Any = IDS if ids else "12+30="
        asked = {"prompt": [prompt, prompt] if listed else prompt, "echo": echo, "logprobs": top, "n": n}
        body = complete(server, **asked, max_tokens=3)
        assert len(body["choices"]) == n * (2 if listed else 1)
        assert body["usage"]["prompt_tokens"] == (5 if ids else 7) * (2 if listed else 1)
        if top:
            assert body["choices"][0]["logprobs"]["top_logprobs"][1]


@require(AREA)
def every_combination_of_a_stream(server: ServerProcess) -> None:
    """They combine in every way in a stream, too, whose texts begin with the prompt where `echo` is set."""
    for echo, top, listed, n in itertools.product((False, True), (None, 5), (False, True), (1, 2)):
        asked = {"prompt": ["12+30=", "12+30="] if listed else "12+30=", "echo": echo, "logprobs": top, "n": n}
        chunks = events(server, COMPLETIONS, **asked, max_tokens=3, stream_options={"include_usage": True})
        found = texts(chunks)
        assert set(found) == set(range(n * (2 if listed else 1)))
        assert all(text == ("12+30=42" if echo else "42") for text in found.values())
        if top:
            assert all(choice["logprobs"]["tokens"] for chunk in chunks for choice in chunk["choices"])


@require(AREA)
def stops_are_named(server: ServerProcess) -> None:
    """`stop_reason` and `matched_stop` name the stop string or token; both are null at max_tokens."""
    assert complete(server, stop=["2"])["choices"][0]["stop_reason"] == "2"
    assert complete(server, stop_token_ids=[27])["choices"][0]["matched_stop"] == 27
    assert complete(server)["choices"][0]["matched_stop"] == 2
    assert complete(server, max_tokens=1)["choices"][0]["matched_stop"] is None


@require(AREA)
def a_truncated_prompt_keeps_a_side(server: ServerProcess) -> None:
    """`truncation_side` says which side of the prompt `truncate_prompt_tokens` keeps: right the first tokens, left the last."""
    for side, kept in (("right", IDS[:4]), ("left", IDS[-4:])):
        asked = {"truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True, "max_tokens": 1}
        assert complete(server, prompt=IDS, **asked)["choices"][0]["prompt_token_ids"] == kept


@require(AREA)
def tokens_without_text(server: ServerProcess) -> None:
    """`detokenize: false` returns `token_ids` and no text, whole and in a stream."""
    made = complete(server, detokenize=False, max_tokens=5, ignore_eos=True)["choices"][0]
    assert made["text"] == "" and len(made["token_ids"]) == 5
    chunks = events(server, COMPLETIONS, prompt="12+30=", detokenize=False, max_tokens=5, ignore_eos=True)
    assert texts(chunks) == {0: ""}
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == made["token_ids"]


@require(AREA)
def the_server_survives_refusals(server: ServerProcess) -> None:
    """After refused requests the server answers as before."""
    assert server.post(COMPLETIONS, FIVE | {"logprobs": 10**6}).status_code == 400
    assert complete(server)["choices"][0]["text"] == "42"


@require(AREA)
def a_salted_prompt_is_not_shared(server: ServerProcess) -> None:
    """Equal prompts share their KV cache with equal `cache_salt`s only."""

    def cached(salt: str) -> int:
        body = complete(server, prompt=[7, 8, 9, 10] * 40, max_tokens=1, cache_salt=salt)
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("peer a") == 0 and cached("peer a") > 0 and cached("peer b") == 0
