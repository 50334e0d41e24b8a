"""`/v1/completions` through the official client."""

from __future__ import annotations

import gzip
import json
from typing import Any

import openai
import pytest

from tests.serving.running import ServerProcess
from torchweave.serving.ipc import messages
from torchweave.serving.openai.protocol import CompletionRequest
from torchweave.serving.openai.sampling_fields import completion_params


def test_completions_answer(server: ServerProcess) -> None:
    answer = server.client().completions.create(model="demo", prompt="12+30=", temperature=0, max_tokens=8)
    assert [choice.text for choice in answer.choices] == ["42"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 3, 10)


def test_the_penalty_of_the_checkpoint_holds_until_another_is_given() -> None:
    card = messages.ModelCard("m", None, "D", "f", "cpu", None, 1, 64, 8, 104, 4, 16, repetition_penalty=1.3)
    for given, penalty in (({}, 1.3), ({"repetition_penalty": 1.0}, 1.0), ({"beam_width": 2}, 1.0)):
        asked = CompletionRequest(model="m", prompt="1+1=", **given)
        assert completion_params(asked, card).repetition_penalty == penalty


def test_completions_take_several_prompts_and_token_ids(server: ServerProcess) -> None:
    client = server.client()
    answer = client.completions.create(model="demo", prompt=["12+30=", "1+1="], n=2, temperature=0)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "42"), (1, "42"), (2, "2"), (3, "2")]


def test_the_best_of_several_answers(server: ServerProcess) -> None:
    client = server.client()
    asked: Any = {"model": "demo", "prompt": "12+30=", "temperature": 3, "seed": 5, "max_tokens": 4, "logprobs": 1}
    drawn = client.completions.create(n=6, **asked).choices

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    best = client.completions.create(n=2, extra_body={"best_of": 6}, **asked)
    assert [choice.text for choice in best.choices] == [c.text for c in sorted(drawn, key=mean, reverse=True)[:2]]
    assert best.usage is not None and best.usage.completion_tokens > sum(mean(c) < 0 for c in best.choices) * 2


def test_as_many_answers_as_the_best_are_chosen_from_can_be_streamed(server: ServerProcess) -> None:
    """`best_of: 1` beside `stream` is what some load generators send."""
    asked: Any = {"model": "demo", "prompt": "12+30=", "temperature": 0, "stream": True}
    for n in (1, 2):
        texts = [""] * n
        for chunk in server.client().completions.create(n=n, extra_body={"best_of": n}, **asked):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == ["42"] * n
    refused = server.post("/v1/completions", asked | {"best_of": 2})
    assert refused.status_code == 400 and "best_of above n cannot be streamed" in refused.text


