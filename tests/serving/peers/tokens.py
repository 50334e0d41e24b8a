"""What peers' tests require of tokenization, and of token ids in requests and answers."""

from __future__ import annotations

from typing import Any

from tests.serving.peers.requirement import CHAT, COMPLETIONS, SUM, Json, chat, complete, events, require, require_all
from tests.serving.running import ServerProcess

AREA = "tokens in and out"
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TURNS: Any = [*SUM, {"role": "assistant", "content": "42"}, {"role": "user", "content": "1+1="}]
PROMPT = "<|user|>12+30=<|end|><|assistant|>"


def _is_whole(body: Json) -> bool:
    return body["count"] == len(body["tokens"]) and body["max_model_len"] == 512 and body["token_strs"] is None


require_all(
    AREA,
    "/tokenize",
    [
        (
            "A text is tokenized with special tokens by default.",
            {"prompt": "12+30="},
            lambda body: _is_whole(body) and body["tokens"][0] == 1 and body["count"] == 7,
        ),
        (
            "A text is tokenized without special tokens where `add_special_tokens` is false.",
            {"prompt": "12+30=", "add_special_tokens": False},
            lambda body: _is_whole(body) and body["count"] == 6,
        ),
        (
            "`return_token_strs` returns the tokens' texts.",
            {"prompt": "12", "return_token_strs": True},
            lambda body: body["token_strs"] == ["<bos>", "1", "2"],
        ),
        ("A conversation is tokenized by the chat template.", {"messages": TURNS}, _is_whole),
        ("Tools are rendered into a conversation.", {"messages": SUM, "tools": [TOOL]}, _is_whole),
        (
            "A conversation may end with the assistant's message, which is continued.",
            {"messages": TURNS[:2], "add_generation_prompt": False, "continue_final_message": True},
            _is_whole,
        ),
        (
            "`add_special_tokens: true` adds them before a conversation, too.",
            {"messages": SUM, "add_special_tokens": True},
            lambda body: _is_whole(body) and body["tokens"][:2] == [1, 1],
        ),
        ("Neither a text nor a conversation is refused.", {"add_special_tokens": True}, 400),
        ("An unknown model is not found.", {"model": "nobody", "prompt": "a"}, 404),
    ],
)
require_all(
    AREA,
    "/detokenize",
    [
        ("Tokens are detokenized.", {"model": "demo", "tokens": [26, 27]}, lambda body: len(body["prompt"]) == 2),
        ("Tokens outside the vocabulary are refused.", {"tokens": [104]}, 400),
        ("Detokenization needs tokens.", {"model": "demo"}, 400),
    ],
)


@require(AREA)
def tokens_make_the_text(server: ServerProcess) -> None:
    """Detokenized tokens of a text are the text."""
    text = "The 2 sums: 1+1=2!"
    tokens = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}


@require(AREA)
def the_tokenizer_describes_itself(server: ServerProcess) -> None:
    """`/tokenizer_info` has the class, the special tokens and the chat template, each of its type."""
    info = server.get("/tokenizer_info").json()
    assert isinstance(info["tokenizer_class"], str) and info["tokenizer_class"]
    assert isinstance(info["chat_template"], str) and info["chat_template"].strip()
    types = {
        "bos_token": str,
        "eos_token": str,
        "pad_token": str,
        "add_prefix_space": bool,
        "added_tokens_decoder": dict,
    }
    assert all(isinstance(info[name], kind) for name, kind in types.items() if info.get(name) is not None)
    assert info.get("model_max_length", 512) >= server.post("/tokenize", {"prompt": "a"}).json()["max_model_len"]


