"""What peers' tests require of `/v1/chat/completions`."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.serving.peers.requirement import CHAT, SUM, Json, chat, events, require, require_all, texts
from tests.serving.running import ServerProcess

AREA = "chat"
TEN: Any = {"messages": SUM, "max_completion_tokens": 10, "temperature": 0}
TURNS: Any = [*SUM, {"role": "assistant", "content": "42"}, {"role": "user", "content": "1+1="}]
INTEGER: Any = {"type": "object", "properties": {"result": {"type": "integer", "maximum": 99}}, "required": ["result"]}


def _message(body: Json) -> Json:
    return body["choices"][0]["message"]


require_all(
    AREA,
    CHAT,
    [
        ("The message is the assistant's, with text.", TEN, lambda body: _message(body)["role"] == "assistant"),
        (
            "`max_tokens` means the same as `max_completion_tokens`.",
            {"messages": SUM, "max_tokens": 1},
            lambda body: body["usage"]["completion_tokens"] == 1,
        ),
        (
            "Without a limit an answer ends by itself.",
            {"messages": SUM},
            lambda body: body["choices"][0]["finish_reason"] == "stop",
        ),
        (
            "`logprobs: false` returns none.",
            TEN | {"logprobs": False},
            lambda body: body["choices"][0]["logprobs"] is None,
        ),
        (
            "`top_logprobs: 0` returns the sampled tokens alone.",
            TEN | {"logprobs": True, "top_logprobs": 0},
            lambda body: body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == [],
        ),
        (
            "`top_logprobs: 5` returns five tokens.",
            TEN | {"logprobs": True, "top_logprobs": 5},
            lambda body: len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 5,
        ),
        ("`top_logprobs` without `logprobs` is refused.", TEN | {"top_logprobs": 5}, 400),
        ("More log-probabilities than the limit are refused.", TEN | {"logprobs": True, "top_logprobs": 101}, 400),
        (
            "They are refused before a stream begins, too.",
            TEN | {"logprobs": True, "top_logprobs": 101, "stream": True},
            400,
        ),
        (
            "`prompt_logprobs: -1` is refused where the vocabulary is above the limit.",
            TEN | {"prompt_logprobs": -1},
            400,
        ),
        (
            "`prompt_logprobs` are of the rendered prompt.",
            TEN | {"prompt_logprobs": 0},
            lambda body: len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"],
        ),
        ("Without `prompt_logprobs` there are none.", TEN, lambda body: body.get("prompt_logprobs") is None),
        (
            "A conversation of several turns is answered.",
            TEN | {"messages": TURNS},
            lambda body: bool(_message(body)["content"]),
        ),
        ("`stream_options` without a stream is refused.", TEN | {"stream_options": {"include_usage": True}}, 400),
        (
            "`stream_options` of null values without a stream is refused.",
            TEN | {"stream_options": {"include_usage": None}},
            400,
        ),
        (
            "One of the choices of structured_outputs is the answer.",
            TEN | {"temperature": 0.7, "structured_outputs": {"choice": ["Rust", "Ada"]}},
            lambda body: _message(body)["content"] in ("Rust", "Ada"),
        ),
        (
            "Log-probabilities beside a constraint are finite.",
            TEN | {"logprobs": True, "top_logprobs": 5, "structured_outputs": {"choice": ["Rust", "Ada"]}},
            lambda body: all(
                each["logprob"] >= -9999 for each in body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            ),
        ),
        (
            "An answer matches a regular expression.",
            TEN | {"structured_outputs": {"regex": r"\d{1,3}(\.\d{1,3}){3}"}, "max_completion_tokens": 20},
            lambda body: bool(re.fullmatch(r"\d{1,3}(\.\d{1,3}){3}", _message(body)["content"])),
        ),
        (
            "SGLang's `regex` is a constraint, too.",
            TEN | {"regex": r"\{ 12\}"},
            lambda body: _message(body)["content"] == "{ 12}",
        ),
        ("A constraint of the wrong type is refused.", TEN | {"structured_outputs": {"regex": {"1": "a"}}}, 400),
        (
            "A forced format of text changes nothing.",
            TEN | {"response_format": {"type": "text"}},
            lambda body: _message(body)["content"] == "42",
        ),
        (
            "`json_object` answers with an object.",
            TEN | {"response_format": {"type": "json_object"}, "max_completion_tokens": 8},
            lambda body: _message(body)["content"].lstrip().startswith("{"),
        ),
        (
            "`json_schema` answers with an object of the schema.",
            TEN
            | {
                "max_completion_tokens": 100,
                "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": INTEGER}},
            },
            lambda body: isinstance(json.loads(_message(body)["content"])["result"], int),
        ),
        ("`json_schema` without a schema is refused.", TEN | {"response_format": {"type": "json_schema"}}, 400),
        ("An unknown response_format is refused.", TEN | {"response_format": {"type": "xml"}}, 400),
        ("An extra field of a message is taken.", TEN | {"messages": [SUM[0] | {"extra_field": "0"}]}, 200),
        (
            "Content may be a list of text parts.",
            TEN | {"messages": [{"role": "user", "content": [{"type": "text", "text": "12+30="}]}]},
            lambda body: _message(body)["content"] == "42",
        ),
        (
            "A part of an unknown type is refused.",
            TEN | {"messages": [{"role": "user", "content": [{"type": "smell", "text": "a"}]}]},
            400,
        ),
        (
            "A role of the client's own is rendered.",
            TEN | {"messages": [{"role": "my-own-role", "content": "12+30="}]},
            200,
        ),
        ("A seed that no 64 bits hold is refused.", TEN | {"seed": 2**64}, 400),
        ("A negative seed below 64 bits is refused.", TEN | {"seed": -(2**63) - 1}, 400),
        ("No messages are refused.", {"messages": []}, 400),
        ("A message without a role is refused.", {"messages": [{"content": "a"}]}, 400),
        ("A key of logit_bias outside the vocabulary is refused.", TEN | {"logit_bias": {"104": 1.0}}, 400),
        ("Keys of logit_bias that are no ids are refused.", TEN | {"logit_bias": {"word": 1.0}}, 400),
        ("A bias on a token of the vocabulary is taken.", TEN | {"logit_bias": {"20": 1.0}}, 200),
        ("An id of stop_token_ids outside the vocabulary is refused.", TEN | {"stop_token_ids": [104]}, 400),
        ("An unknown model is not found.", TEN | {"model": "nobody"}, 404),
        ("A temperature below 0 is refused.", TEN | {"temperature": -1}, 400),
        ("A top_p above 1 is refused.", TEN | {"top_p": 1.5}, 400),
        ("`n` of 0 is refused.", TEN | {"n": 0}, 400),
        ("A presence penalty beyond 2 is refused.", TEN | {"presence_penalty": 3}, 400),
        ("A max_tokens below 1 is refused.", TEN | {"max_completion_tokens": 0}, 400),
        ("`frequency_penalty` is taken.", TEN | {"frequency_penalty": 1.0}, 200),
        ("A prompt above the context length is refused.", {"messages": [{"role": "user", "content": "a" * 600}]}, 400),
        (
            "`continue_final_message` with a generation prompt is refused.",
            TEN | {"messages": TURNS[:2], "continue_final_message": True, "add_generation_prompt": True},
            400,
        ),
        ("`reasoning_effort` is passed to a template that reads it.", TEN | {"reasoning_effort": "low"}, 200),
        ("`chat_template` of a request needs the server's consent.", TEN | {"chat_template": "{{ messages }}"}, 400),
        (
            "`chat_template_kwargs` cannot set the tokenizer's own arguments.",
            TEN | {"chat_template_kwargs": {"tokenize": True}},
            400,
        ),
        (
            "`chat_template_kwargs` of the template's variables are taken.",
            TEN | {"chat_template_kwargs": {"enable_thinking": False}},
            200,
        ),
        (
            "Audio is refused by a text model.",
            TEN
            | {
                "messages": [
                    {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}
                ]
            },
            400,
        ),
        (
            "An image is refused by a text model.",
            TEN
            | {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
                    }
                ]
            },
            400,
        ),
        ("`modalities` of text alone are taken.", TEN | {"modalities": ["text"]}, 200),
        ("`include_reasoning` is taken.", TEN | {"include_reasoning": False}, 200),
        ("`metadata` and `user` are taken.", TEN | {"metadata": {"a": "b"}, "user": "someone"}, 200),
        (
            "A last message of the assistant is continued.",
            TEN
            | {
                "messages": [*SUM, {"role": "assistant", "content": "4"}],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
            200,
        ),
    ],
)


@require(AREA)
def a_stream_equals_the_whole_answer(server: ServerProcess) -> None:
    """The first event has the role; the texts make up the whole answer; one event, the last, has the finish reason."""
    whole = chat(server, max_completion_tokens=10)["choices"][0]
    chunks = events(server, CHAT, **TEN)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert texts(chunks) == {0: whole["message"]["content"]}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == whole["finish_reason"] and set(reasons[:-1]) == {None}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1


@require(AREA)
def a_stream_has_log_probabilities(server: ServerProcess) -> None:
    """The log-probabilities of a stream are those of the whole answer."""
    asked = {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 10}
    whole = chat(server, **asked)["choices"][0]["logprobs"]["content"]
    chunks = events(server, CHAT, messages=SUM, **asked)
    parts = [each for chunk in chunks for each in (chunk["choices"][0].get("logprobs") or {}).get("content", [])]
    assert [each["token"] for each in parts] == [each["token"] for each in whole]
    assert all(
        abs(a["logprob"] - b["logprob"]) < 1e-3 and a["bytes"] is not None for a, b in zip(parts, whole, strict=True)
    )


@require(AREA)
def usage_of_a_stream(server: ServerProcess) -> None:
    """Usage comes in the last event with `include_usage`, in each with `continuous_usage_stats`, else in none."""
    last = events(server, CHAT, **TEN, stream_options={"include_usage": True, "continuous_usage_stats": False})
    assert not any(chunk.get("usage") for chunk in last[:-1]) and last[-1]["choices"] == [] and last[-1]["usage"]
    none = events(server, CHAT, **TEN, stream_options={"include_usage": False, "continuous_usage_stats": True})
    assert not any(chunk.get("usage") for chunk in none)
    options = {"include_usage": True, "continuous_usage_stats": True}
    each = events(server, CHAT, **TEN, min_tokens=10, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in each]
    assert counts == sorted(counts) and counts[-1] == 10
    assert all(chunk["usage"]["total_tokens"] == 10 + chunk["usage"]["completion_tokens"] for chunk in each)


@require(AREA)
def several_answers(server: ServerProcess) -> None:
    """`n` answers have their index and differ at a temperature, whole and streamed, and a seed repeats them."""
    asked = {
        "messages": [{"role": "user", "content": "sort: "}],
        "n": 3,
        "temperature": 3.0,
        "seed": 7,
        "max_tokens": 20,
    }
    made = [choice["message"]["content"] for choice in chat(server, **asked)["choices"]]
    assert len(made) == 3 and len(set(made)) > 1
    assert texts(events(server, CHAT, **asked)) == dict(enumerate(made))
    one = chat(server, n=1)["choices"]
    assert len(one) == 1 and one[0]["index"] == 0


@require(AREA)
def log_probabilities_of_prompts_grow(server: ServerProcess) -> None:
    """`prompt_logprobs: 2` has one token more at each place than 1 at the most."""
    one, two = (chat(server, messages=TURNS, prompt_logprobs=top)["prompt_logprobs"] for top in (1, 2))
    assert all(1 <= len(a) <= len(b) <= len(a) + 1 for a, b in zip(one[1:], two[1:], strict=True))
    assert len(two[3]) >= 2


@require(AREA)
def beams_of_a_chat(server: ServerProcess) -> None:
    """Beam search returns `n` different answers."""
    made = chat(server, n=2, max_completion_tokens=10, use_beam_search=True)["choices"]
    assert made[0]["message"]["content"] != made[1]["message"]["content"]


@require(AREA)
def stops_are_named(server: ServerProcess) -> None:
    """`stop_reason` is the stop string or token of the request, null at the model's own end; the text ends before it."""
    choice = chat(server, stop="2")["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["message"]["content"]) == ("stop", "2", "4")
    choice = chat(server, stop_token_ids=[27])["choices"][0]
    assert (choice["stop_reason"], choice["matched_stop"]) == (27, 27)
    choice = chat(server)["choices"][0]
    assert (choice["stop_reason"], choice["matched_stop"]) == (None, 2)
    assert chat(server, stop="2", include_stop_str_in_output=True)["choices"][0]["message"]["content"] == "42"


@require(AREA)
def bodies_are_objects(server: ServerProcess) -> None:
    """A body that is no JSON object is refused with status 400 at every route."""
    for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"):
        for body in ([], "text", 5, None):
            assert server.post(path, body).status_code == 400, (path, body)


@require(AREA)
def echo_is_of_the_assistant(server: ServerProcess) -> None:
    """`echo` repeats a last message of the assistant, never the user's."""
    messages = [*SUM, {"role": "assistant", "content": "4"}]
    asked: Any = {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "max_completion_tokens": 3,
        "echo": True,
    }
    assert chat(server, messages=messages, **asked)["choices"][0]["message"]["content"].startswith("4")
    assert chat(server, echo=True)["choices"][0]["message"]["content"] == "42"


@require(AREA)
def models_are_listed(server: ServerProcess) -> None:
    """Models are listed with their context length and retrieved by name; an unknown name is not found."""
    listed = server.get("/v1/models").json()["data"]
    assert listed[0]["id"] == "demo" and isinstance(listed[0]["max_model_len"], int)
    assert server.get("/v1/models/demo").json()["id"] == "demo"
    assert server.get("/v1/models/nobody").status_code == 404


@require(AREA)
def status_routes_answer(server: ServerProcess) -> None:
    """`/health`, `/version`, `/load`, `/metrics` and `/openapi.json` answer."""
    for path in ("/health", "/version", "/load", "/metrics", "/openapi.json"):
        assert server.get(path).status_code == 200, path


@require(AREA)
def generation_can_be_probed(server: ServerProcess) -> None:
    """`/health_generate` answers with status 200 once a token was generated."""
    assert server.get("/health_generate").status_code == 200


@require(AREA)
def request_ids_are_returned(server: ServerProcess) -> None:
    """The header `x-request-id` and `request_id` of a body are part of the answer's id."""
    answer = server.post(CHAT, TEN, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and "mine-1" in answer.json()["id"]
    assert "mine-2" in chat(server, request_id="mine-2")["id"]


@require(AREA)
def conversations_are_batched(server: ServerProcess) -> None:
    """`/v1/chat/completions/batch` answers a list of conversations with a choice for each."""
    body = {"messages": [SUM, TURNS], "temperature": 0}
    answer = server.post(f"{CHAT}/batch", body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [(each["index"], each["message"]["content"]) for each in choices] == [
        (0, "42"),
        (1, chat(server, messages=TURNS)["choices"][0]["message"]["content"]),
    ]


@require(AREA)
def batched_conversations_take_fields(server: ServerProcess) -> None:
    """A batch takes response_format, log-probabilities and token ids as one conversation does."""
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": INTEGER}}
    body = {"messages": [SUM, SUM], "response_format": form, "max_tokens": 60, "temperature": 0}
    for choice in server.post(f"{CHAT}/batch", body).json()["choices"]:
        assert isinstance(json.loads(choice["message"]["content"])["result"], int)
    body = {"messages": [SUM], "logprobs": True, "top_logprobs": 1, "return_token_ids": True, "temperature": 0}
    choice = server.post(f"{CHAT}/batch", body).json()["choices"][0]
    assert [each["token"] for each in choice["logprobs"]["content"]][:2] == ["4", "2"] and len(choice["token_ids"]) == 3
    choice = server.post(f"{CHAT}/batch", body | {"return_tokens_as_token_ids": True}).json()["choices"][0]
    assert choice["logprobs"]["content"][0]["token"].startswith("token_id:")


@require(AREA, "log-probabilities are of the sampled and the most likely tokens; the engine does not gather others")
def log_probabilities_of_listed_tokens(server: ServerProcess) -> None:
    """`logprob_token_ids` returns the log-probabilities of these tokens."""
    asked = {"logprobs": True, "top_logprobs": 2, "logprob_token_ids": [50, 60], "return_tokens_as_token_ids": True}
    found = chat(server, **asked)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert {"token_id:50", "token_id:60"} <= {each["token"] for each in found}


@require(AREA)
def reasoning_has_a_budget(server: ServerProcess) -> None:
    """`thinking_token_budget` is taken."""
    chat(server, thinking_token_budget=10)


@require(AREA, "the built-in model of this check writes an integer without an end; other schemas hold")
def a_tagged_part_has_a_schema(server: ServerProcess) -> None:
    """`response_format` of type structural_tag constrains what follows a trigger, and leaves text before it free."""
    tag = {"begin": "<sum>", "schema": INTEGER, "end": "</sum>"}
    form = {"type": "structural_tag", "structures": [tag], "triggers": ["<sum>"]}
    messages = [{"role": "user", "content": "copy: <sum>"}]
    text = chat(server, messages=messages, response_format=form, max_tokens=80)["choices"][0]["message"]["content"]
    parts = re.findall(r"<sum>(.*?)</sum>", text)
    assert parts and all(isinstance(json.loads(part)["result"], int) for part in parts), text


@require(AREA, "the server returns no hidden states")
def hidden_states_are_returned(server: ServerProcess) -> None:
    """`return_hidden_states` returns the last layer's states."""
    assert chat(server, return_hidden_states=True)["choices"][0]["hidden_states"]


@require(AREA)
def invalid_json_mode_is_refused(server: ServerProcess) -> None:
    """A constraint beside a conflicting `response_format` is refused with the names of both."""
    answer = server.post(CHAT, TEN | {"regex": "a", "response_format": {"type": "json_object"}})
    assert answer.status_code == 400 and "regex and response_format conflict" in answer.json()["error"]["message"]