def test_echo_and_logprobs_of_the_prompt(server: ServerProcess) -> None:
    client = server.client()
    asked: Any = {"model": "demo", "prompt": "12+30=", "temperature": 0, "echo": True, "logprobs": 2}
    choice = client.completions.create(**asked).choices[0]
    assert choice.text == "12+30=42"
    found = choice.logprobs
    assert found is not None and found.token_logprobs is not None and found.tokens is not None
    assert found.tokens == ["<bos>", "1", "2", "+", "3", "0", "=", "4", "2", "<eos>"]
    assert found.token_logprobs[0] is None and all(
        value is not None and value <= 0 for value in found.token_logprobs[1:]
    )
    assert found.text_offset == [0, *range(9)], "the tokens that begin and end are not in the text"
    streamed = [chunk.choices[0] for chunk in client.completions.create(stream=True, **asked) if chunk.choices]
    assert "".join(part.text for part in streamed) == choice.text
    for name in ("tokens", "text_offset"):
        parts = [getattr(part.logprobs, name) for part in streamed if part.logprobs]
        assert [each for part in parts for each in part] == getattr(found, name)

    scored = server.post("/v1/completions", {"prompt": "1+1=", "prompt_logprobs": 1, "max_tokens": 1}).json()[
        "choices"
    ][0]
    first, second = scored["prompt_logprobs"][:2]
    assert first is None and len(scored["prompt_logprobs"]) == 5
    assert {entry["decoded_token"] for entry in second.values()} >= {"1"} and all(
        e["rank"] >= 1 for e in second.values()
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("also", [{}, {"n": 2}, {"stop": ["="]}])
def test_a_prompt_is_scored_alone(server: ServerProcess, stream: bool, also: dict[str, Any]) -> None:
    """As evaluation harnesses ask: `echo` without an answer, which would end at once behind the second prompt."""
    scores = {} if "n" in also else {"logprobs": 1}
    asked: dict[str, Any] = {
        "prompt": ["12+30=", "12+30=42"],
        "temperature": 0,
        "echo": True,
        "max_tokens": 0,
        **scores,
    }
    answer = server.post("/v1/completions", asked | also | {"stream": stream})
    assert answer.status_code == 200, answer.text
    bodies = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [each for body in bodies or [answer.json()] for each in body["choices"]]
    texts = [text for text in asked["prompt"] for _ in range(also.get("n", 1))]
    assert [each["text"] for each in sorted(choices, key=lambda each: each["index"])] == texts
    assert {each["finish_reason"] for each in choices} == {"length"}
    if not stream:
        usage = answer.json()["usage"]
        assert usage.pop("prompt_tokens_details") == {"cached_tokens": 0}  # scored prompts are read whole
        assert usage == {"prompt_tokens": 7 + 9, "completion_tokens": 0, "total_tokens": 7 + 9}
    if scores:
        longer = asked | {"max_tokens": 1, "prompt": asked["prompt"][:1]}
        expected = server.post("/v1/completions", longer).json()["choices"][0]["logprobs"]
        found = next(each for each in choices if each["index"] == 0)["logprobs"]
        assert found["tokens"] == expected["tokens"][:-1] and len(found["tokens"]) == 7
        assert found["text_offset"] == expected["text_offset"][:-1]
        # Rounding depends on the number of tokens in a step, and here two prompts share one.
        assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"][:-1], abs=1e-4)
        for got, wanted in zip(found["top_logprobs"][1:], expected["top_logprobs"][1:-1], strict=True):
            assert got == pytest.approx(wanted, abs=1e-4)


def test_tokens_of_a_stream_stand_where_they_do_in_the_whole_answer(server: ServerProcess) -> None:
    """Text that may begin a stop string is sent later than its tokens, and is counted."""
    client = server.client()
    asked: Any = {"model": "demo", "prompt": ["1+1=", "12+30="], "temperature": 0, "logprobs": 1, "echo": True}
    asked["stop"] = "a long stop string"
    whole = client.completions.create(**asked).choices
    offsets: list[list[int]] = [[], []]
    for chunk in client.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            offsets[choice.index] += (choice.logprobs and choice.logprobs.text_offset) or []
    assert offsets == [choice.logprobs.text_offset for choice in whole if choice.logprobs]


def test_a_beam_search_has_several_answers(server: ServerProcess) -> None:
    client = server.client()
    asked: Any = {"model": "demo", "prompt": "12+30=", "max_tokens": 4}
    found = client.completions.create(n=2, extra_body={"beam_width": 4}, **asked).choices
    assert [choice.index for choice in found] == [0, 1] and found[0].text == "42" != found[1].text
    vllms = client.completions.create(n=2, extra_body={"use_beam_search": True}, **asked).choices
    assert vllms[0].text == "42"
    with pytest.raises(openai.BadRequestError, match="cannot be streamed; set stream=false"):
        client.completions.create(stream=True, extra_body={"beam_width": 4}, **asked)


def test_a_search_of_one_beam_draws_nothing() -> None:
    card = messages.ModelCard(
        "m", None, "D", "f", "cpu", None, 1, 64, 8, 104, 4, 16, repetition_penalty=1.3, temperature=0.6
    )
    params = completion_params(CompletionRequest(prompt="1+1=", use_beam_search=True), card)
    assert (params.beam_width, params.temperature, params.repetition_penalty) == (1, 0.0, 1.0)


@pytest.mark.parametrize("how", [{"beam_width": 4}, {"use_beam_search": True}], ids=str)
def test_the_best_of_a_beam_search_are_those_with_the_best_scores(server: ServerProcess, how: dict[str, Any]) -> None:
    """Which, without a penalty of the length, are not those with the best mean."""
    asked = {"prompt": "1+1=", "max_tokens": 12, "length_penalty": 0}
    every = server.post("/v1/completions", asked | {"beam_width": 4, "n": 4}).json()["choices"]
    best = server.post("/v1/completions", asked | how | {"n": 2, "best_of": 4}).json()["choices"]
    assert [each["text"] for each in best] == [each["text"] for each in every[:2]]


def test_a_search_is_as_wide_as_the_answers_that_it_is_the_best_of(server: ServerProcess) -> None:
    answer = server.post("/v1/completions", {"prompt": "1+1=", "beam_width": 3, "n": 2, "best_of": 4})
    assert answer.status_code == 400 and "beam_width=3 must be at least best_of=4" in answer.text


def test_no_number_ends_the_engine(server: ServerProcess) -> None:
    engine, asked = server.engine_pid(), {"prompt": "12+30=", "max_tokens": 4}
    refused: list[dict[str, Any]] = [
        {"temperature": 1e39},
        {"repetition_penalty": 1e300},
        {"stop_token_ids": [2**31]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [104]},
        {"length_penalty": 2000, "beam_width": 3},
    ]
    for fields in refused:
        answer = server.post("/v1/completions", asked | fields)
        assert answer.status_code == 400 and next(iter(fields)) in answer.json()["error"]["message"], answer.text
    large = {"min_tokens": 2**40, "max_tokens": 2**41, "top_k": 2**63}
    answer = server.post("/v1/completions", asked | large | {"prompt": "1" * 450})
    assert answer.status_code == 200 and answer.json()["usage"]["total_tokens"] == 512
    assert server.engine_pid() == engine


def test_null_is_not_given_and_a_weight_is_a_number(server: ServerProcess) -> None:
    asked = {"prompt": "12+30=", "max_tokens": 4, "temperature": 0}
    nothing = dict.fromkeys(("priority", "add_special_tokens", "suffix", "reasoning_effort", "logit_bias", "stop"))
    answer = server.post(
        "/v1/completions", asked | nothing | {"stream_options": {"include_usage": None}, "stream": None}
    )
    assert answer.status_code == 400 and "stream_options" in answer.text, "there is no stream"
    answer = server.post("/v1/completions", asked | nothing)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "42"
    for bias in ({"5": "x"}, {"5": True}, {"5": None}, {"1_0": 1}, {" 5": 1}, [5], {"9" * 5000: 1}, {"5": 10**400}):
        answer = server.post("/v1/completions", asked | {"logit_bias": bias})
        assert answer.status_code == 400 and "expected token ids with numbers" in answer.text, answer.text


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        (
            gzip.compress(b'{"prompt": "a"}'),
            {"Content-Encoding": "gzip"},
            415,
            "Content-Encoding 'gzip' is not supported",
        ),
        (b'{"prompt": "a", "max_tokens": 1}', {"Content-Encoding": "identity"}, 200, "text_completion"),
        ('{"prompt": "é"}'.encode("latin-1"), {}, 400, "not valid UTF-8 (at byte 12)"),
        (b'{"prompt": ' + b"[" * 100_000, {}, 400, "nested too deeply"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", {}, 400, "a number with thousands of digits"),
    ],
    ids=["gzip", "identity", "latin-1", "deep", "digits"],
)
def test_bodies_that_cannot_be_read_say_why(
    server: ServerProcess, body: bytes, headers: dict[str, str], status: int, said: str
) -> None:
    headers = {"Content-Type": "application/json"} | headers
    answer = server.request("POST", "/v1/completions", content=body, headers=headers)
    assert answer.status_code == status and said in answer.text, answer.text


