"""Malformed requests over raw sockets, which the server must reject or disconnect.

    python -m tests.serving.http.malformed --count 5000 --url http://127.0.0.1:8000

A case is bytes to send, and how: whole, slowly, or with the connection closed at some point. Afterwards the server must answer a
known prompt as it did before, and hold no block.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
TIMEOUT = 60.0
WORKERS = 12
KNOWN_PROMPT = {"model": "demo", "prompt": "12+30=", "temperature": 0, "max_tokens": 8}


@dataclass
class Case:
    """What is sent.

    Attributes:
        data: all bytes.
        pause: seconds between its 7 parts; 0 sends it at once.
        leave_after: answer bytes after which the client leaves; None reads to the end. -1: it leaves once all is sent.
        must_answer: an answer or the end of the connection has to come.
    """

    kind: str
    data: bytes
    pause: float = 0.0
    leave_after: int | None = None
    must_answer: bool = True


@dataclass
class Found:
    """What the server did.

    Attributes:
        statuses: answers by status, 0 for a connection that was closed without one, -1 for one that the client left.
        faults: what must not happen.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


# -- cases -------------------------------------------------------------------------------------------------------------

ODD_NUMBERS = (
    "-1",
    "0",
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "1" + "0" * 400,
    "0.1",
    "9223372036854775808",
    "2147483648",
    "-2147483649",
    "1e39",
    "1e-320",
    "-0.0",
    "00",
)
ODD_VALUES = (
    "null", "true", '""', "[]", "{}", '"a"', "[[]]",
    "[null]", "[2147483648]", "[-1]", "[9223372036854775808]", '"\\ud800"', '"\\u0000"', '"\\udfff\\ud800"', '"' + "x" * 5000 + '"',
    '["a", 1]', '{"a": {"b": [1, {"c": null}]}}', "[" * 50 + "]" * 50, '"\U0001f9f5\u202e\ufeff"', *ODD_NUMBERS,
)  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop",
    "stop_token_ids", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "presence_penalty",
    "frequency_penalty",
    "repetition_penalty", "response_format", "tools", "tool_choice", "echo", "best_of", "ignore_eos", "min_tokens", "bad_words",
    "allowed_token_ids", "priority", "cache_salt", "user", "suffix", "structured_outputs", "guided_json", "prompt_logprobs",
    "text",
    "tokens", "add_special_tokens", "chat_template_kwargs", "include_stop_str_in_output", "skip_special_tokens", "\u00e9", "",
)  # fmt: skip


def body_for(path: str, draw: random.Random) -> dict[str, Any]:
    """A decent body, which the cases then spoil."""
    common = {"model": "demo", "max_tokens": draw.choice((1, 4, 40)), "temperature": 0, "stream": draw.random() < 0.5}
    if path.endswith("chat/completions"):
        return common | {"messages": [{"role": "user", "content": "12+30="}]}
    if path == "/tokenize":
        return {"model": "demo", "prompt": "12+30="}
    if path == "/detokenize":
        return {"model": "demo", "tokens": [5, 6, 7]}
    return common | {"prompt": draw.choice(("12+30=", [5, 6, 7], ["a", "b"], [[5], [6, 7]]))}


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"]
    lines += [f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def odd_field(draw: random.Random) -> Case:
    path = draw.choice(PATHS)
    body = {name: json.dumps(value) for name, value in body_for(path, draw).items()}
    for _ in range(draw.randint(1, 3)):
        name = draw.choice((draw.choice(FIELDS), draw.choice(list(body))))
        body[name] = draw.choice(ODD_VALUES)
    if "max_tokens" not in body or draw.random() < 0.5:
        body["max_tokens"] = "4" if path.startswith("/v1") else body.get("max_tokens", "4")
    text = "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in body.items()) + "}"
    return Case("odd field", post(path, text.encode("utf-8", "surrogatepass")))


def spoilt_text(draw: random.Random) -> Case:
    path = draw.choice(PATHS)
    text = bytearray(json.dumps(body_for(path, draw)).encode())
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text))
        what = draw.randrange(4)
        if what == 0:
            text[at] = draw.randrange(256)
        elif what == 1:
            del text[at : at + draw.randint(1, 9)]
        elif what == 2:
            text[at:at] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 9)))
        else:
            text[at:at] = text[max(0, at - 9) : at]
        text = text or bytearray(b"{")
    return Case("spoilt text", post(path, bytes(text)))


def odd_body(draw: random.Random) -> Case:
    depth = draw.choice((60, 900, 20_000, 200_000))
    bodies = (
        b"", b" ", b"null", b"[]", b'"a"', b"0", b"{}", b"{", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}",
        b"\x00" * 99, b'{"a":1}{"b":2}',
        b"[" * depth + b"]" * depth, b'{"prompt":' * depth + b"1" + b"}" * depth, b'{"prompt": "' + b"a " * 300_000 + b'"}',
        b'{"model":"demo","prompt":[' + b"5," * 100_000 + b"5]}", b'{"prompt":"a","prompt":"b","model":"demo","max_tokens":2}',
    )  # fmt: skip
    return Case("odd body", post(draw.choice(PATHS), draw.choice(bodies)))


