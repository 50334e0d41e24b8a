"""The forms in which models call tools, each as a parser of an answer as it comes."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection

from torchweave.serving.openai.tools.base import Arguments, Call, Piece, Text, TextGate, held_back
from torchweave.serving.openai.tools.json_scanner import CallScanner, Value

_BEHIND_A_CALL = " \t\r\n}"
"""Read over: small models close an object once too often."""


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several of them, with text before (Hermes, Qwen)."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._gate = TextGate()
        self._rest = ""  # text that is not certain yet
        self._scanner: CallScanner | None = None
        self._closing = False  # a call was read, and its closing mark is still to come
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        self._rest += text
        pieces: list[Piece] = []
        while self._rest and self._step(pieces):
            pass
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Read on; returns whether there may be more to read in what is left."""
        if self._scanner is not None:
            return self._read_call(self._scanner, pieces)
        if self._closing:
            behind = self._rest.lstrip(_BEHIND_A_CALL)
            if behind.startswith(self._CLOSE):
                self._rest = behind[len(self._CLOSE) :]
            elif self._CLOSE.startswith(behind):
                return False
            self._closing = False
            return True
        before, found, behind = self._rest.partition(self._OPEN)
        if found:
            pieces += self._gate.text(before)
            self._rest = behind
            self._scanner = CallScanner(self._num_calls, self._known)
            return True
        keep = held_back(self._rest, self._OPEN)
        pieces += self._gate.text(self._rest[: len(self._rest) - keep])
        self._rest = self._rest[len(self._rest) - keep :]
        return False

    def _read_call(self, scanner: CallScanner, pieces: list[Piece]) -> bool:
        new, self._rest = scanner.feed(self._rest)
        if scanner.began:
            self._gate.call()
            pieces += new
        if scanner.failed:
            pieces += self._gate.text(self._OPEN + scanner.raw)
            self._scanner = None
        elif scanner.done:
            self._num_calls += 1
            self._closing = True
            self._scanner = None
        return bool(self._rest)

    def finish(self) -> list[Piece]:
        left = self._rest
        if self._scanner is not None and not self._scanner.began:
            left = self._OPEN + self._scanner.raw + left
        pieces = self._gate.text("" if self._closing else left)
        return pieces + self._gate.finish(had_calls=self._num_calls > 0)


class JsonObjects:
    """The whole answer is calls: `{"name": ..., "parameters": {...}}`, with `;` or white space between (Llama 3).

    Args:
        opening, between, closing: characters that are read over before the first call, between calls, and behind the last.
        marker: text that may stand before the first call.
    """

    def __init__(
        self, known: Collection[str], marker: str = "<|python_tag|>", opening: str = "", between: str = ";"
    ) -> None:
        self._known = known
        self._marker = marker
        self._opening = opening
        self._between = between + (opening and "]")
        self._scanner: CallScanner | None = None
        self._num_calls = 0
        self._head = ""  # what came before the first call
        self._is_text = False

    def feed(self, text: str) -> list[Piece]:
        if self._is_text:
            return [Text(text)] if text else []
        if self._scanner is None and self._num_calls == 0:
            return self._begin(text)
        return self._read(text)

    def _begin(self, text: str) -> list[Piece]:
        self._head += text
        body = self._head.lstrip()
        if body.startswith(self._marker):
            body = body[len(self._marker) :].lstrip()
        elif self._marker.startswith(body):
            return []
        if self._opening and body.startswith(self._opening):
            body = body[len(self._opening) :].lstrip()
            opened = True
        else:
            opened = not self._opening
        if not body:
            return []
        if not opened or body[0] != "{":
            return self._as_text(self._head)
        return self._read(body)

    def _read(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._scanner is None:
                text = text.lstrip(self._between + _BEHIND_A_CALL)
                if not text:
                    break
                self._scanner = CallScanner(self._num_calls, self._known)
            new, text = self._scanner.feed(text)
            if self._scanner.began:
                pieces += new
            if self._scanner.failed:
                return pieces + self._as_text(self._before() + self._scanner.raw + text)
            if self._scanner.done:
                self._num_calls += 1
                self._scanner = None
        return pieces

    def _before(self) -> str:
        """What was read over before the first call, if it is the first that is being read."""
        return self._head[: self._head.find("{")] if self._num_calls == 0 else ""

    def _as_text(self, text: str) -> list[Piece]:
        self._is_text, self._scanner = True, None
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        if self._is_text:
            return []
        if self._scanner is not None:
            return [] if self._scanner.began else self._as_text(self._before() + self._scanner.raw)
        return self._as_text(self._head) if self._num_calls == 0 else []


class Mistral:
    """`[TOOL_CALLS]` and then a JSON list of calls, or `name{...}`, `name[ARGS]{...}` or `name[CALL_ID]id[ARGS]{...}` once or more,
    each behind the mark."""

    _MARK = "[TOOL_CALLS]"

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._gate = TextGate()
        self._rest = ""
        self._list: JsonObjects | None = None
        self._value: Value | None = None  # arguments that are being read
        self._in_name = False
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        if self._list is not None:
            return self._of_list(self._list.feed(text))
        self._rest += text
        pieces: list[Piece] = []
        while self._rest and self._step(pieces):
            pass
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        if self._value is not None:
            return self._read_arguments(self._value, pieces)
        if self._in_name:
            return self._read_name(pieces)
        before, found, behind = self._rest.partition(self._MARK)
        if found:
            pieces += self._gate.text(before)
            self._rest, self._in_name = behind, True
            return True
        keep = held_back(self._rest, self._MARK)
        pieces += self._gate.text(self._rest[: len(self._rest) - keep])
        self._rest = self._rest[len(self._rest) - keep :]
        return False

    def _read_name(self, pieces: list[Piece]) -> bool:
        if self._rest.lstrip().startswith("[") and not self._num_calls:
            self._list = JsonObjects(self._known, marker=self._MARK, opening="[", between=",")
            pieces += self._of_list(self._list.feed(self._MARK + self._rest))
            self._rest = ""
            return False
        name, brace, _ = self._rest.partition("{")
        if not brace:
            return False
        known = name.partition("[")[0].strip()
        self._in_name = False
        if known not in self._known:
            pieces += self._gate.text(self._MARK + name)
            self._rest = self._rest[len(name) :]
            return True
        self._gate.call()
        pieces.append(Call(self._num_calls, known))
        self._num_calls += 1
        self._value = Value()
        self._rest = self._rest[len(name) :]
        return True

    def _read_arguments(self, value: Value, pieces: list[Piece]) -> bool:
        taken = 0
        while taken < len(self._rest) and not value.done:
            value.take(self._rest[taken])
            taken += 1
        pieces.append(Arguments(self._num_calls - 1, self._rest[:taken]))
        self._rest = self._rest[taken:]
        if value.done:
            self._value = None
        return bool(self._rest)

    def _of_list(self, pieces: list[Piece]) -> list[Piece]:
        """The list's pieces, as parts of the whole answer."""
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Text):
                found += self._gate.text(piece.text)
                continue
            if isinstance(piece, Call):
                self._gate.call()
                self._num_calls += 1
            found.append(piece)
        return found

    def finish(self) -> list[Piece]:
        if self._list is not None:
            return [*self._of_list(self._list.finish()), *self._gate.finish(had_calls=self._num_calls > 0)]
        left = self._MARK + self._rest if self._in_name else self._rest
        return [*self._gate.text(left), *self._gate.finish(had_calls=self._num_calls > 0)]


