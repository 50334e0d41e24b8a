"""Stored responses and background responses, in memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the items of its conversation: all before it, its input and its output."""

    response: dict[str, Any]
    items: list[dict[str, Any]]


class ResponseStore:
    """The responses used last, as JSON of at most `max_bytes` bytes.

    Each entry holds its whole conversation: entries are dropped and deleted independently of each other.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._response_of: dict[str, str] = {}  # response of each output item, by their ids
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Store a response under its id; drops the entries used longest ago, and the response itself if it alone exceeds the
        limit."""
        entry = msgspec.json.encode(StoredResponse(response, items))
        self.delete(response["id"])
        self._entries[response["id"]] = entry
        self._response_of |= {item["id"]: response["id"] for item in response.get("output", ()) if "id" in item}
        self.num_bytes += len(entry)
        while self.num_bytes > self._max_bytes:
            self.delete(next(iter(self._entries)))

    def get(self, response_id: str) -> StoredResponse | None:
        entry = self._entries.get(response_id)
        if entry is None:
            return None
        self._entries.move_to_end(response_id)
        return msgspec.json.decode(entry, type=StoredResponse)

    def item(self, item_id: str) -> dict[str, Any] | None:
        """An item of the output of a stored response."""
        stored = self.get(self._response_of.get(item_id, ""))
        items = stored.response.get("output", ()) if stored is not None else ()
        return next((item for item in items if item.get("id") == item_id), None)

    def delete(self, response_id: str) -> bool:
        """Delete a response; returns whether there was one."""
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return False
        self.num_bytes -= len(entry)
        for item in msgspec.json.decode(entry, type=StoredResponse).response.get("output", ()):
            self._response_of.pop(item.get("id"), None)
        return True


class BackgroundResponses:
    """Responses in progress whose clients do not wait for them."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[dict[str, Any], asyncio.Task[None]]] = {}

    def start(self, response: dict[str, Any], work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which completes the response and stores it."""
        task = asyncio.create_task(work)
        self._running[response["id"]] = response, task
        task.add_done_callback(lambda _: self._running.pop(response["id"], None))

    def get(self, response_id: str) -> dict[str, Any] | None:
        """A response in progress."""
        return self._running.get(response_id, (None, None))[0]

    def cancel(self, response_id: str) -> dict[str, Any] | None:
        """Stop a response in progress; returns it."""
        response, task = self._running.pop(response_id, (None, None))
        if response is not None and task is not None:
            response["status"] = "cancelled"
            task.cancel()
        return response

    def close(self) -> None:
        for response_id in list(self._running):
            self.cancel(response_id)