def odd_framing(draw: random.Random) -> Case:
    path = draw.choice(PATHS)
    body = json.dumps(body_for(path, draw)).encode()
    chunked = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    )
    plain = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
    whole = (
        post(path, body, length=max(0, len(body) - draw.randint(1, len(body)))),
        post(path, body, length=-5),
        plain + b"Content-Length: 99999999999999999999999\r\n\r\n" + body,
        plain + b"Content-Length: abc\r\n\r\n" + body,
        plain + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + body,
        plain + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + body,
        chunked + b"zz\r\n" + body,
        chunked + b"fffffffffffffffffff\r\n" + body,
        chunked + f"{len(body):x};ext=1\r\n".encode() + body + b"\r\n0\r\nTrailer: x\r\n\r\n",
        chunked + b"-1\r\n" + body,
    )
    return Case("odd framing", draw.choice(whole))


def cut_short(draw: random.Random) -> Case:
    """The client ends its half, or leaves, in the middle of a request."""
    path = draw.choice(PATHS)
    data = post(path, json.dumps(body_for(path, draw)).encode())
    return Case("cut short", data[: draw.randrange(1, len(data))], leave_after=-1, must_answer=False)


def odd_head(draw: random.Random) -> Case:
    path = draw.choice((*PATHS, "/", "/live", "/metrics", "/health", "/v1/models", "/v1/models/%2e%2e/%00", "/nothing"))
    body = json.dumps(KNOWN_PROMPT).encode()
    length = f"Content-Length: {len(body)}\r\nConnection: close\r\n".encode()
    rest = b"Host: localhost\r\n" + length + b"\r\n" + body
    get = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
    heads = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), b"GET\r\n\r\n", b"\r\n\r\n\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"BREW /v1/completions HTTP/1.1\r\n" + rest,
        b"DELETE /v1/completions HTTP/1.1\r\n" + rest,
        f"HEAD {path} HTTP/1.1\r\n".encode() + rest, f"OPTIONS {path} HTTP/1.1\r\n".encode() + rest,
        f"PUT {path} HTTP/1.1\r\n".encode() + rest,
        b"POST /v1/completions\xff\xfe HTTP/1.1\r\n" + rest, b"POST /v1/%zz/%ff HTTP/1.1\r\n" + rest,
        b"GET " + b"/a" * 40_000 + b" HTTP/1.1\r\n\r\n",
        get + b"X: " + b"a" * 200_000 + b"\r\n\r\n", get + b"".join(b"X-%d: a\r\n" % i for i in range(3000)) + b"\r\n",
        get + b"Name\r\n\r\n",
        get + b"A\x00B: c\r\n\r\n", get + b"A: b\x00c\r\n\r\n", get + b": empty\r\n\r\n", get + b"A: \xff\xfe\xfd\r\n\r\n",
        get + b" folded\r\n\r\n",
        get + b"Expect: 100-continue\r\n\r\n", get + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        get + b"Accept: " + b"\xc3\xa9/;;q=zz" + b"\r\n\r\n",
        get + b"Authorization: Bearer \xff\r\n\r\n", b"POST /v1/completions HTTP/1.0\r\n" + length + b"\r\n" + body,
        b"POST http://elsewhere/v1/completions HTTP/1.1\r\n" + rest,
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: text/\xff\r\n" + rest,
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: multipart/form-data\r\n" + rest,
        b"POST /v1/completions HTTP/1.1\r\nContent-Encoding: gzip\r\n" + rest, get * 40 + b"\r\n",
    )  # fmt: skip
    return Case("odd head", draw.choice(heads), must_answer=False)


def slow(draw: random.Random) -> Case:
    """A client that sends and reads slowly, and may leave."""
    path = draw.choice(PATHS)
    data = post(path, json.dumps(body_for(path, draw)).encode())
    return Case("slow", data, pause=draw.choice((0.01, 0.05)), leave_after=draw.choice((None, -1)), must_answer=False)


def leaves(draw: random.Random) -> Case:
    """A decent request, whose client leaves at some byte of the answer."""
    path = draw.choice(PATHS[:2])
    body = body_for(path, draw) | {
        "stream": draw.random() < 0.8,
        "max_tokens": draw.choice((1, 30, 60)),
        "ignore_eos": True,
    }
    body |= {"n": draw.choice((1, 1, 2, 5))}
    data = post(path, json.dumps(body).encode())
    return Case("leaves", data, leave_after=draw.choice((-1, 0, 1, 20, 150, 400, 900, 3000)), must_answer=False)


Kinds = tuple[tuple[Callable[[random.Random], Case], int], ...]
KINDS: Kinds = (
    (odd_field, 40), (spoilt_text, 20), (odd_body, 6), (odd_framing, 8), (cut_short, 8), (odd_head, 12), (slow, 3),
    (leaves, 12),
)  # fmt: skip


