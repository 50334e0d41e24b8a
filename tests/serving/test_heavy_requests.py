"""Requests that would occupy the server: they are refused at once, or wait apart, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torchweave
from tests.serving import stalls
from tests.serving.running import ServerProcess, cpu_seconds
from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.serving.http import responses
from torchweave.serving.ipc import messages
from torchweave.serving.tokenization import AsyncTokenizer
from torchweave.tokenizer import TextTooLong, Tokenizer

DEMO = Path(torchweave.__file__).parent / "models" / "demo"
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "1+1="}]}
HEAVY: dict[str, tuple[dict[str, Any], str]] = {
    "bad words": ({"prompt": "1+1=", "bad_words": [f"word {number}" for number in range(30_000)]}, "give at most 2048"),
    "a bad word": (
        {"prompt": "1+1=", "bad_words": ["12+30= " * 85_000]},
        "595000 characters in all; give at most 65536",
    ),
    "a long choice": (
        {"prompt": "1+1=", "guided_choice": ["12+30= " * 5_000]},
        "structured_outputs.choice cannot be used: one of them has 35000 characters; send choices of at most 16384.",
    ),
    "a regex": ({"prompt": "1+1=", "guided_regex": "ab" * 40_000}, "it has 80000 characters; send at most 65536"),
    "a choice": (
        {"prompt": "1+1=", "guided_choice": ["12+30= " * 85_000]},
        "it has 595000 characters; send at most 262144",
    ),
    "a grammar": (
        {"prompt": "1+1=", "guided_grammar": "root ::= a\n" + 'a ::= "b" | a\n' * 50_000},
        "structured_outputs.grammar cannot be used: it has 700011 characters; send at most 262144.",
    ),
    "a schema": (
        {"prompt": "1+1=", "guided_json": {"enum": [f"{each:9d}" for each in range(60_000)]}},
        "characters; send at most 262144",
    ),
    "stop strings": ({"prompt": "1+1=", "n": 32, "stop": [f"s{number}" for number in range(100_000)]}, "at most 1024"),
    "text": ({"prompt": "12+30= " * 1_000_000}, "maximum context length is 512 tokens"),
    "conversation": ({"messages": [{"role": "user", "content": "1+1= " * 1_000_000}]}, "maximum context length is 512"),
    "log-probabilities": (
        {"prompt": "1+1=", "n": 64, "logprobs": 100, "max_tokens": 400},
        "2585600 log-probabilities (64 answers, of at most 25600 tokens in all with 101 each",
    ),
    "log-probabilities of prompts": (
        {"prompt": [[5] * 500] * 256, "prompt_logprobs": 100, "max_tokens": 1},
        "at most 1048576 to one request (max_request_logprobs)",
    ),
    "texts": ({"prompt": ["12+30= " * 100] * 2000}, "asks for 2000 answers"),
}


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_requests_are_refused_at_once(server: ServerProcess, name: str) -> None:
    body, words = HEAVY[name]
    pids = (server.process.pid, server.engine_pid())
    begin = sum(map(cpu_seconds, pids))
    answer = server.post("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert len(answer.text) < 1000 and sum(map(cpu_seconds, pids)) - begin < 4  # 14 seconds to encode the text
    if name in ("text", "conversation"):
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"prompt": "12+30= " * 150_000}, "The text has 1050000 characters, but at most 1048576"),
        ("/tokenize", TALK | {"messages": [{"role": "user", "content": "a" * 1_050_000}]}, "has 1050000 characters"),
        (
            "/tokenize",
            TALK | {"tools": [{"type": "function", "function": {"name": "f", "description": "a" * 1_050_000}}]},
            "characters, but at most 1048576",
        ),
        ("/detokenize", {"tokens": [5] * 1_050_000}, "tokens holds 1050000 ids, but at most 1048576"),
    ],
)
def test_tokens_have_bounds(server: ServerProcess, path: str, body: dict[str, Any], words: str) -> None:
    begin = cpu_seconds(server.process.pid)
    answer = server.post(path, body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text[:300]
    assert cpu_seconds(server.process.pid) - begin < 1.5  # 56 s for 8 MB


def test_the_longest_text_that_may_fit_is_encoded() -> None:
    tokenizer = Tokenizer(DEMO)
    text = max(tokenizer.hf_tokenizer.get_vocab(), key=len) * 5
    assert len(tokenizer.encode(text, False, max_tokens=5)) <= 5
    with pytest.raises(TextTooLong, match="at most 13"):
        tokenizer.encode(text * 5, max_tokens=5)


class Slow(Tokenizer):
    """Waits with long texts until it may encode them, and notes all."""

    begun: list[int] = []  # noqa: RUF012
    may_encode = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        self.begun.append(len(text))
        assert len(text) < 100_000 or self.may_encode.wait(60)
        return [len(text)]


def test_short_texts_do_not_wait_for_long_ones_and_nobody_encodes_for_those_who_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        slow = Slow(DEMO)
        tokenizer = AsyncTokenizer(slow, slow, None)
        monkeypatch.setattr("torchweave.serving.tokenization.Tokenizer", Slow)
        long = [asyncio.create_task(tokenizer.encode("a" * size)) for size in (200_001, 200_002, 200_003)]
        while not Slow.begun:
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(tokenizer.encode("a"), 30) == [1]
        long[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await long[1]
        Slow.may_encode.set()
        assert await long[2] == [200_003]
        assert sorted(Slow.begun) == [1, 200_001, 200_003]
        tokenizer.close()

    asyncio.run(scenario())


DOZEN = [case for number, case in enumerate(stalls.cases((60_000, 600_000))) if number % 41 == 3]


@pytest.mark.parametrize("case", DOZEN, ids=lambda case: case.name)
def test_bodies_of_the_set_are_answered_with_little_work(server: ServerProcess, case: stalls.Case) -> None:
    """The whole set: `python -m tests.serving.stalls`."""
    begin = cpu_seconds(server.process.pid)
    headers = {"Content-Type": "application/json"}
    answer = server.request("POST", case.path, content=case.content, headers=headers)
    seen = stalls.Seen(case, answer.status_code, answer.text, 0.0, 0.0, 0.0)
    assert not seen.fault and cpu_seconds(server.process.pid) - begin < 1.5, answer.text[:300]


def test_answers_are_encoded_in_slices_and_no_further_for_those_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_SLICE_SECONDS", 0.0)
    made: list[int] = []

    def items() -> Iterator[dict[str, int]]:
        for number in range(1000):
            made.append(number)
            yield {"number": number}

    async def scenario() -> None:
        others = 0
        encoding = asyncio.create_task(responses.encode_in_slices({"a": [{"b": items()}], "c": iter(())}))
        while not encoding.done():
            others += 1
            await asyncio.sleep(0)
        assert others > 900 and json.loads(encoding.result()) == {
            "a": [{"b": [{"number": each} for each in range(1000)]}],
            "c": [],
        }
        made.clear()
        left = asyncio.create_task(responses.encode_in_slices({"a": items()}))
        while len(made) < 10:
            await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert left.cancelled() and len(made) < 20

    asyncio.run(scenario())


def test_the_engine_gets_no_stop_strings() -> None:
    request = InferenceRequest(1, [1], SamplingParams(stop=["a"], top_k=3))  # type: ignore[arg-type]
    decoded = messages.decode_request(messages.submit(request))
    assert decoded.sampling == SamplingParams(top_k=3)
