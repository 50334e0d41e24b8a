"""Structural tags: answers of which parts have a form, such as calls within free text, as grammars of llguidance.

The request forms are xgrammar's, which vLLM and SGLang take, and vLLM's older one with `structures` and `triggers`. A text that
is a special token of the model stands for that token; free text holds no special token, except at the end of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchweave.engine.sampling.json_schema import endless_ref

_ANY = "/(?s:.*)/"
_JSON_STYLES = (None, "json")
_MAX_DEPTH = 64


def escape_regex(text: str) -> str:
    """The regular expression that matches exactly `text`."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def structural_lark(
    tag: str | dict[str, Any], tokens: Mapping[str, int], options: Mapping[str, Any], as_lark: Callable[[str], str]
) -> str:
    """The Lark grammar of a structural tag.

    Args:
        tag: `{"type": "structural_tag", "format": ...}`, a format alone, or `{"structures": [...], "triggers": [...]}`.
        tokens: special tokens of the model, by their texts.
        options: llguidance's options of JSON schemas.
        as_lark: converts a grammar of the user's to Lark.

    Raises:
        ValueError: the tag is invalid; the sentence names the part.
    """
    if isinstance(tag, str):
        try:
            tag = json.loads(tag)
        except ValueError as error:
            raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(tag, dict):
        raise ValueError(f"expected an object, but got {json.dumps(tag)[:80]}")
    form = _triggered(tag) if "structures" in tag else tag.get("format") if tag.get("type") == "structural_tag" else tag
    builder = _Builder(tokens, options, as_lark)
    start = builder.rule(form, is_last=True)
    return "\n".join([f"start: {start}", *builder.rules])


def _triggered(tag: dict[str, Any]) -> dict[str, Any]:
    """vLLM's older form as the newer one."""
    structures = _field(tag, "structures", list)
    tags = []
    for each in structures:
        if not isinstance(each, dict):
            raise ValueError('structures must be a list of {"begin": ..., "schema": ..., "end": ...}')
        content = {"type": "json_schema", "json_schema": each.get("schema", {})}
        tags.append({"begin": each.get("begin"), "content": content, "end": each.get("end")})
    return {"type": "triggered_tags", "triggers": _field(tag, "triggers", list), "tags": tags}