@dataclass
class Workload:
    """Cases of some kinds, each with its weight, and a decent request, which has the same answer before and after them."""

    kinds: Kinds
    path: str
    known: dict[str, Any]

    def cases(self, count: int, seed: int) -> list[Case]:
        draw = random.Random(seed)
        kinds, weights = zip(*self.kinds, strict=True)
        return [draw.choices(kinds, weights)[0](draw) for _ in range(count)]


TEXT = Workload(KINDS, "/v1/completions", KNOWN_PROMPT)


# -- sending -----------------------------------------------------------------------------------------------------------


async def send(case: Case, host: str, port: int) -> tuple[int, str]:
    """The status of the (last) answer, and its body; 0: closed without one; -1: the client left.

    Raises:
        TimeoutError: the server neither answered nor closed.
    """
    async with asyncio.timeout(TIMEOUT):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            step = max(1, len(case.data) // 7) if case.pause else len(case.data)
            for start in range(0, len(case.data), step):
                writer.write(case.data[start : start + step])
                await writer.drain()
                await asyncio.sleep(case.pause)
            if case.leave_after == -1:
                return -1, ""
            if case.leave_after is None and not case.must_answer and not case.pause:
                with contextlib.suppress(OSError):  # the server may have hung up already, with or without an answer
                    writer.write_eof()
            return await _answer(reader, case.leave_after)
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0, ""
        finally:
            with contextlib.suppress(ConnectionError):
                writer.transport.abort()


async def _answer(reader: asyncio.StreamReader, leave_after: int | None) -> tuple[int, str]:
    answer = b""
    while leave_after is None or len(answer) < leave_after:
        part = await reader.read(65536)
        if not part:
            break
        answer = (answer + part)[:200_000]
    line = answer.split(b"\r\n", 1)[0].split(b" ")
    body = answer.partition(b"\r\n\r\n")[2].decode("utf-8", "replace")
    return int(line[1]) if len(line) > 1 and line[1].isdigit() else (0 if leave_after is None else -1), body


def is_sentence(body: str) -> bool:
    """Whether the body of an error has a message of one paragraph, which is a sentence."""
    if body == "Invalid HTTP request received.":  # uvicorn's
        return True
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return False
    return message.endswith((".", "?")) and "\n" not in message


async def attack(
    url: str, count: int, seed: int, tell: Callable[[str], None] = lambda _: None, workload: Workload = TEXT
) -> Found:
    """Send `count` malformed requests, several at a time, and see that the server is none the worse for it."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    found, work = Found(), list(enumerate(workload.cases(count, seed)))
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as http:
        before = await known(http, workload)
        assert before[0] == 200, f"the known prompt is answered {before}"

        async def worker() -> None:
            while work:
                number, case = work.pop()
                found.kinds[case.kind] += 1
                try:
                    status, body = await send(case, parts.hostname or "", parts.port or 0)
                except TimeoutError:
                    found.faults.append(
                        f"case {number} of seed {seed}, {case.kind}: no answer in {TIMEOUT:g} s: {case.data[:400]!r}"
                    )
                    continue
                found.statuses[status] += 1
                if status >= 500 or (case.must_answer and status < 0):
                    found.faults.append(
                        f"case {number} of seed {seed}, {case.kind}: status {status}: {case.data[:400]!r}"
                    )
                if status == 400 and body and case.leave_after is None and not is_sentence(body):
                    found.faults.append(f"case {number} of seed {seed}, {case.kind}: no sentence: {body[:400]!r}")
                if number % 500 == 250 and (after := await known(http, workload)) != before:
                    found.faults.append(f"after case {number} of seed {seed} the known prompt is answered {after!r}")
                if number % 500 == 0:
                    tell(f"{number} left, {len(found.faults)} faults")

        await asyncio.gather(*(worker() for _ in range(WORKERS)))
        found.faults += await _left_behind(http)
        if (after := await known(http, workload)) != before:
            found.faults.append(f"the known prompt is answered {after!r}, before it was {before!r}")
    return found


async def known(http: httpx.AsyncClient, workload: Workload) -> Any:
    answer = await http.post(workload.path, json=workload.known)
    return answer.status_code, answer.json().get("choices")


async def _left_behind(http: httpx.AsyncClient) -> list[str]:
    """What the server still holds of requests that are over."""
    end = time.monotonic() + 30
    while True:
        live = (await http.get("/live")).json()
        held = {
            "blocks": live["blocks"]["used"],
            **{name: live["requests"][name] for name in ("running", "waiting", "paused", "open")},
        }
        if not any(held.values()):
            return []
        if time.monotonic() > end:
            return [f"still held after 30 s: {held}"]
        await asyncio.sleep(0.2)


def main(workload: Workload = TEXT) -> int:
    parser = argparse.ArgumentParser(description="Send malformed requests to a running server.", allow_abbrev=False)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin = time.monotonic()
    found = asyncio.run(attack(args.url, args.count, args.seed, print, workload))
    print(f"{args.count} requests in {time.monotonic() - begin:.1f} s; statuses {dict(sorted(found.statuses.items()))}")
    print(f"kinds {dict(found.kinds)}")
    for fault in found.faults[:40]:
        print("FAULT", fault)
    print(f"{len(found.faults)} faults")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
