"""What a chat template takes, found by rendering small conversations: a template is a program, and its text tells little.

Messages come in one form, OpenAI's. Templates differ: one appends a call's arguments to a text and fails on an object, another
prints an object as Python does; one takes a system message only at the beginning; one reads contents in parts. `probe` finds what
a template takes, and `adapt` gives it messages in that form.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Messages = list[dict[str, Any]]
Render = Callable[..., str]
"""`render(messages, **variables)`: the prompt's text; raises whatever the template raises."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Levels of reasoning effort of APIs, the lowest first."""
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_SYSTEM_ROLES = ("system", "developer")
_NINE = re.compile(r"[a-zA-Z0-9]{9}")
_JOINT = "\n\n"  # between messages that become one


@dataclass(frozen=True)
class TemplateTraits:
    """What a chat template takes. The defaults are those of a template that shows nothing of the messages.

    Attributes:
        part_roles: roles whose content may be a list of parts.
        text_roles: roles whose content may be a text.
        system: a system message at the beginning.
        systems: several of them.
        later_system: one that is not at the beginning.
        developer: the role `developer`.
        users: two messages of the user in a row.
        user_after_tool: a message of the user after a tool's result.
        arguments: form of a call's arguments.
        parallel_calls: several calls in one message.
        empty_content: content of a message that has calls only.
        reasoning: name of a message's reasoning; None: it is not shown.
        reasoning_beside_text: a message with calls may have reasoning and a text.
        call_ids: any; nine letters or digits; or `functions.NAME:NUMBER`, which stands for the function's name.
        efforts: levels of `reasoning_effort` that are not refused.
    """

    part_roles: frozenset[str] = frozenset()
    text_roles: frozenset[str] = frozenset(("system", "user", "assistant", "tool"))
    system: bool = True
    systems: bool = False
    later_system: bool = True
    developer: bool = False
    users: bool = True
    user_after_tool: bool = True
    arguments: Literal["object", "text"] = "object"
    parallel_calls: bool = True
    empty_content: str | None = ""
    reasoning: str | None = None
    reasoning_beside_text: bool = True
    call_ids: Literal["any", "nine", "named"] = "any"
    efforts: tuple[str, ...] = EFFORTS

    def nearest_effort(self, effort: str) -> str:
        """The nearest level that is not refused, the lower of two; `effort` itself if it is none of `EFFORTS`."""
        if effort not in EFFORTS or effort in self.efforts or not self.efforts:
            return effort
        at = EFFORTS.index(effort)
        return min(self.efforts, key=lambda level: abs(EFFORTS.index(level) - at))


# -- probes ------------------------------------------------------------------------------------------------------------

_TEXTS = ("kqxone", "kqxtwo", "kqxthree")
_KEY, _VALUE, _NAME = "kqxkey", "kqxvalue", "kqxname"
_ARGUMENTS = {_KEY: _VALUE}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}


def probe(render: Render, source: str) -> TemplateTraits:
    """Find what a template takes; about thirty small renderings.

    Args:
        source: text of the template.
    """
    return _Probe(render, source).traits()


