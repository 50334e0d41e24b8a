"""Fields and routes of vLLM and SGLang that clients written for them use."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.running import ServerProcess

SUM: Any = [{"role": "user", "content": "12+30="}]
LONG: Any = {"prompt": "copy: abc def", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


def test_tokens_of_logprobs_are_ids_where_asked(server: ServerProcess) -> None:
    asked = {"temperature": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = server.post("/v1/completions", {"prompt": "12+30=", "logprobs": 1, **asked}).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert set(choice["logprobs"]["top_logprobs"][0]) == {f"token_id:{choice['token_ids'][0]}"}
    assert choice["logprobs"]["text_offset"][:2] == [0, 1]
    chat = {"messages": SUM, "logprobs": True, "top_logprobs": 1, **asked}
    choice = server.post("/v1/chat/completions", chat).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert content[0]["bytes"] == list(content[0]["token"].encode())


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/chat/completions", {"messages": SUM, "logprobs": True}, "top_logprobs"),
        ("/v1/responses", {"input": "12+30="}, "top_logprobs"),
        ("/v1/completions", {"prompt": "12+30="}, "logprobs"),
    ],
)
@pytest.mark.parametrize("count", [-5, 101])
def test_a_bad_number_of_logprobs_is_told_by_the_field_that_was_sent(
    server: ServerProcess, path: str, fields: dict[str, Any], name: str, count: int
) -> None:
    error = server.post(path, fields | {name: count}).json()["error"]
    assert (
        error["param"] == name and error["message"].startswith(f"{name} must be at ") and str(count) in error["message"]
    )


def test_echo_puts_the_assistants_last_message_first(server: ServerProcess) -> None:
    messages = [*SUM, {"role": "assistant", "content": "4"}]
    asked = {"messages": messages, "temperature": 0, "echo": True, "max_tokens": 3}
    whole = server.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
    plain = server.post("/v1/chat/completions", asked | {"echo": False}).json()["choices"][0]["message"]["content"]
    assert whole == "4" + plain
    client = server.client().chat.completions
    stream = client.create(
        model="demo", messages=messages, temperature=0, max_tokens=3, stream=True, extra_body={"echo": True}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
    question = server.post("/v1/chat/completions", asked | {"messages": SUM}).json()["choices"][0]
    assert question["message"]["content"] == "42"  # the last message is the user's


@pytest.mark.parametrize("stream", [False, True])
def test_a_regular_expression_ends_the_answer(server: ServerProcess, stream: bool) -> None:
    text = server.post("/v1/completions", LONG).json()["choices"][0]["text"]
    assert text.startswith("abc def")
    stop = r"c\s+d"
    client = server.client().completions
    found = client.create(model="demo", stream=stream, extra_body={"stop_regex": [r"\d{5}", stop], "ignore_eos": True},
                          **{name: LONG[name] for name in ("prompt", "temperature", "max_tokens")})  # fmt: skip
    choices = [part.choices[0] for part in found] if stream else [found.choices[0]]  # type: ignore[union-attr]
    assert "".join(choice.text for choice in choices) == "abc d"
    last: Any = choices[-1]
    assert (last.finish_reason, last.stop_reason, last.matched_stop) == ("stop", stop, stop)


def test_bad_expressions_are_refused(server: ServerProcess) -> None:
    for given, words in (
        ("(", "stop_regex cannot be '(': unclosed group."),
        ("a*", "must not match the empty text, as 'a*' does"),
        (r"(a)\1", "stop_regex cannot be"),
        (["a"] * 9, "stop_regex holds more than 8 items"),
    ):
        refused = server.post("/v1/completions", LONG | {"stop_regex": given})
        assert refused.status_code == 400 and words in refused.json()["error"]["message"], refused.text
        assert refused.json()["error"]["param"] == "stop_regex"


def test_matched_stop_names_the_end(server: ServerProcess) -> None:
    def ends(**fields: Any) -> list[Any]:
        choice = server.post("/v1/completions", {"prompt": "12+30=", "temperature": 0, **fields}).json()["choices"][0]
        return [choice["finish_reason"], choice["stop_reason"], choice["matched_stop"]]

    assert ends() == ["stop", None, 2]
    assert ends(stop="2") == ["stop", "2", "2"]
    assert ends(stop_token_ids=[27]) == ["stop", 27, 27]
    assert ends(max_tokens=1) == ["length", None, None]


def test_ebnf_is_a_grammar(server: ServerProcess) -> None:
    grammar = 'root ::= sign digit+ "!"\nsign ::= "-" | "+"\ndigit ::= [5-7]\n'
    asked = {"prompt": "12+30=", "temperature": 1.0, "seed": 3, "max_tokens": 40, "logit_bias": {}}
    text = server.post("/v1/completions", asked | {"ebnf": grammar}).json()["choices"][0]["text"]
    assert text[0] in "+-" and set(text[1:].rstrip("!")) <= set("567") and len(text) > 1
    same = server.post("/v1/completions", asked | {"structured_outputs": {"grammar": grammar}}).json()
    assert same["choices"][0]["text"] == text
    twice = {"structured_outputs": {"grammar": grammar}, "guided_grammar": grammar}
    assert server.post("/v1/completions", asked | twice).json()["choices"][0]["text"] == text  # as guidance sends it
    refused = server.post("/v1/completions", asked | {"ebnf": 'root ::= "a" {'})
    assert refused.status_code == 400 and "cannot be used: as EBNF" in refused.json()["error"]["message"]
    both = server.post("/v1/completions", asked | {"ebnf": grammar, "regex": "a"})
    assert both.status_code == 400 and "conflict" in both.json()["error"]["message"]


def test_harmless_fields_are_taken(server: ServerProcess) -> None:
    fields = {
        "modalities": ["text"], "verbosity": "low", "prompt_cache_retention": "24h", "best_of": 1,
        "spaces_between_special_tokens": True, "guided_decoding_backend": "auto", "prediction": {"type": "content"},
        "chat_template_content_format": "auto", "separate_reasoning": True, "stream_reasoning": True,
    }  # fmt: skip
    body = {"messages": SUM, "temperature": 0, **fields, "rid": "mine"}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "42" and answer["id"] == "chatcmpl-mine"
    kept = server.post("/v1/completions", {"prompt": "12+30=", "temperature": 0, "stop": "2", "no_stop_trim": True})
    assert kept.json()["choices"][0]["text"] == "42"


def test_the_tokenizer_describes_itself(server: ServerProcess) -> None:
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<eos>" and "<|assistant|>" in info["chat_template"]
    assert info["tokenizer_class"].startswith("PreTrainedTokenizer") or info["tokenizer_class"].endswith("Backend")
    assert not [name for name in info if name.endswith(("_file", "_path"))]


def test_the_vocabulary_is_scored_where_the_server_allows_it(
    server: ServerProcess, reasoning_server: ServerProcess
) -> None:
    body = {"prompt": "12+30=", "temperature": 0, "max_tokens": 1, "logprobs": -1, "prompt_logprobs": -1}
    for field in ("logprobs", "prompt_logprobs"):
        refused = server.post("/v1/completions", body | {"logprobs": 1, "prompt_logprobs": 1, field: -1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field
    choice = reasoning_server.post("/v1/completions", body).json()["choices"][0]
    assert len(choice["prompt_logprobs"][1]) == 104 and len(choice["logprobs"]["top_logprobs"][0]) >= 100
    chat = {"messages": SUM, "max_tokens": 1, "logprobs": True, "top_logprobs": -1}
    content = reasoning_server.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    assert len(content[0]["top_logprobs"]) == 104


def test_a_server_behind_a_prefix_answers_with_it_and_without(reasoning_server: ServerProcess) -> None:
    for number in range(8):  # connections reach both HTTP processes
        for prefix in ("", "/llm"):
            assert reasoning_server.get(f"{prefix}/v1/models").json()["data"][0]["id"] == "demo", number
            body = {"prompt": "12+30=", "temperature": 0}
            assert reasoning_server.post(f"{prefix}/v1/completions", body).json()["choices"][0]["text"] == "42"
    assert reasoning_server.get("/llm").status_code == reasoning_server.get("/llm/").status_code == 200
    assert "/llm/openapi.json" in reasoning_server.get("/llm/docs").text
    assert reasoning_server.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert reasoning_server.get("/llmx/health").status_code == 404
    metrics = reasoning_server.get("/llm/metrics").text
    assert 'path="/v1/completions"' in metrics and "/llm/" not in metrics
