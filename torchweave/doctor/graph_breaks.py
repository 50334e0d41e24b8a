"""Graph breaks: lines that Dynamo cannot trace, classified by their operation."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchweave.doctor.eager_run import EagerResult
from torchweave.doctor.finding import Finding, Rules
from torchweave.doctor.source_reader import Statement, is_user_code, statement
from torchweave.doctor.tracing import Break, TraceResult

_RULES = Rules("graph_break", {
    "print": (
        "`print` in a forward breaks the graph and would not be part of it",
        "remove it, or print in the caller",
    ),
    "tolist": (
        ".tolist() needs a tensor's values on the host",
        "keep the values in a tensor, move the line into a custom op, or compute it before the forward and pass the result",
    ),
    "item": (
        "the conversion of a tensor to a Python number needs its value on the host",
        "keep a tensor of one element; arithmetic, comparison and indexing accept it",
    ),
    "data_dependent_shape": (
        "the shape of the result depends on a tensor's values",
        "use a mask (torch.where, masked_fill) that keeps the shape, or a custom op whose output has a fixed shape",
    ),
    "data_dependent_control": (
        "the branch depends on a tensor's values",
        "compute both sides and select with torch.where, or decide before the forward and pass the result",
    ),
    "custom_object": (
        "Dynamo cannot trace the method of an object that is no module{detail}",
        "call it in __init__ and store the result as a bool or number",
    ),
    "native_call": (
        "the line calls a function of a compiled extension that is not registered with torch{detail}",
        "register it as a custom op with a fake kernel, or call it outside the forward",
    ),
    "other": ("Dynamo cannot trace the line{detail}", "move it out of the forward, or into a custom op"),
})  # fmt: skip
_HOST = {"float", "int", "bool", ".item", ".__int__", ".__float__"}
_SHAPED = {".nonzero", ".unique", ".masked_select", ".unique_consecutive", ".argwhere"}


def find(eager_result: EagerResult, trace_result: TraceResult) -> Iterator[Finding]:
    """All breaks of the trace, and those that the eager run shows in frames that Dynamo skipped."""
    for one in trace_result.breaks:
        if one.where in eager_result.lines_in_ops:
            continue
        text = _first_clause(one.text)
        detail = f": {text}" if text else ""
        yield _RULES.finding(_rule(one, statement(one.where)), _line_to_change(one), detail=detail)
    if not trace_result.breaks and not trace_result.errors:
        return
    for where in sorted(eager_result.lines):
        if "print" in statement(where).calls():
            yield _RULES.finding("print", where)
    for where in sorted(filter(None, eager_result.host_syncs)):
        yield _RULES.finding(_host_sync_rule(statement(where)), where)


def _line_to_change(one: Break) -> str:
    """The line to change: for a method of a plain object, its call site."""
    own = [place for place in one.callers if is_user_code(place.rpartition(":")[0])]
    while len(own) > 1 and statement(own[-1]).plain_object_method():
        own.pop()
    return own[-1] if own else one.where


def _rule(one: Break, line: Statement) -> str:
    calls, kind = line.calls(), one.kind.lower() + " " + _first_clause(one.text).lower()
    if "print" in calls and "`print`" in one.text:
        return "print"
    if "tolist" in kind:
        return "tolist"
    if "item()" in kind:
        return _host_sync_rule(line)
    if "dynamic shape" in kind or "output shape depends" in kind:
        return "data_dependent_shape"
    if "data-dependent" in kind or "data dependent" in kind:
        return "data_dependent_control"
    if line.plain_object_method() or "unsupported method" in kind:
        return "custom_object"
    if "skipped" in kind or "builtin" in kind or "function call" in kind:
        return "native_call"
    return "other"


def _host_sync_rule(line: Statement) -> str:
    """The rule for a line that made the host wait for a tensor's value."""
    calls = line.calls()
    if ".tolist" in calls:
        return "tolist"
    if calls & _HOST:
        return "item"
    if calls & _SHAPED:
        return "data_dependent_shape"
    return "data_dependent_control" if line.is_branch() else "item"


def _first_clause(text: str) -> str:
    """Dynamo's explanation of a break as a clause, else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    prefix = "Explanation:"
    explanation = next((line.removeprefix(prefix).strip() for line in lines if line.startswith(prefix)), "")
    sentence = explanation or (lines[0] if lines else "")
    return re.split(r"\.?`? This function", sentence)[0].rstrip(".")