class _Probe:
    def __init__(self, render: Render, source: str) -> None:
        self._render, self._source = render, source
        self._user = {"role": "user", "content": _TEXTS[0]}
        self._as_parts = False
        plain = self._text([self._user])
        self._works, self._shows = plain is not None, _TEXTS[0] in (plain or "")
        if not self._shows:
            self._as_parts = True
            self._shows = _TEXTS[0] in (self._text([self._user]) or "")
            self._as_parts = self._shows
            self._works = self._works or self._shows
        self._call_id = "call_kqx0123456789abcdef"
        self._arguments: Any = _ARGUMENTS
        self._empty: str | None = ""

    def _text(self, messages: Messages, **variables: Any) -> str | None:
        if self._as_parts:
            messages = [{**each, "content": _as_parts(each["content"] or "")} for each in messages]
        try:
            return self._render(messages, **variables)
        except Exception:  # templates are programs
            return None

    def _holds(self, messages: Messages, *texts: str, **variables: Any) -> bool:
        """Whether the template takes messages, and shows `texts` if it shows texts at all."""
        text = self._text(messages, **variables)
        return text is not None and (not self._shows or all(each in text for each in texts))

    def traits(self) -> TemplateTraits:
        efforts = tuple(level for level in EFFORTS if self._text([self._user], reasoning_effort=level) is not None)
        if not self._works:  # it needs variables of its own
            return TemplateTraits(efforts=efforts or EFFORTS)
        one, two, three = _TEXTS
        system, later = {"role": "system", "content": two}, {"role": "system", "content": three}
        answer = {"role": "assistant", "content": "kqxanswer"}
        takes_system = self._holds([system, self._user], one, two)
        first = [system] if takes_system else []
        users = [self._user, {"role": "user", "content": two}]
        calls = self._call_traits()
        return TemplateTraits(
            part_roles=frozenset(role for role in self._roles() if self._reads_parts(role)),
            text_roles=frozenset(role for role in self._roles() if self._reads_text(role)),
            system=takes_system,
            systems=self._holds([system, later, self._user], *_TEXTS),
            later_system=self._holds([*first, self._user, answer, later, self._user], three)
            and self._holds([*first, self._user, later], three),
            developer="developer" in self._source,
            users=self._holds(users, one, two),
            efforts=efforts,
            **calls,
        )

    # -- contents ------------------------------------------------------------------------------------------------------

    def _roles(self) -> tuple[str, ...]:
        return ("system", "user", "assistant", "tool")

    def _with_content(self, role: str, content: Any) -> Messages:
        message = {"role": role, "content": content}
        if role == "system":
            return [message, self._user]
        if role == "user":
            return [message]
        if role == "assistant":
            return [self._user, message, self._user]
        return [self._user, self._calling(), message | {"tool_call_id": self._call_id, "name": _NAME}]

    def _reads_parts(self, role: str) -> bool:
        parts = [{"type": "text", "text": text} for text in _TEXTS[1:]]
        text = self._text(self._with_content(role, parts), tools=[_TOOL] if role == "tool" else None)
        shown = text is not None and all(each in text for each in _TEXTS[1:])
        return shown and re.search(r"""['"]type['"]: ?['"]text['"]""", text or "") is None

    def _reads_text(self, role: str) -> bool:
        if self._as_parts:
            return False
        return self._holds(self._with_content(role, _TEXTS[1]), _TEXTS[1]) or not self._reads_parts(role)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _calling(self, count: int = 1, **fields: Any) -> dict[str, Any]:
        """A message of the assistant with calls."""
        calls = [
            {
                "id": self._call_id[:-1] + str(number),
                "type": "function",
                "function": {"name": _NAME + str(number or ""), "arguments": self._arguments},
            }
            for number in range(count)
        ]
        return {"role": "assistant", "content": self._empty, "tool_calls": calls, **fields}

    def _turn(self, calling: dict[str, Any]) -> Messages:
        results = [
            {"role": "tool", "content": f"kqxresult{number}", "tool_call_id": call["id"], "name": _NAME}
            for number, call in enumerate(calling["tool_calls"])
        ]
        return [self._user, calling, *results]

    def _call_text(self) -> str | None:
        return self._text(self._turn(self._calling()), tools=[_TOOL])

    def _call_traits(self) -> dict[str, Any]:
        """Find the form of calls: of their ids, their arguments, and the content beside them, in this order."""
        call_ids = "any"
        if self._call_text() is None and self._call_text_as_json() is None:
            self._call_id, call_ids = "kqxcall00", "nine"
        arguments = self._find_call_form()
        if arguments is None:  # it takes no calls
            return {}
        shown = self._text(self._turn(self._calling()))
        if call_ids == "any" and shown is not None and self._call_id[:-1] in shown and _NAME not in shown:
            call_ids = "named"
        follow_up = {"role": "user", "content": _TEXTS[1]}
        two = self._turn(self._calling(2))
        return {
            "call_ids": call_ids,
            "arguments": arguments,
            "empty_content": self._empty,
            "parallel_calls": self._holds(two, "kqxresult0", "kqxresult1", *self._marks(call_ids), tools=[_TOOL]),
            "user_after_tool": self._holds([*self._turn(self._calling()), follow_up], _TEXTS[1], tools=[_TOOL]),
            **self._reasoning_traits(),
        }

    def _marks(self, call_ids: str) -> tuple[str, str]:
        """What shows each of two calls."""
        return (self._call_id[:-1] + "0", self._call_id[:-1] + "1") if call_ids == "named" else (_NAME, _NAME + "1")

    def _call_text_as_json(self) -> str | None:
        self._arguments = json.dumps(_ARGUMENTS)
        text = self._call_text()
        self._arguments = _ARGUMENTS
        return text

    def _find_call_form(self) -> Literal["object", "text"] | None:
        """Find the form of arguments, and the content beside calls: some templates show calls only where it is null."""
        for content in ("", None):
            self._empty = content
            if (form := self._shown_form()) is not None:
                return form
        self._empty = ""
        return None if self._call_text() is None else "object"

    def _shown_form(self) -> Literal["object", "text"] | None:
        """The form of arguments that is shown as JSON, or as the template's own form; None if neither is."""
        of_object, of_text = self._call_text(), self._call_text_as_json()
        printed = of_object is not None and f"{{'{_KEY}'" in of_object
        if of_object is not None and not printed and (not self._shows or _VALUE in of_object):
            return "object"
        if of_text is not None and (not self._shows or json.dumps(_ARGUMENTS) in of_text):
            self._arguments = json.dumps(_ARGUMENTS)
            return "text"
        return None

    def _reasoning_traits(self) -> dict[str, Any]:
        thought: dict[str, Any]
        for name in _REASONING_FIELDS:
            thought = {name: "kqxthought"}
            turn = self._turn(self._calling(**thought))
            if self._shows and self._holds(turn, "kqxthought", tools=[_TOOL]):
                both = self._turn(self._calling(**thought, content=_TEXTS[1]))
                return {
                    "reasoning": name,
                    "reasoning_beside_text": self._holds(both, "kqxthought", _TEXTS[1], tools=[_TOOL]),
                }
        thought = dict.fromkeys(_REASONING_FIELDS, "kqxthought")
        both = self._turn(self._calling(**thought, content=_TEXTS[1]))
        return {"reasoning_beside_text": self._text(both, tools=[_TOOL]) is not None}


