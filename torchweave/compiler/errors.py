"""Errors of a compilation, each with its source line and cause."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.utils._traceback import shorten_filename

VIEW_MUTATION_HINT = (
    "torch can decompose a write to such a view for a single size only: write to `x[:, i]` instead of a part of `unbind` or "
    "`unfold`, or compute a new tensor"
)

_FAILED_OPERATION = re.compile(
    r"failed to run FX node with fake tensors: call_\w+ (?P<target>.+?)\(\*.*?: got \w+\((?P<quote>['\"])(?P<why>.*?)"
    r"(?P=quote)?\)\n",
    re.DOTALL,
)
"""Dynamo's message of an operation that raises for fake tensors."""
_SYMBOL = re.compile(r"\b(?:[su]|zu?f)\d+\b")
"""A symbol of a size or a float: of an input (`s52`), or of a number that depends on data (`u0`, `zuf0`)."""
_UNKNOWN_CONDITION = re.compile(r"data-dependent expression (.+?) \(unhinted")
_VALUE_DECISION = (
    "forward decides by the values of a tensor (a branch, a loop or a Python number); compute each result and select by "
    "`torch.where`, or put it into a custom op"
)
_UNSUPPORTED_CALL = re.compile(
    r"(?:trace builtin operator|marked that the function|trace the builtin) `(?P<name>[\w.]+?)\.?`", re.DOTALL
)
"""Dynamo's explanation of a call that it does not trace: `print`, `torch.manual_seed`, `time.sleep`."""
_ERROR_IN_FORWARD = re.compile(r"^Observed exception\n.*context: raised exception (.+?)$", re.DOTALL | re.MULTILINE)
"""Dynamo's message of an exception that forward does not catch."""


class CompileError(ValueError):
    """A module cannot be compiled.

    Attributes:
        where: `file:line` in the traced code, or "" when no single line is the cause.
        cause: one sentence.
    """

    def __init__(self, cause: str, where: str = "") -> None:
        super().__init__(f"{where}: {cause}" if where else cause)
        self.where = where
        self.cause = cause


class TraceError(CompileError):
    """The module's forward cannot be captured as one graph. It can still run uncompiled; see `eager_forward`."""


class SizeError(TraceError):
    """The captured graph is valid for some sizes only."""


class InvariantError(TraceError):
    """The captured graph breaks a rule of pieces or CUDA graphs."""


def trace_error(error: BaseException, size_names: Mapping[str, str]) -> TraceError:
    """The TraceError of an error that tracing raised: one sentence, with sizes by their names, and the user's line."""
    places = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    frames = getattr(error, "real_stack", None)
    if not frames and places:
        return TraceError(_one_line_message(error, size_names), ":".join(places[-1]))
    frames = frames or traceback.extract_tb(error.__traceback__)
    return TraceError(
        _one_line_message(error, size_names), f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    )


def name_sizes(text: str, names: Mapping[str, str]) -> str:
    """A text with the names of sizes instead of their symbols: `8*tokens.shape[0]` for `8*s52`."""
    return _SYMBOL.sub(lambda match: names.get(match[0], match[0]), text)


def _one_line_message(error: BaseException, size_names: Mapping[str, str]) -> str:
    text = name_sizes(str(error), size_names)
    if failed := _FAILED_OPERATION.search(f"{text}\n"):
        name = re.sub(r"<(?:built-in )?(?:function|method) (\w+).*", r"\1", failed["target"])
        why = re.sub(r": hint = \d+|^/\S+\.(cpp|h):\d+: ", "", failed["why"])  # also a file of torch's build
        why = " ".join(why.replace("\\n", " ").split())
        if why.count(")") > why.count("("):  # a slip in torch's own text
            why = why.removesuffix(")")
        return (
            f"torch cannot run `{name}` with symbolic sizes: {why.rstrip('.')}; leave a size that it is not valid for out of "
            "`dynamic`, or put it into a custom op"
        )
    if unknown := _UNKNOWN_CONDITION.search(text):
        if _SYMBOL.search(unknown[1]):
            return _VALUE_DECISION
        return f'dynamic_shapes="unbacked" decides no branch on a size, and forward has one (`{unknown[1]}`)'
    if found := _ERROR_IN_FORWARD.search(text):
        return f"forward raises {found[1]} while it is traced"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    title = lines[0] if lines else type(error).__name__
    if title == "Data-dependent branching":
        return _VALUE_DECISION
    if call := _UNSUPPORTED_CALL.search(text):
        return (
            f"forward calls `{call['name']}`, which cannot be captured; call it outside of forward, or in a custom op"
        )
    for line in lines:
        if line.startswith("Explanation:"):
            return f"{title}: {line.removeprefix('Explanation:').strip()}"
    return title if title.startswith(type(error).__name__) else f"{type(error).__name__}: {title}"


def user_location(sloc: Any) -> tuple[str, str]:
    """`file:line` of the user's code that made a guard, and the code; "" where torch did not record it.

    torch's format is `code  # file:line in function`.
    """
    code, _, rest = (getattr(sloc, "maybe_user_loc", None) or "").rpartition("#")
    short, _, line = rest.strip().partition(" in ")[0].rpartition(":")
    if not short:
        return "", code.strip()
    return f"{resolve_file_name(short) or short}:{line}", code.strip()


def resolve_file_name(short: str) -> str:
    """The full name of a file that torch shortened at the front, with or without dots; "" when it is neither a module's file
    nor in the line cache."""
    end = short.lstrip(".")
    for file in (*linecache.cache, *(str(getattr(module, "__file__", "")) for module in list(sys.modules.values()))):
        if shorten_filename(file) == short or (end != short and file.endswith(end)):
            return file
    return ""


def source_location(node: fx.Node) -> str:
    """`file:line` of the user's code that made the node; "" where tracing did not record it."""
    places = source_locations(node)
    return places[-1] if places else ""


def source_locations(node: fx.Node) -> list[str]:
    """`file:line` of each frame that made the node, the innermost last."""
    return [":".join(each) for each in re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")]