@require(AREA)
def token_ids_of_completions(server: ServerProcess) -> None:
    """`return_token_ids` returns the prompt's and the answer's ids; without it there are none."""
    made = complete(server, return_token_ids=True, logprobs=1)["choices"][0]
    assert made["prompt_token_ids"] == server.post("/tokenize", {"prompt": "12+30="}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": made["token_ids"]}).json()["prompt"]
    assert text.startswith(made["text"])
    assert "token_ids" not in complete(server, return_token_ids=False)["choices"][0]


@require(AREA)
def token_ids_of_chats(server: ServerProcess) -> None:
    """So it does for a conversation with tools, whose ids decode to the messages."""
    body = chat(server, tools=[TOOL], tool_choice="auto", return_token_ids=True, logprobs=True)
    prompt = server.post("/detokenize", {"tokens": body["prompt_token_ids"]}).json()["prompt"]
    assert "12+30=" in prompt and body["choices"][0]["token_ids"]
    plain = chat(server, tools=[TOOL], tool_choice="auto")
    assert "token_ids" not in plain["choices"][0] and "prompt_token_ids" not in plain


@require(AREA)
def token_ids_of_log_probabilities(server: ServerProcess) -> None:
    """With `return_tokens_as_token_ids` the tokens of log-probabilities are the ids, those of the prompt first under `echo`."""
    asked: Json = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1}
    made = complete(server, echo=True, prompt_logprobs=1, **asked)["choices"][0]
    found = [int(token.removeprefix("token_id:")) for token in made["logprobs"]["tokens"]]
    assert found == made["prompt_token_ids"] + made["token_ids"] and made["prompt_logprobs"]
    chunks = events(server, COMPLETIONS, prompt="12+30=", **asked)
    ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert tokens == [f"token_id:{token}" for token in ids] and chunks[0]["choices"][0]["prompt_token_ids"]


@require(AREA)
def token_ids_of_streams(server: ServerProcess) -> None:
    """A stream has the prompt's ids in its first event only, and the answer's where they arise."""
    chunks = events(server, CHAT, messages=SUM, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == server.post("/tokenize", {"messages": SUM}).json()["tokens"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert ids == chat(server, return_token_ids=True)["choices"][0]["token_ids"]


@require(AREA)
def a_chat_of_token_ids(server: ServerProcess) -> None:
    """`prompt_token_ids` of a chat replaces messages and template, and is answered as they are."""
    ids = server.post("/tokenize", {"messages": SUM}).json()["tokens"]
    body = chat(server, messages=[], prompt_token_ids=ids, return_token_ids=True)
    assert body["prompt_token_ids"] == ids and body["choices"][0]["message"]["content"] == "42"


@require(AREA)
def a_chat_of_token_ids_has_no_template(server: ServerProcess) -> None:
    """Beside `prompt_token_ids`, messages and fields of the template are refused."""
    ids = server.post("/tokenize", {"messages": SUM}).json()["tokens"]
    for fields in (
        {"messages": SUM},
        {"add_generation_prompt": True},
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"a": 1}},
    ):
        answer = server.post(CHAT, {"messages": [], "prompt_token_ids": ids, **fields})
        assert answer.status_code == 400, fields


@require(AREA)
def special_tokens_of_echoed_ids(server: ServerProcess) -> None:
    """`skip_special_tokens` decides on special tokens of an echoed prompt of ids, too."""
    for skip, text in ((True, "1"), (False, "<bos>1")):
        ids = server.post("/tokenize", {"prompt": "1"}).json()["tokens"]
        made = complete(server, prompt=ids, echo=True, max_tokens=1, skip_special_tokens=skip)["choices"][0]["text"]
        assert made.startswith(text) and made.startswith("<bos>") != skip


@require(AREA)
def a_prompt_is_truncated(server: ServerProcess) -> None:
    """`truncate_prompt_tokens` keeps the last tokens of a prompt, and -1 as many as fit."""
    body = complete(server, prompt=PROMPT, truncate_prompt_tokens=3, return_token_ids=True, max_tokens=2)
    assert len(body["choices"][0]["prompt_token_ids"]) == body["usage"]["prompt_tokens"] == 3
    assert complete(server, prompt=[5] * 600, truncate_prompt_tokens=-1, max_tokens=12)["usage"]["prompt_tokens"] == 500


@require(AREA, "completions take token ids (`prompt`) and return them (`return_token_ids`, `detokenize`)")
def tokens_are_generated_from_tokens(server: ServerProcess) -> None:
    """`/inference/v1/generate` answers `token_ids` with `token_ids`, up to the context length by default."""
    ids = server.post("/tokenize", {"messages": SUM}).json()["tokens"]
    body = {"model": "demo", "token_ids": ids, "sampling_params": {"temperature": 0.0}}
    answer = server.post("/inference/v1/generate", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == chat(server, return_token_ids=True)["choices"][0]["token_ids"]
