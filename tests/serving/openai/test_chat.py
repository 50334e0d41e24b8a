"""`/v1/chat/completions`, `/v1/models`, `/tokenize` and `/detokenize`, as the official client sees them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.serving.running import LONG, ServerProcess

SUM: Any = [{"role": "user", "content": "12+30="}]


def test_chat_answers(server: ServerProcess) -> None:
    answer = server.client().chat.completions.create(model="sums", messages=SUM, temperature=0)
    assert answer.choices[0].message.content == "42"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "sums"
    assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_chat_streams_what_it_answers_whole(server: ServerProcess) -> None:
    stream = server.client().chat.completions.create(
        model="demo", messages=SUM, temperature=0, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "42", 1: "42"}
    assert [choice.finish_reason for chunk in chunks[:-1] for choice in chunk.choices if choice.finish_reason] == [
        "stop"
    ] * 2
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (10, 6)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_counts_as_it_goes(server: ServerProcess, path: str) -> None:
    asked = {"prompt": "12+30="} if path == "/v1/completions" else {"messages": SUM}
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = server.post(path, asked | {"temperature": 0, "stream": True, "stream_options": options}).text
    chunks = [json.loads(line[len("data: ") :]) for line in text.split("\n\n")[:-2]]
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert len(told) > 1 and told == sorted(told) and told[0] > 0 and told[-1] == 3
    assert chunks[-1]["choices"] == [] and all(chunk["choices"] for chunk in chunks[:-1])
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}


def test_parts_of_text_are_one_message(server: ServerProcess) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "12+"}, {"type": "text", "text": "30="}]}]
    ids = server.post("/tokenize", {"messages": parts}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == "<bos><|user|>12+\n30=<|end|><|assistant|>"
    refusal = [*SUM, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, *SUM]
    ids = server.post("/tokenize", {"messages": refusal}).json()["tokens"]
    assert "No.<|end|>" in server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    audio: Any = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA"}}]}]
    with pytest.raises(openai.BadRequestError, match=r"only text parts are supported.*input_audio"):
        server.client().chat.completions.create(model="demo", messages=audio)


def test_reasoning_effort_reaches_a_template_that_knows_it(server: ServerProcess) -> None:
    chat = {"messages": SUM, "reasoning_effort": "low"}
    ids = server.post("/tokenize", chat).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"].endswith("<|end|>low<|assistant|>")
    answer = server.client().chat.completions.create(model="demo", messages=SUM, reasoning_effort="low", max_tokens=1)
    assert answer.usage and answer.usage.prompt_tokens == len(ids)


def test_logprobs_have_openais_form(server: ServerProcess) -> None:
    answer = server.client().chat.completions.create(
        model="demo", messages=SUM, temperature=0, logprobs=True, top_logprobs=2, stop=["2"]
    )
    assert answer.choices[0].message.content == "4"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["4", "2"]
    first = logprobs.content[0]
    assert first.bytes == [52] and first.top_logprobs[0].token == "4" and len(first.top_logprobs) == 2
    assert first.logprob == first.top_logprobs[0].logprob


def test_sampling_fields_reach_the_engine(server: ServerProcess) -> None:
    client = server.client()

    def texts(**fields: Any) -> list[str | None]:
        asked = {"model": "demo", "messages": SUM, "temperature": 1.5, "max_tokens": 20} | fields
        return [choice.message.content for choice in client.chat.completions.create(**asked).choices]

    hot = {"temperature": 5.0, "extra_body": {"ignore_eos": True}}
    assert texts(seed=3, **hot) == texts(seed=3, **hot) != texts(seed=4, **hot)
    first, second = texts(seed=3, n=2, **hot)
    assert first != second
    assert texts(extra_body={"top_k": 1}) == ["42"]
    assert texts(extra_body={"top_k": 1, "min_tokens": 12})[0] != "42"
    assert texts(temperature=0, max_completion_tokens=1) == ["4"]
    assert texts(extra_body={"top_k": 1, "ignore_eos": True, "stop_token_ids": [27]}) == ["4"]


def test_models_are_listed_under_each_name(server: ServerProcess) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["demo", "sums"]
    assert client.models.retrieve("sums").owned_by == "torchweave"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_head_is_get_without_the_body(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as client:  # one connection: nothing may be left in it
        for path, status in (("/health", 200), ("/v1/models", 200), ("/", 200), ("/v1/completions", 405), ("/no", 404)):
            head, get = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (status, b"") and get.status_code == status
            assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.content))


def test_a_request_has_a_name_which_is_the_clients_where_it_gave_one(server: ServerProcess) -> None:
    asked = {"messages": SUM, "temperature": 0}
    for path, body, prefix in (("chat/completions", asked, "chatcmpl-"), ("completions", {"prompt": "1+1="}, "cmpl-")):
        for stream in (False, True):
            for given, taken in (("trace-7/a", True), ("two words", False), ("a" * 129, False)):
                answer = server.post(f"/v1/{path}", {**body, "stream": stream}, headers={"X-Request-Id": given})
                name = answer.headers.get_list("x-request-id")
                assert len(name) == 1 and (name[0] == given) == taken
                assert f'"id":"{prefix}{name[0]}"' in answer.text
    refused = server.post("/v1/completions", {"prompt": 3})
    assert refused.status_code == 400 and len(refused.headers["x-request-id"]) == 32
    assert server.get("/health").headers["x-request-id"] != server.get("/health").headers["x-request-id"]


def test_a_slash_behind_an_address_makes_no_other_of_it(server: ServerProcess) -> None:
    assert server.get("/v1/models/").json() == server.get("/v1/models").json()
    body = {"messages": SUM, "temperature": 0}
    answer = server.post("/v1/chat/completions/", body, follow_redirects=True)
    assert answer.json()["choices"][0]["message"]["content"] == "42"


def test_tokenize_and_detokenize(server: ServerProcess) -> None:
    found = server.post("/tokenize", {"prompt": "1+1=", "return_token_strs": True}).json()
    assert (
        found["count"] == 5 and found["token_strs"] == ["<bos>", "1", "+", "1", "="] and found["max_model_len"] == 512
    )
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "<bos>1+1="}
    assert "outside 0..103" in server.post("/detokenize", {"tokens": [104]}).json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": "hot"}, "temperature: Input should be a valid number"),
        ({"n": 0}, "n must be from 1 to 16384"),
        ({"n": 999}, "at most 256"),
        ({"max_tokens": -3}, "max_tokens must be at least 1"),
        ({"top_logprobs": 3}, "top_logprobs requires logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options requires stream"),
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a part of type 'text' without a text"),
        ({"tool_choice": "sometimes"}, "expected none, auto, required"),
        ({"tool_choice": "required"}, "tools is empty"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"chat_template_kwargs": {"tokenize": False}}, "must not contain tokenize"),
        ({"logit_bias": {"a": 1}}, "token ids with numbers"),
        ({"seed": 2**70}, "seed"),
        ({"max_token": 3}, "did you mean max_tokens?"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_fields_are_one_sentence(server: ServerProcess, fields: dict[str, Any], said: str) -> None:
    answer = server.post("/v1/chat/completions", {"model": "demo", "messages": SUM} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"] and error["type"] == "invalid_request_error"


def test_closing_a_stream_cancels_the_request(server: ServerProcess) -> None:
    client = server.client()
    with client.completions.create(model="demo", prompt="1+1=", stream=True, **LONG) as stream:
        next(iter(stream))
    assert server.client().completions.create(model="demo", prompt="2+2=", temperature=0).choices[0].text == "4"


def test_arguments_that_are_no_json_are_text_to_the_template(server: ServerProcess) -> None:
    for arguments in ("{", '{"a":' * 5000 + "1" + "}" * 5000):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "content": "1+1=", "tool_calls": [call]}]
        answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