def test_bad_requests_are_one_sentence(server: ServerProcess) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match=r"temperature must be 0 \(greedy\) or a positive number"):
        client.completions.create(model="demo", prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="did you mean top_k"):
        client.completions.create(model="demo", prompt="a", extra_body={"topk": 3})
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here; use 'demo' or 'sums'"):
        client.completions.create(model="gpt-9", prompt="a")
    for prompt in ("a" * 600, ["a", "a" * 511]):  # and one token in front
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as too_long:
            client.completions.create(model="demo", prompt=prompt)
        assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="at most 256 to one request"):
        client.completions.create(model="demo", prompt=["a"] * 100, n=3)
    with pytest.raises(openai.BadRequestError, match=r"outside 0\.\.103"):
        client.completions.create(model="demo", prompt=[104])
    with pytest.raises(openai.BadRequestError, match="The prompt is empty; give at least one token"):
        client.completions.create(model="demo", prompt="", extra_body={"add_special_tokens": False})


def test_vllms_fields_of_requests_and_answers(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "12+30="}]
    fields = {"temperature": 0, "stop": ["2"], "return_token_ids": True, "request_id": "mine"}
    for path, asked, prefix in (
        ("/v1/completions", {"prompt": "<|user|>12+30=<|end|><|assistant|>"}, "cmpl-"),
        ("/v1/chat/completions", {"messages": messages, "modalities": ["text"], "best_of": 1}, "chatcmpl-"),
    ):
        prompt = server.post("/tokenize", {"messages": messages} if "messages" in asked else asked).json()["tokens"]
        answer = server.post(path, asked | fields).json()
        choice = answer["choices"][0]
        assert answer["id"] == prefix + "mine" and choice["stop_reason"] == "2" and len(choice["token_ids"]) == 2
        assert choice.get("prompt_token_ids", answer.get("prompt_token_ids")) == prompt
        text = server.post(path, asked | fields | {"stream": True}).text
        chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
        ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
        assert ids == choice["token_ids"] and chunks[-1]["choices"][0]["stop_reason"] == "2"
        assert chunks[0]["choices"][0].get("prompt_token_ids", chunks[0].get("prompt_token_ids")) == prompt
        ended = server.post(path, asked | {"temperature": 0, "stop_token_ids": choice["token_ids"][1:]}).json()
        assert ended["choices"][0]["stop_reason"] == choice["token_ids"][1]
        cut = server.post(path, asked | {"truncate_prompt_tokens": 3, "return_token_ids": True, "max_tokens": 2}).json()
        assert cut["usage"]["prompt_tokens"] == 3
        assert cut["choices"][0].get("prompt_token_ids", cut.get("prompt_token_ids")) == prompt[-3:]
    assert server.post("/v1/completions", {"prompt": "1+1=", "regex": "7"}).json()["choices"][0]["text"] == "7"
    long = {"prompt": [5] * 600, "truncate_prompt_tokens": -1, "max_tokens": 12}
    assert server.post("/v1/completions", long).json()["usage"]["prompt_tokens"] == 500
    assert server.get("/load").json() == {"server_load": 0}


def test_a_repeated_prompt_counts_its_cached_tokens(server: ServerProcess) -> None:
    asked = {"prompt": [7, 8, 9, 10] * 40, "max_tokens": 1, "cache_salt": "counted"}
    cached = [
        server.post("/v1/completions", asked).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached[0] == 0 < cached[1] < 160


def test_errors_name_the_field_and_the_nearest_path(server: ServerProcess) -> None:
    error = server.post("/v1/completions", {"prompt": "1", "top_p": 7}).json()["error"]
    assert error["param"] == "top_p"
    error = server.post("/v1/chat/completion", {}).json()["error"]
    assert error["message"] == "POST /v1/chat/completion: this path does not exist; did you mean /v1/chat/completions?"
    error = server.post("/generate", {}).json()["error"]  # SGLang's path; /health_generate takes GET
    assert error["message"] == "POST /generate: this path does not exist; see /docs for the available ones."