# -- messages in the form that a template takes -------------------------------------------------------------------------


def adapt(
    messages: Sequence[Mapping[str, Any]],
    traits: TemplateTraits,
    content_format: Literal["auto", "string", "openai"] = "auto",
) -> Messages:
    """Bring messages into the form that a template takes; nothing of them is lost, and none moves before an earlier one.

    Args:
        content_format: contents of several parts as the template reads them (auto), as texts, or as parts.

    Raises:
        ValueError: a content is neither a text nor a list of parts.
    """
    adapted = _placed([_copied(each) for each in messages], traits)
    if traits.call_ids != "any":
        _rename_calls(adapted, traits)
    for message in adapted:
        _adapt_calls(message, traits)
        _adapt_reasoning(message, traits)
        _adapt_content(message, traits, content_format)
    return adapted if traits.parallel_calls else _one_call_each(adapted)


def content_text(content: Any) -> str | None:
    """The text content of a chat message; text parts are joined by newlines.

    Raises:
        ValueError: the content is neither a text nor a list of text parts.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise ValueError("expected a text or a list of parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind) if kind in ("text", "refusal") else None  # type: ignore[union-attr]
        if not isinstance(text, str):
            actual = f"a part of type {kind!r}" if isinstance(kind, str) else "something else"
            actual += " without a text" if kind in ("text", "refusal") else ""
            raise ValueError(
                f'only text parts are supported: expected {{"type": "text", "text": ...}}, but got {actual}'
            )
        texts.append(text)
    return "\n".join(texts)


def _copied(message: Mapping[str, Any]) -> dict[str, Any]:
    copied = dict(message)
    if copied.get("tool_calls"):
        copied["tool_calls"] = [dict(call) if isinstance(call, Mapping) else call for call in copied["tool_calls"]]
    return copied


def _placed(messages: Messages, traits: TemplateTraits) -> Messages:
    """System messages where the template takes them, and no two messages in a row that it refuses."""
    placed: Messages = []
    for message in messages:
        role = message["role"]
        if role == "developer" and not traits.developer:
            role = "system"
        if role in _SYSTEM_ROLES:
            leads = all(each["role"] in _SYSTEM_ROLES for each in placed)
            if leads and placed and not traits.systems:
                _append(placed[-1], message)
                continue
            if not (traits.system if leads else traits.later_system):
                role = "user"
        message["role"] = role
        last = placed[-1] if placed else {}
        if (role == "user" and last.get("role") == "tool" and not traits.user_after_tool) or (
            not traits.users
            and role == last.get("role")
            and role in ("user", "assistant")
            and _mergeable(last, message)
        ):
            _append(last, message)
        else:
            placed.append(message)
    return placed


def _mergeable(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    return not last.get("tool_calls") and not any(message.get(name) for name in _REASONING_FIELDS)


def _append(message: dict[str, Any], other: dict[str, Any]) -> None:
    """Add another message to the end of a message."""
    first, second = message.get("content") or "", other.get("content") or ""
    if isinstance(first, str) and isinstance(second, str):
        message["content"] = first + _JOINT + second if first and second else first or second
    else:
        message["content"] = [*_as_parts(first), *_as_parts(second)]
    if other.get("tool_calls"):
        message["tool_calls"] = other["tool_calls"]


def _as_parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def _rename_calls(messages: Messages, traits: TemplateTraits) -> None:
    """Give calls, and the results of them, ids that the template takes."""
    renamed: dict[Any, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls") or ():
            given = call.get("id")
            if traits.call_ids == "nine":
                call["id"] = _nine(given)
            else:
                function = call.get("function")
                name = function.get("name") if isinstance(function, Mapping) else None
                wanted = isinstance(given, str) and re.fullmatch(rf"functions\.{re.escape(str(name))}:\d+", given)
                call["id"] = given if wanted else f"functions.{name}:{number}"
                number += 1
            renamed[given] = call["id"]
        if "tool_call_id" in message:
            given = message["tool_call_id"]
            kept = renamed.get(given, given)
            message["tool_call_id"] = _nine(kept) if traits.call_ids == "nine" else kept


def _nine(call_id: Any) -> str:
    """Nine letters or digits that stand for an id; the same for the same id."""
    text = str(call_id)
    return text if _NINE.fullmatch(text) else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _adapt_calls(message: dict[str, Any], traits: TemplateTraits) -> None:
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
        return
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, Mapping):
            continue
        call.setdefault("type", "function")
        call["function"] = {**function, "arguments": _arguments(function.get("arguments"), traits.arguments)}


def _arguments(arguments: Any, form: Literal["object", "text"]) -> Any:
    if form == "text":
        if isinstance(arguments, str) and arguments:
            return arguments
        return json.dumps(arguments or {}, ensure_ascii=False)
    if arguments is None or not isinstance(arguments, str):
        return arguments or {}
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _adapt_reasoning(message: dict[str, Any], traits: TemplateTraits) -> None:
    """Reasoning under the name that the template reads, alone where it refuses a text beside it."""
    given = [name for name in _REASONING_FIELDS if isinstance(message.get(name), str) and message[name]]
    if not given:
        return
    text = message[given[0]]
    name = traits.reasoning or (given[0] if "reasoning_content" in given else "reasoning_content")
    if traits.reasoning is not None:
        for other in given:
            message.pop(other)
    content = message.get("content")
    if message.get("tool_calls") and content and not traits.reasoning_beside_text and isinstance(content, str):
        text, message["content"] = text + _JOINT + content, traits.empty_content
    message[name] = text


def _adapt_content(
    message: dict[str, Any], traits: TemplateTraits, content_format: Literal["auto", "string", "openai"]
) -> None:
    content = message.get("content")
    if content is None or content == "" or content == []:
        message["content"] = traits.empty_content if message.get("tool_calls") else ""
        return
    role = message["role"] if message["role"] != "developer" else "system"
    if isinstance(content, str):
        if content_format == "openai" or (content_format == "auto" and role not in traits.text_roles):
            message["content"] = _as_parts(content)
        return
    if has_media(content):
        return
    text = content_text(content)
    if content_format == "string" or (content_format == "auto" and role not in traits.part_roles):
        message["content"] = text


def has_media(content: Any) -> bool:
    """Whether a content has parts that are no texts."""
    return isinstance(content, (list, tuple)) and any(
        isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in content
    )


def _one_call_each(messages: Messages) -> Messages:
    """Messages with one call each, followed by its result, for a template that takes no other."""
    results = {each.get("tool_call_id"): each for each in messages if each["role"] == "tool"}
    separate: Messages = []
    moved: list[int] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if id(message) not in moved:
                separate.append(message)
            continue
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": "assistant", "content": ""}
            separate.append({**first, "tool_calls": [call]})
            result = results.get(call.get("id")) if isinstance(call, dict) else None
            if result is not None and id(result) not in moved:
                separate.append(result)
                moved.append(id(result))
    return separate