class Pythonic:
    """`[function(name=value, ...), ...]`, the whole answer (Llama 3.2 and 4). Calls are told when the answer has ended."""

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._text = ""
        self._is_text = False

    def feed(self, text: str) -> list[Piece]:
        if self._is_text:
            return [Text(text)] if text else []
        self._text += text
        body = self._text.lstrip()
        if not body or body.startswith("["):
            return []
        self._is_text = True
        return [Text(self._text)]

    def finish(self) -> list[Piece]:
        if self._is_text or not self._text:
            return []
        calls = self._calls()
        if calls is None:
            return [Text(self._text)]
        pieces: list[Piece] = []
        for index, (name, arguments) in enumerate(calls):
            pieces += [Call(index, name), Arguments(index, json.dumps(arguments, ensure_ascii=False))]
        return pieces

    def _calls(self) -> list[tuple[str, dict[str, object]]] | None:
        """The calls that the text is; None when it is anything else."""
        try:
            tree = ast.parse(self._text.strip(), mode="eval").body
            if not isinstance(tree, ast.List) or not tree.elts:
                return None
            found: list[tuple[str, dict[str, object]]] = []
            for call in tree.elts:
                if not (isinstance(call, ast.Call) and not call.args and ast.unparse(call.func) in self._known):
                    return None
                arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg}
                json.dumps(arguments)
                found.append((ast.unparse(call.func), arguments))
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            return None
        return found


class Forced:
    """A JSON list of calls that the answer was held to (`tool_choice: required`)."""

    def __init__(self, known: Collection[str]) -> None:
        self._objects = JsonObjects(known, marker="", opening="[", between=",")

    def feed(self, text: str) -> list[Piece]:
        return self._objects.feed(text)

    def finish(self) -> list[Piece]:
        return []  # what is held back is the beginning of a call that was cut off, and no text


class Named:
    """The arguments of one call that the answer was held to (`tool_choice` names a function)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = False

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = [] if self._began else [Call(0, self._name)]
        self._began = True
        return [*pieces, Arguments(0, text)] if text else pieces

    def finish(self) -> list[Piece]:
        return [] if self._began else [Call(0, self._name)]


Make = Callable[[Collection[str]], Hermes | JsonObjects | Mistral | Pythonic]
FORMATS: dict[str, Make] = {"hermes": Hermes, "llama3_json": JsonObjects, "mistral": Mistral, "pythonic": Pythonic}
