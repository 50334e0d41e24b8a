"""Request bodies: JSON is measured before it is decoded; long bodies are decoded and validated on a thread.

A call into C holds the interpreter's lock to its end, on a thread too: the bounds keep each of them short.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np
from pydantic import TypeAdapter

from torchweave.serving.errors import ApiError

Value = TypeVar("Value")
LONG_BODY = 1 << 15
"""Bytes of a body above which it is handled on a thread: shorter ones take less than a millisecond or two."""
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="torchweave-bodies")  # one: the memory of one body at a time
_BYTES_PER = {
    "objects and lists": (b"{[", 64),
    "members of objects": (b":", 32),
    "quotes": (b'"', 8),
    "values": (b",", 4),
}
"""What a body may hold for each so many bytes of `max_body_bytes`, and the characters that count it."""


async def on_thread(size: int, work: Callable[[], Value]) -> Value:
    """The result of `work` on a body of `size` bytes; for a long body it runs on a thread, unless it is cancelled before."""
    if size <= LONG_BODY:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


def read_body(body: bytes, kind: TypeAdapter[Value], max_body_bytes: int) -> Value:
    """Decode and validate a body.

    Raises:
        ApiError: 400, it is no JSON, or holds too much.
        ValidationError: a field is invalid.
    """
    _check_counts(body, max_body_bytes)
    return kind.validate_python(_decode(body))


def _check_counts(body: bytes, max_body_bytes: int) -> None:
    """Raise ApiError 400 for a body with more objects, members or values than bodies of the largest size usually hold."""
    bounds = {what: (marks, max_body_bytes // size) for what, (marks, size) in _BYTES_PER.items()}
    if all(sum(body.count(mark) for mark in marks) <= most for marks, most in bounds.values()):
        return
    outside = _outside_of_texts(body)
    for what, (marks, most) in bounds.items():
        count = sum(int(np.count_nonzero(outside == mark)) for mark in marks)
        if count > most:
            sentence = f"The body holds {count} {what}, but this server accepts at most {most} in a body; send fewer."
            raise ApiError(400, sentence, code="body_too_complex")


def _outside_of_texts(body: bytes) -> np.ndarray:
    """The bytes of JSON outside of its strings, uint8."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    characters = np.frombuffer(body, np.uint8)
    in_text = np.logical_xor.accumulate(characters == ord('"')) if body else np.empty(0, bool)
    return characters[~in_text]


def _decode(body: bytes) -> Any:
    """The value of JSON.

    Raises:
        ApiError: 400, it is none.
    """
    try:
        return msgspec.json.decode(body) if body else None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply; send JSON with fewer levels.") from None
    except msgspec.ValidationError:
        sentence = "The body contains a number with thousands of digits or beyond 1e308; send smaller numbers."
        raise ApiError(400, sentence) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, _decode_error(body, str(error))) from None


def _decode_error(body: bytes, reason: str) -> str:
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return f"The body is not valid UTF-8 (at byte {error.start}); send JSON in UTF-8."
    if "\\ud" in text or "\\uD" in text:
        reason += "; it may hold half of a surrogate pair"
    return f"The body is not valid JSON: {reason.removeprefix('JSON is malformed: ')}."
