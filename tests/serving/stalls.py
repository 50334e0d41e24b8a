"""Bodies that may stall a server, each beside a client that reads a stream and one that sends short requests.

    python -m tests.serving.stalls                      # the whole set, against a server of its own: some 1,000 bodies
    python -m tests.serving.stalls --only tools --sizes 60000,600000 --url http://127.0.0.1:8000

Prints a line for each body: the longest gaps of both clients, the seconds until the answer, its status, and the memory of the HTTP
process before and after. Exits with 1 if an answer had a status of 500 or more, or no sentence.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import httpx

from tests.serving.running import serving

MAX_BODY = 8 << 20
SIZES = (2_000, 60_000, 600_000, MAX_BODY - 1000)
TALK = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 2}
TEXT = {"prompt": "1+1=", "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURN = {"role": "user", "content": "a"}
ROUTES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/completions": (
        TEXT,
        {
            "prompt": "a", "stop": "a", "stop_regex": "a", "stop_token_ids": 5, "bad_words": "a", "allowed_token_ids": 5,
            "guided_choice": "a", "structured_outputs.choice": "a", "logit_bias": None, "metadata": None,
        },
    ),
    "/v1/chat/completions": (
        TALK,
        {
            "messages": TURN, "messages.content": {"type": "text", "text": "a"}, "messages.tool_calls": CALL, "tools": TOOL,
            "tool_choice.allowed_tools": TOOL, "stop": "a", "bad_words": "a", "prompt_token_ids": 5, "modalities": "text",
            "chat_template_kwargs": None,
        },
    ),
    "/v1/chat/completions/batch": ({"max_tokens": 2}, {"messages": [TURN], "bad_words": "a"}),
    "/v1/responses": (
        {"input": "1+1=", "max_output_tokens": 2},
        {"input": TURN, "include": "a", "tools": {"type": "function", "name": "f"}, "metadata": None},
    ),
    "/v1/messages": (TALK, {"messages": TURN, "messages.content": {"type": "text", "text": "a"}, "stop_sequences": "a"}),
    "/v1/messages/count_tokens": ({"messages": [TURN]}, {"messages": TURN, "system": {"type": "text", "text": "a"}}),
    "/tokenize": ({"prompt": "a"}, {"prompt": "a", "messages": TURN}),
    "/detokenize": ({"tokens": [5]}, {"tokens": 5}),
}  # fmt: skip
"""By path: a valid body, and for each of its lists a right item; None: an object of many members."""
MUCH_WORK: dict[str, dict[str, Any]] = {
    "n 256": TEXT | {"n": 256, "max_tokens": 40},
    "best_of 256": TEXT | {"best_of": 256, "max_tokens": 40},
    "beam 64": TEXT | {"use_beam_search": True, "n": 64, "max_tokens": 40, "temperature": 0},
    "beam 256": TEXT | {"use_beam_search": True, "n": 256, "max_tokens": 40, "temperature": 0},
    "stop_regex 8 n 32": TEXT
    | {"n": 32, "max_tokens": 40, "stop_regex": [f"z{number}[0-9]{{9}}q" for number in range(8)]},
    "logprobs 100 n 32": TEXT | {"n": 32, "logprobs": 100, "max_tokens": 100, "ignore_eos": True},
    "prompt_logprobs 100": TEXT | {"prompt": [[5] * 200] * 32, "prompt_logprobs": 100, "max_tokens": 1},
    "schema of many states": TEXT
    | {"guided_json": {"type": "array", "maxItems": 9999, "items": {"multipleOf": 19997}}},
    "schema of many rules": TEXT | {"guided_json": {"anyOf": [{"const": f"a{number}"} for number in range(9000)]}},
    "grammar without end": TEXT
    | {"guided_grammar": 'start: "a" start | start "b" | start start | "c"', "max_tokens": 40},
}
"""Completions of short bodies that ask for much."""
WRONG: tuple[Any, ...] = ("", 1, None, {}, [])


@dataclass(frozen=True)
class Case:
    """A body.

    Attributes:
        name: path, field, kind and size.
        content: its JSON.
    """

    name: str
    path: str
    content: bytes


@dataclass
class Seen:
    """What happened beside a body, in seconds and MiB."""

    case: Case
    status: int
    answer: str
    seconds: float
    stream_gap: float
    short_gap: float
    memory: tuple[int, int] = field(default=(0, 0))

    @property
    def fault(self) -> str:
        if self.status >= 500:
            return f"status {self.status}"
        if self.status >= 400 and '"message":"' not in self.answer:
            return "no sentence"
        return ""


def cases(sizes: tuple[int, ...] = SIZES, only: str = "") -> Iterator[Case]:
    """Every list of every route, of wrong items, many items, long items and deep ones, by size."""
    for path, (body, lists) in ROUTES.items():
        for name, item in lists.items():
            for kind, value in _fillings(item):
                for size in sizes:
                    label = f"{path} {name} {kind} {size}"
                    if only in label:
                        yield Case(label, path, _body(body, name, value, size))


def cases_of_much_work(only: str = "") -> Iterator[Case]:
    """Short bodies that ask for much."""
    path = "/v1/completions"
    yield from (
        Case(f"{path} {name}", path, json.dumps(body).encode()) for name, body in MUCH_WORK.items() if only in name
    )


def _fillings(item: Any) -> Iterator[tuple[str, str]]:
    """Kinds of content with the JSON that is repeated, or for long and deep ones the part that is."""
    if item is None:
        yield from (("many members", "members"), ("deep", "deep"))
        return
    for wrong in WRONG:
        yield f"wrong {json.dumps(wrong)}", json.dumps(wrong)
    yield "many", json.dumps(item)
    yield "long", "long"
    yield "deep", "deep"


def _body(body: dict[str, Any], name: str, value: str, size: int) -> bytes:
    mark = "\0here\0"
    field_name, _, inner = name.partition(".")
    filled: Any = mark
    if field_name == "messages" and inner:
        filled = [{"role": "assistant" if inner == "tool_calls" else "user", "content": "a", inner: mark}]
    elif inner == "allowed_tools":
        filled = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": mark}}
        body = body | {"tools": [TOOL]}
    elif inner:
        filled = {inner: mark}
    if field_name == "prompt_token_ids":
        body = body | {"messages": []}
    text = json.dumps(body | {field_name: filled})
    return text.replace(json.dumps(mark), _filling(value, size - len(text))).encode()


def _filling(value: str, size: int) -> str:
    if value == "members":
        return "{" + ",".join(f'"{number}":1' for number in range(max(size // 13, 1))) + "}"
    if value == "long":
        return '["' + "12+30= " * max(size // 7, 1) + '"]'
    if value == "deep":
        return "[" * (size // 2) + "]" * (size // 2)
    return "[" + ",".join([value] * max(size // (len(value) + 1), 1)) + "]"


async def attack(url: str, pid: int | None, bodies: Iterator[Case]) -> list[Seen]:
    """Send each body beside both clients; prints what was seen."""
    seen: list[Seen] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, verify=False) as http:
        gaps = {"stream": _Gap(), "short": _Gap()}
        clients = [asyncio.create_task(_stream(http, gaps["stream"])), asyncio.create_task(_short(http, gaps["short"]))]
        await asyncio.sleep(1.0)
        for case in bodies:
            before, begin = _memory(pid), time.perf_counter()
            for gap in gaps.values():
                gap.begin()
            answer = await http.post(case.path, content=case.content, headers={"Content-Type": "application/json"})
            seconds = time.perf_counter() - begin
            await asyncio.sleep(0.05)
            longest = [gap.longest() for gap in gaps.values()]
            found = Seen(case, answer.status_code, answer.text[:300], seconds, *longest, (before, _memory(pid)))
            seen.append(found)
            memory = f"{before:5d} -> {found.memory[1]:5d} MiB"
            times = f"{found.stream_gap:6.3f} {found.short_gap:6.3f} {seconds:7.3f} s"
            print(times, found.status, memory, case.name, found.fault, flush=True)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return seen


class _Gap:
    """The longest time between two signs of life, including the one that lasts."""

    def __init__(self) -> None:
        self._last = self._longest = 0.0

    def begin(self) -> None:
        self._last, self._longest = time.perf_counter(), 0.0

    def sign(self) -> None:
        now = time.perf_counter()
        self._longest, self._last = max(self._longest, now - self._last), now

    def longest(self) -> float:
        return max(self._longest, time.perf_counter() - self._last)


async def _stream(http: httpx.AsyncClient, gap: _Gap) -> None:
    body = {"prompt": "1+1=", "max_tokens": 400, "ignore_eos": True, "stream": True}
    while True:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_raw():
                gap.sign()


async def _short(http: httpx.AsyncClient, gap: _Gap) -> None:
    while True:
        (await http.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 1})).raise_for_status()
        gap.sign()
        await asyncio.sleep(0.01)


def _memory(pid: int | None) -> int:
    """Resident memory of a process in MiB."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4 >> 10
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server of the built-in model that runs; default: one is started")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of the bodies")
    parser.add_argument("--only", default="", help="a part of the names of the bodies to send")
    given = parser.parse_args()
    chosen = chain(cases(tuple(map(int, given.sizes.split(","))), given.only), cases_of_much_work(given.only))
    with contextlib.ExitStack() as stack:
        server = None if given.url else stack.enter_context(serving())
        url, pid = (given.url, None) if server is None else (server.url, server.process.pid)
        seen = asyncio.run(attack(url, pid, chosen))
    faults = [each for each in seen if each.fault]
    gap = max((each.stream_gap for each in seen), default=0.0)
    short = max((each.short_gap for each in seen), default=0.0)
    print(
        f"{len(seen)} bodies; longest gap of the stream {gap:.3f} s, of short requests {short:.3f} s; {len(faults)} faults"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
