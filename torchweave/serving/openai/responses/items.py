"""Items of a response's input as chat messages."""

from __future__ import annotations

import json
from typing import Any

from torchweave.serving.errors import ApiError
from torchweave.serving.openai.custom_tools import custom_arguments
from torchweave.serving.openai.responses.tools import ResponseTools
from torchweave.serving.request_warnings import RequestWarnings

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_NOT_ARGUMENTS = frozenset(
    ("type", "id", "call_id", "status", "name", "result", "results", "outputs", "encrypted_content")
)
"""Fields of a hosted tool's call that say nothing about what was called, or are binary."""


def messages_of(
    instructions: str | None, items: list[dict[str, Any]], tools: ResponseTools, warnings: RequestWarnings
) -> list[dict[str, Any]]:
    """Convert items to chat messages: an assistant's reasoning, text and calls are one message.

    Args:
        instructions: precede the conversation; joined with a system message at its beginning, since templates take only one.
        tools: of the request; calls in the items have the names of its tools.
        warnings: takes those about items that are left out.

    Raises:
        ApiError: 400, an item is invalid.
    """
    reader = _ItemReader(tools, warnings)
    for item in items:
        reader.add(item)
    messages = reader.messages
    if instructions is None:
        return messages
    if messages and messages[0]["role"] in ("system", "developer") and isinstance(messages[0]["content"], str):
        first = messages[0]
        return [{"role": "system", "content": f"{instructions}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


class _ItemReader:
    def __init__(self, tools: ResponseTools, warnings: RequestWarnings) -> None:
        self.messages: list[dict[str, Any]] = []
        self._tools, self._warnings = tools, warnings

    def add(self, item: dict[str, Any]) -> None:
        """Add an item to the messages before it."""
        kind = str(item.get("type", "message" if "role" in item else None))
        if kind == "message":
            self._add_message(item.get("role"), self._content(item.get("content")))
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            if text:
                self.messages.append({"role": "assistant", "content": None, "reasoning_content": text})
        elif kind == "function_call":
            name = self._tools.function_name(item.get("name"), item.get("namespace"))
            self._add_call(item, name, item.get("arguments"))
        elif kind == "custom_tool_call":
            arguments = custom_arguments(item.get("input"))
            self._add_call(item, self._tools.function_name(item.get("name"), item.get("namespace")), arguments)
        elif kind.endswith("_output") and "call_id" in item:
            output = self._output(item.get("output"))
            self.messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind.endswith("_call"):
            self._add_hosted_call(kind, item)
        else:
            sentence = f"An input item of type {kind[:80]!r} was left out: this server cannot read it."
            self._warnings.add("unsupported_content", sentence)

    def _add_message(self, role: Any, content: Any) -> None:
        last = self.messages[-1] if self.messages else {}
        if role == "assistant" and last.get("content", "") is None and "tool_calls" not in last:
            last["content"] = content
        else:
            self.messages.append({"role": role, "content": content})

    def _add_call(self, item: dict[str, Any], name: Any, arguments: Any) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _add_hosted_call(self, kind: str, item: dict[str, Any]) -> None:
        """A call of a hosted tool: as a call where its output is an item, else as a text."""
        fields = {name: value for name, value in item.items() if name not in _NOT_ARGUMENTS and value is not None}
        arguments = json.dumps(fields, ensure_ascii=False)
        if item.get("call_id") is not None:
            self._add_call(item, item.get("name") or kind.removesuffix("_call"), arguments)
        else:
            self._add_message("assistant", f"[{kind.removesuffix('_call')}: {arguments}]")

    def _output(self, output: Any) -> Any:
        if output is None or isinstance(output, (str, list)):
            return self._content(output)
        return json.dumps(output, ensure_ascii=False)

    def _content(self, content: Any) -> Any:
        """Parts of a message in the form of chat messages. Other values are checked there."""
        if not isinstance(content, list):
            return content
        parts = [self._part(part) if isinstance(part, dict) else part for part in content]
        texts = [
            part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text" and "text" in part
        ]
        return texts[0] if len(texts) == len(parts) == 1 else parts

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        kind = part.get("type")
        if kind in _TEXT_PARTS:
            return {"type": "text", "text": part.get("text")}
        if kind == "input_image":
            if part.get("image_url") is None:
                sentence = "An input_image has no image_url; send the image itself, as a data URL."
                raise ApiError(400, sentence, param="input")
            detail = {"detail": part["detail"]} if "detail" in part else {}
            return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
        if kind == "input_file":
            name = str(part.get("filename") or "")[:80]
            self._warnings.add("unsupported_content", "An input_file was left out: this server cannot read files.")
            return {"type": "text", "text": f"[The file {name} was left out here: it cannot be read.]"}
        return part
