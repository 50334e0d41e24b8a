"""A finding: one problem at one line, with cause and fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["trace_failure", "graph_break", "recompile", "performance"]
Severity = Literal["error", "warning", "note"]

_KINDS, _SEVERITIES = get_args(Kind), get_args(Severity)  # in the order in which findings are listed


@dataclass(frozen=True)
class Finding:
    """One problem.

    Attributes:
        kind: a class of TensorRT-LLM's guide, or `performance`.
        rule: name within the kind, such as `missing_fake_kernel`.
        where: `file:line`, or "" if there is no single line.
        cause, fix: one sentence each.
        severity: `error`: the module is not one graph or gives wrong results; `warning`: it recompiles or runs slower;
            `note`: it could be faster.
    """

    kind: Kind
    rule: str
    where: str
    cause: str
    fix: str
    severity: Severity = "error"


class Rules:
    """Findings of one kind by rule: cause, fix, and severity unless it is an error; the texts may name facts, as `{guard}`."""

    def __init__(self, kind: Kind, rules: Mapping[str, tuple[str, str] | tuple[str, str, Severity]]) -> None:
        self._kind, self._rules = kind, rules

    def finding(self, rule: str, where: str, **facts: object) -> Finding:
        """A finding at `file:line`."""
        cause, fix, *severity = self._rules[rule]
        return Finding(self._kind, rule, where, cause.format(**facts), fix.format(**facts), *severity)  # type: ignore[arg-type]


def deduplicate(findings: Iterable[Finding]) -> list[Finding]:
    """Keep the first finding per line, and the first of each performance rule per line; sort worst first.

    Callers order findings by significance: later ones at a line often follow from the first. An error replaces a warning.
    """
    by_key: dict[tuple[str, str], Finding] = {}
    lines: set[str] = set()
    for finding in findings:
        key = (finding.where or finding.cause, finding.rule if finding.kind == "performance" else "")
        is_more_severe = key in by_key and (by_key[key].severity, finding.severity) == ("warning", "error")
        if finding.where and finding.where in lines and finding.kind != "performance" and not is_more_severe:
            continue
        if key not in by_key or is_more_severe:
            by_key[key] = finding
            if finding.kind != "performance":
                lines.add(finding.where)
    order = sorted(by_key.values(), key=lambda one: (_file(one.where), _line(one.where), _KINDS.index(one.kind)))
    return sorted(order, key=lambda one: _SEVERITIES.index(one.severity))


def without_follow_on(findings: Iterable[Finding], is_library: Callable[[str], bool]) -> list[Finding]:
    """Findings without those in library files, if the subject's own code breaks the graph.

    After a break Dynamo traces the rest of each frame by itself, and takes paths of libraries that no whole graph takes. Findings
    in libraries that remain are reported once the break is fixed.
    """
    findings = list(findings)
    if not any(one.kind == "graph_break" and one.where and not is_library(one.where) for one in findings):
        return findings
    return [one for one in findings if one.kind == "performance" or not is_library(one.where)]


def _file(where: str) -> str:
    return where.rpartition(":")[0]


def _line(where: str) -> int:
    last = where.rpartition(":")[2]
    return int(last) if last.isdigit() else 0
