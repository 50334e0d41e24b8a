"""Graph breaks: what Dynamo cannot put into the graph, told apart by what the line does."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchweave.doctor.eager_run import EagerResult
from torchweave.doctor.finding import Finding
from torchweave.doctor.source_reader import Statement, is_user_code, statement
from torchweave.doctor.tracing import Break, TraceResult

_RULES: dict[str, tuple[str, str]] = {
    "print": (
        "`print` in a forward breaks the graph, and would be left out of it anyway",
        "take it out, or print where the model is called",
    ),
    "tolist": (
        ".tolist() needs the values of a tensor on the host",
        "keep the values in a tensor, or do it inside a custom op, or before the forward and pass the result in",
    ),
    "item": (
        "a tensor is turned into a Python number, which needs its value on the host",
        "keep it a tensor of one element: arithmetic, comparison and indexing take it as it is",
    ),
    "data_dependent_shape": (
        "the shape of the result depends on the values of a tensor",
        "use a mask (torch.where, masked_fill) that keeps the shape, or do it inside a custom op whose output has a fixed shape",
    ),
    "data_dependent_control": (
        "which branch runs depends on the values of a tensor",
        "compute both and choose with torch.where, or decide before the forward and pass the result in",
    ),
    "custom_object": (
        "the method of an object that is no module cannot be traced",
        "call it once in __init__ and keep the result as a bool or number",
    ),
    "native_call": (
        "a function of a compiled extension, unknown to torch, is called",
        "register it as a custom op with a fake kernel, or call it outside of the forward",
    ),
    "other": ("Dynamo cannot trace this line", "move it out of the forward, or into a custom op"),
}
_HOST = {"float", "int", "bool", ".item", ".__int__", ".__float__"}
_SHAPED = {".nonzero", ".unique", ".masked_select", ".unique_consecutive", ".argwhere"}


def find(eager_result: EagerResult, trace_result: TraceResult) -> Iterator[Finding]:
    """Every break; and, where Dynamo gave up a whole frame, what the eager run shows in it."""
    for one in trace_result.breaks:
        if one.where in eager_result.lines_in_ops:
            continue
        where = _line_to_change(one)
        yield _finding(_rule(one, statement(one.where)), where, _first_clause(one.text))
    if not trace_result.breaks and not trace_result.errors:
        return
    for where in sorted(eager_result.lines):
        if "print" in statement(where).calls():
            yield _finding("print", where)
    for where in sorted(filter(None, eager_result.host_syncs)):
        yield _finding(_host_sync_rule(statement(where)), where)


def _finding(rule: str, where: str, detail: str = "") -> Finding:
    cause, fix = _RULES[rule]
    if rule in ("other", "native_call", "custom_object") and detail:
        cause += f": {detail}"
    return Finding("graph_break", rule, where, cause, fix)


def _line_to_change(one: Break) -> str:
    """The line to change: of an object's method, where it is called."""
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
    """What a line that waited for a tensor's value did."""
    calls = line.calls()
    if ".tolist" in calls:
        return "tolist"
    if calls & _HOST:
        return "item"
    if calls & _SHAPED:
        return "data_dependent_shape"
    return "data_dependent_control" if line.is_branch() else "item"


def _first_clause(text: str) -> str:
    """Dynamo's explanation of a break as one clause, else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), "")
    sentence = said or (lines[0] if lines else "")
    return re.split(r"\.?`? This function", sentence)[0].rstrip(".")
