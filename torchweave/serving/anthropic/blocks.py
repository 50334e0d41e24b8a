"""Content blocks of Anthropic's messages as chat messages."""

from __future__ import annotations

import json
from typing import Any

from torchweave.serving.errors import ApiError
from torchweave.serving.request_warnings import RequestWarnings

_BILLING = "x-anthropic-billing-header"
"""Beginning of a text that Claude Code puts before its system prompt. It differs by session, so it would keep the prefix cache from
the whole prompt, and it says nothing to a model."""
_REQUIRED: dict[str, tuple[str, ...]] = {
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
    "redacted_thinking": ("data",),
}
"""Fields of blocks that must be texts, and not empty."""
_NOT_CONTENT = ("tool_result", "tool_use", "thinking", "redacted_thinking")


def system_messages(system: str | list[dict[str, Any]] | None, warnings: RequestWarnings) -> list[dict[str, Any]]:
    """The system prompt as messages, without the clients' accounting."""
    if isinstance(system, str) and system.startswith(_BILLING):
        system = system.partition("\n")[2].lstrip("\n")
    if isinstance(system, list):
        system = [block for block in system if not str(block.get("text", "")).startswith(_BILLING)]
    return [{"role": "system", "content": content_of(system, warnings)}] if system else []


def messages_of(role: str, content: str | list[dict[str, Any]], warnings: RequestWarnings) -> list[dict[str, Any]]:
    """Chat messages of a turn: results of tools precede the text that a user sends with them.

    Raises:
        ApiError: 400, a block has no id, name, input or text where Anthropic's API needs one.
    """
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    for block in content:
        _check(block)
    results = [block for block in content if block.get("type") == "tool_result"]
    messages = [
        {
            "role": "tool",
            "tool_call_id": block["tool_use_id"],
            "content": content_of(block.get("content") or "", warnings),
        }
        for block in results
    ]
    calls = [_call(block) for block in content if block.get("type") == "tool_use"]
    thoughts = [str(block.get("thinking", "")) for block in content if block.get("type") == "thinking"]
    parts = content_of([block for block in content if block.get("type") not in _NOT_CONTENT], warnings)
    if not parts and results:
        return messages
    message: dict[str, Any] = {"role": role, "content": parts or None}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [*messages, message]


def content_of(content: str | list[dict[str, Any]], warnings: RequestWarnings) -> Any:
    """Content blocks as parts of a chat message; a single text as a text."""
    if isinstance(content, str):
        return content
    parts = [part for block in content for part in _parts(block, warnings)]
    return parts[0].get("text") if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _check(block: dict[str, Any]) -> None:
    kind = str(block.get("type"))
    for name in _REQUIRED.get(kind, ()):
        if not isinstance(block.get(name), str) or not block[name]:
            raise ApiError(400, f"A {kind} block needs {name}, a text that is not empty.", param="messages")
    if kind in ("text", "thinking") and not isinstance(block.get(kind), str):
        raise ApiError(400, f"A {kind} block needs {kind}, a text.", param="messages")
    if kind == "tool_use" and not isinstance(block.get("input"), dict):
        raise ApiError(400, "A tool_use block needs input, an object.", param="messages")
    if not isinstance(block.get("type"), str):
        raise ApiError(400, "A content block needs type, a text.", param="messages")


def _call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}


def _parts(block: dict[str, Any], warnings: RequestWarnings) -> list[dict[str, Any]]:
    """A block as parts of a chat message. A block that chat messages do not have becomes a text: its own, or one that names it."""
    _check(block)
    kind = block["type"]
    if kind == "text":
        return [_text(block["text"])]
    if kind == "image":
        return [{"type": "image_url", "image_url": {"url": _image_url(block.get("source"))}}]
    if kind == "document":
        return _document(block, warnings)
    if kind == "search_result":
        head = " ".join(str(block[name]) for name in ("title", "source") if block.get(name))
        return [_text(head), *_nested(block.get("content"), warnings)]
    if kind in ("server_tool_use", "mcp_tool_use"):
        return [_text(f"[{block.get('name')} was called with {json.dumps(block.get('input'), ensure_ascii=False)}]")]
    if kind == "tool_reference":
        return [_text(f"[Tool {block.get('tool_name')} was found.]")]
    if kind.endswith("_tool_result"):
        return _server_result(block, warnings)
    return [_left_out(kind, warnings)]


def _document(block: dict[str, Any], warnings: RequestWarnings) -> list[dict[str, Any]]:
    given = block.get("source")
    source: dict[str, Any] = given if isinstance(given, dict) else {}
    head = [_text(str(block[name])) for name in ("title", "context") if block.get(name)]
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return [*head, _text(source["data"])]
    if source.get("type") == "content":
        return [*head, *_nested(source.get("content"), warnings)]
    return [*head, _left_out(f"document ({source.get('media_type') or source.get('type')})", warnings)]


def _server_result(block: dict[str, Any], warnings: RequestWarnings) -> list[dict[str, Any]]:
    """The result of a tool that another server ran: what of it is text."""
    content = block.get("content")
    results = content if isinstance(content, list) else [content]
    texts = []
    for each in results:
        fields = each if isinstance(each, dict) else {}
        names = ("title", "url", "text", "stdout", "stderr", "error_code")
        texts += [" ".join(str(fields[name]) for name in names if isinstance(fields.get(name), str) and fields[name])]
    text = "\n".join(text for text in texts if text)
    return [_text(text)] if text else [_left_out(block["type"], warnings)]


def _nested(content: Any, warnings: RequestWarnings) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_text(content)]
    blocks = content if isinstance(content, list) else []
    return [part for block in blocks if isinstance(block, dict) for part in _parts(block, warnings)]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _left_out(kind: str, warnings: RequestWarnings) -> dict[str, Any]:
    kind = kind[:80]
    warnings.add(
        "unsupported_content", f"A content block of type {kind} was left out, because models cannot read it here."
    )
    return _text(f"[A {kind} block was left out here: it cannot be read.]")


def _image_url(source: Any) -> str:
    """The source of an image block as a URL."""
    source = source if isinstance(source, dict) else {}
    kind, url, data, media_type = (source.get(name) for name in ("type", "url", "data", "media_type"))
    if kind == "url" and isinstance(url, str):
        return url
    if kind == "base64" and isinstance(data, str) and isinstance(media_type, str):
        return f"data:{media_type};base64,{data}"
    raise ApiError(
        400,
        'The source of an image block is not supported; send {"type": "base64", "media_type": "image/png", "data": ...}.',
        param="messages",
    )
