"""Items of a response's input as chat messages."""

from __future__ import annotations

from typing import Any

from torchweave.serving.errors import ApiError

_TEXT_PARTS = ("input_text", "output_text", "text")


def messages_of(instructions: str | None, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert items to chat messages: an assistant's reasoning, text and calls are one message.

    Args:
        instructions: precede the conversation; joined with a system message at its beginning, since templates take only one.

    Raises:
        ApiError: 400, an item is not supported.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        _add(messages, item)
    if instructions is None:
        return messages
    if messages and messages[0]["role"] in ("system", "developer") and isinstance(messages[0]["content"], str):
        first = messages[0]
        return [{"role": "system", "content": f"{instructions}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _add(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item to the messages before it."""
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        message = {"role": item.get("role"), "content": _content(item.get("content"))}
        last = messages[-1] if messages else {}
        if message["role"] == "assistant" and last.get("content", "") is None and "tool_calls" not in last:
            last["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        messages.append({"role": "assistant", "content": None, "reasoning_content": text})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        supported = "message, reasoning, function_call or function_call_output"
        raise ApiError(
            400,
            f"An input item has the type {str(kind)[:80]!r}, which is not supported; send {supported}.",
            param="input",
        )


def _content(content: Any) -> Any:
    """Parts of a message in the form of chat messages. Other values are checked there."""
    if not isinstance(content, list):
        return content
    parts = [_part(part) if isinstance(part, dict) else part for part in content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text" and "text" in part]
    return texts[0] if len(texts) == len(parts) == 1 else parts


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": part.get("text")}
    if kind == "input_image":
        if part.get("image_url") is None:
            raise ApiError(400, "An input_image has no image_url; send the image itself, as a data URL.", param="input")
        detail = {"detail": part["detail"]} if "detail" in part else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    return part
