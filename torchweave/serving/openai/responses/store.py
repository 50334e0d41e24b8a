"""Stored responses and background responses, in memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from torchweave.serving.errors import ApiError


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


def input_page(stored: StoredResponse, limit: int, newest_first: bool, after: str | None) -> dict[str, Any]:
    """A page of the items that a response answers, as OpenAI lists them: up to `limit`, behind the item `after`.

    Raises:
        ApiError: 400, there is no item `after`.
    """
    response = stored.response
    items = stored.items[: len(stored.items) - len(response.get("output", ()))]
    listed = [_listed(item, f"msg_{response['id'].removeprefix('resp_')}_{at}") for at, item in enumerate(items)]
    listed = listed[::-1] if newest_first else listed
    begin = 0
    if after is not None:
        begin = next((at for at, item in enumerate(listed, 1) if item["id"] == after), 0)
        if not begin:
            raise ApiError(400, f"There is no item {after[:80]!r} among the input of this response.", param="after")
    page = listed[begin : begin + limit]
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = begin + limit < len(listed)
    return {"object": "list", "data": page, "first_id": ends[0], "last_id": ends[1], "has_more": has_more}


def _listed(item: dict[str, Any], own_id: str) -> dict[str, Any]:
    """An item with an id; a message with its content in parts."""
    listed = {"type": "message", **item}
    listed["id"] = item.get("id") or own_id
    if listed["type"] == "message" and isinstance(content := item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        listed["content"] = [{"type": kind, "text": content}]
    return listed


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
