"""Custom tools, whose input is a text: functions with one text for the model, and their own form for clients."""

from __future__ import annotations

import json
from typing import Any

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_function(name: Any, description: Any, form: Any) -> dict[str, Any]:
    """A function with one text; a grammar is told to the model.

    Args:
        form: `{"type": "grammar", "syntax": ..., "definition": ...}`, `{"type": "text"}`, or None. Chat requests nest the grammar.
    """
    form = form if isinstance(form, dict) else {}
    form = form["grammar"] if isinstance(form.get("grammar"), dict) else form
    text = description if isinstance(description, str) else ""
    if isinstance(form.get("definition"), str):
        text += f"\n\nThe input follows this {form.get('syntax') or ''} grammar:\n{form['definition']}"
    return {"name": name, "description": text.strip(), "parameters": PARAMETERS}


def custom_arguments(text: Any) -> str:
    """The arguments of a custom tool's call."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The text of a custom tool's call; arguments of another form are the text themselves."""
    for end in ("", '"}', '\\"}'):  # of a call that was cut off
        try:
            fields = json.loads(arguments + end)
        except (ValueError, RecursionError):
            continue
        value = fields.get("input") if isinstance(fields, dict) else None
        return value if isinstance(value, str) else arguments
    return arguments


def from_custom_call(call: Any) -> Any:
    """A call of a message; one of a custom tool as that of a function."""
    if not isinstance(call, dict) or call.get("type") != "custom" or not isinstance(call.get("custom"), dict):
        return call
    custom = call["custom"]
    function = {"name": custom.get("name"), "arguments": custom_arguments(custom.get("input"))}
    return {
        **{name: value for name, value in call.items() if name != "custom"},
        "type": "function",
        "function": function,
    }