def _field(form: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = form.get(name, default)
    if not isinstance(value, kind):
        names = {str: "a text", list: "a list", dict: "an object", int: "a whole number"}
        raise ValueError(f"{form.get('type', 'the tag')} needs {name}, {names[kind]}")
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Builder:
    """Rules of a grammar; `rule` returns the name of a format's."""

    def __init__(self, tokens: Mapping[str, int], options: Mapping[str, Any], as_lark: Callable[[str], str]) -> None:
        self.rules: list[str] = []
        self._tokens, self._options, self._as_lark = tokens, options, as_lark
        texts = sorted(tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._depth = 0

    def rule(self, form: Any, is_last: bool) -> str:
        """Add the rule of a format.

        Args:
            is_last: nothing follows it in the answer.
        """
        kind = form.get("type") if isinstance(form, dict) else None
        build = getattr(self, f"_{kind}", None) if isinstance(kind, str) and kind in _FORMATS else None
        if build is None:
            known = ", ".join(sorted(_FORMATS))
            raise ValueError(f"a format has the type {json.dumps(kind)[:80]}; use one of {known}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        name = build(form, is_last)
        self._depth -= 1
        return name

    def _add(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """A text; special tokens in it are those tokens."""
        parts, at = [], 0
        for match in self._special.finditer(text) if self._special is not None else ():
            parts += [_quoted(text[at : match.start()])] if match.start() > at else []
            parts.append(f"<[{self._tokens[match.group()]}]>")
            at = match.end()
        parts += [_quoted(text[at:])] if at < len(text) else []
        return " ".join(parts) or '""'

    def _free(self, form: dict[str, Any]) -> str:
        """Text without special tokens, and without any of the `excludes` of a format."""
        banned = _field(form, "excludes", list, [])
        if not all(isinstance(each, str) and each for each in banned):
            raise ValueError("excludes must be a list of texts that are not empty")
        if not banned:
            return _ANY
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {_ANY} & ~/(?s:.*)({'|'.join(map(escape_regex, banned))})(?s:.*)/")
        return name

    def _until(self, ends: Sequence[str], max_tokens: int | None = None, free: str = _ANY) -> str:
        """Free text and one of `ends`, which it does not hold. At `max_tokens` an end follows; one that is no special token may be
        missing then."""
        rules = []
        for end in ends:
            match = self._special.search(end) if self._special is not None else None
            head = end if match is None else end[: match.start()]  # what of it is text
            limit = [] if max_tokens is None else [f"max_tokens={max_tokens}"]
            stop = [f"suffix={_quoted(head)}"] if head else []
            rest = f" {self._literal(end[len(head) :])}" if head != end else ""
            if max_tokens == 0:
                rules.append(self._add(self._literal(end)))
            else:
                attributes = ",".join(stop + limit)
                rules.append(self._add(self._add(free, f"[{attributes}]" if attributes else "") + rest))
        return self._add(" | ".join(rules))

    # -- formats -------------------------------------------------------------------------------------------------------

    def _const_string(self, form: dict[str, Any], is_last: bool) -> str:
        return self._add(self._literal(_field(form, "value", str)))

    def _json_schema(self, form: dict[str, Any], is_last: bool) -> str:
        schema = form.get("json_schema", form.get("schema"))
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError("json_schema needs json_schema, an object")
        if ref := endless_ref(schema):
            raise ValueError(f"the reference {ref[:80]!r} leads back to itself, so that no value satisfies it")
        if form.get("style") not in _JSON_STYLES:
            raise ValueError(f"json_schema of the style {form['style']!r} is not supported; use json")
        return self._add(
            f"%json {json.dumps({**schema, 'x-guidance': {**self._options, **schema.get('x-guidance', {})}})}"
        )

    def _regex(self, form: dict[str, Any], is_last: bool) -> str:
        pattern = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", _field(form, "pattern", str))
        return self._add("/" + pattern.replace("\n", "\\n") + "/")

    def _grammar(self, form: dict[str, Any], is_last: bool) -> str:
        return self._add(f"%lark {{\n{self._as_lark(_field(form, 'grammar', str))}\n}}")

    def _any_text(self, form: dict[str, Any], is_last: bool) -> str:
        free = self._free(form)
        return self._add("<[*]>*" if is_last and free == _ANY else free)

    def _reasoning(self, form: dict[str, Any], is_last: bool) -> str:
        """Not xgrammar's: free text up to one of `closing`, at most `max_tokens` long; without `opened` after one of `opening`, or
        none of it."""
        text = self._until(_field(form, "closing", list), form.get("max_tokens"))
        if form.get("opened"):
            return text
        openings = [self._add(f"{self._literal(each)} {text}") for each in _field(form, "opening", list)]
        return self._add(f"({' | '.join(openings)})?")

    def _sequence(self, form: dict[str, Any], is_last: bool) -> str:
        elements = _field(form, "elements", list)
        if not elements:
            raise ValueError("sequence needs at least one element")
        last = len(elements) - 1
        return self._add(" ".join(self.rule(each, is_last and at == last) for at, each in enumerate(elements)))

    def _or(self, form: dict[str, Any], is_last: bool) -> str:
        elements = _field(form, "elements", list)
        if not elements:
            raise ValueError("or needs at least one element")
        return self._add(" | ".join(self.rule(each, is_last) for each in elements))

    def _optional(self, form: dict[str, Any], is_last: bool) -> str:
        return self._add(f"({self.rule(form.get('content'), False)})?")

    def _star(self, form: dict[str, Any], is_last: bool) -> str:
        return self._add(f"({self.rule(form.get('content'), False)})*")

    def _plus(self, form: dict[str, Any], is_last: bool) -> str:
        return self._add(f"({self.rule(form.get('content'), False)})+")

    def _repeat(self, form: dict[str, Any], is_last: bool) -> str:
        least, most = _field(form, "min", int, 0), form.get("max")
        bounds = f"{least}," if most in (None, -1) else f"{least},{_field(form, 'max', int)}"
        return self._add(f"({self.rule(form.get('content'), False)}){{{bounds}}}")

    def _tag(self, form: dict[str, Any], is_last: bool) -> str:
        return self._tag_after(form, "")

    def _tag_after(self, form: Any, trigger: str) -> str:
        """A tag whose `begin` has been written as far as `trigger`."""
        if not isinstance(form, dict):
            raise ValueError('a tag must be {"begin": ..., "content": ..., "end": ...}')
        begin, content = _field(form, "begin", str)[len(trigger) :], form.get("content")
        end: Any = form.get("end")
        ends: list[Any] = end if isinstance(end, list) else [end]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise ValueError("a tag needs end, a text or a list of texts")
        head = f"{self._literal(begin)} " if begin else ""
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            return self._add(head + self._until(ends, free=self._free(content)))
        closing = " | ".join(self._literal(end) for end in ends)
        return self._add(f"{head}{self.rule(content, False)} ({closing})")

    def _triggered_tags(self, form: dict[str, Any], is_last: bool) -> str:
        triggers, tags = _field(form, "triggers", list), _field(form, "tags", list)
        if not triggers or not tags or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise ValueError("triggered_tags needs triggers, a list of texts, and tags")
        free = self._free(form)
        parts, left = [], list(tags)
        for trigger in triggers:
            begun = [tag for tag in left if isinstance(tag, dict) and str(tag.get("begin", "")).startswith(trigger)]
            left = [tag for tag in left if tag not in begun]
            if begun:
                bodies = " | ".join(self._tag_after(tag, trigger) for tag in begun)
                parts.append(f"{self._until([trigger], free=free)} ({bodies})")
        if left:
            raise ValueError(f"no trigger begins the tag {json.dumps(left[0])[:80]}")
        some = f"({' | '.join(parts)})"
        rest = self._add(free)
        if form.get("stop_after_first"):
            return self._add(some if form.get("at_least_one") else f"{some} | {rest}")
        return self._add(f"{some}+ {rest}" if form.get("at_least_one") else f"{some}* {rest}")

    def _tags_with_separator(self, form: dict[str, Any], is_last: bool) -> str:
        tags = self._add(" | ".join(self._tag_after(tag, "") for tag in _field(form, "tags", list)) or '""')
        separator = self._literal(_field(form, "separator", str))
        many = tags if form.get("stop_after_first") else f"{tags} ({separator} {tags})*"
        return self._add(many if form.get("at_least_one") else f"({many})?")


_FORMATS = frozenset(
    (
        "const_string", "json_schema", "regex", "grammar", "any_text", "reasoning", "sequence", "or", "optional", "star", "plus",
        "repeat", "tag", "triggered_tags", "tags_with_separator",
    )
)  # fmt: skip
