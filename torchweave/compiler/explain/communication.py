"""What ranks exchange, piece by piece, what fusions made of it, and what that was measured to save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchweave.report import Report

Facts = dict[str, Any]


def communication(report: Report, passes: Sequence[Facts], max_num_tokens: int | None) -> Facts:
    """Collectives of each distinct piece and the passes that changed them.

    Args:
        passes: rows of `explain`.
        max_num_tokens: of one step; None where nobody said.
    """
    pieces = [
        {
            "piece": event["piece"],
            "used": event["shared_by"],
            "exchanges": [{**each, "at_most": _bytes_at(each, max_num_tokens)} for each in event["exchanges"]],
            "became": _collectives_after_passes(event["piece"], event["exchanges"], passes),
        }
        for event in report.select("communication")
    ]
    return {"max_num_tokens": max_num_tokens, "pieces": pieces, "fusions": _fusions(passes) if pieces else []}


def _bytes_at(exchange: Facts, tokens: int | None) -> int | None:
    """Bytes of a message at that many tokens; of one that does not grow with them, always the same."""
    if exchange["per"] == "T":
        return None if tokens is None else tokens * exchange["bytes"]
    return exchange["bytes"] if not exchange["per"] else None


def _collectives_after_passes(piece: str, exchanges: Sequence[Facts], passes: Sequence[Facts]) -> list[Facts]:
    """Collectives of a piece as it was built, by range of the token count."""
    ranges: dict[tuple, dict[str, int]] = {}
    for row in passes:
        for run in row["runs"]:
            if run["piece"] == piece:
                ranges.setdefault(tuple(run["tokens"] or ()), {})
    for tokens, ops in ranges.items():
        for exchange in exchanges:
            ops[exchange["op"]] = ops.get(exchange["op"], 0) + exchange["calls"]
        for row in passes:
            for run in row["runs"]:
                if run["piece"] == piece and tuple(run["tokens"] or ()) == tokens:
                    _add(ops, run["collectives"])
    return [
        {"tokens": list(tokens) or None, "ops": {op: count for op, count in sorted(ops.items()) if count}}
        for tokens, ops in ranges.items()
    ]


def _add(ops: dict[str, int], changes: Mapping[str, int]) -> None:
    for op, change in changes.items():
        ops[op] = ops.get(op, 0) + change


def collectives_of(diff: Mapping[str, int]) -> dict[str, int]:
    """Of a pass's changes, those of collectives, by the names of ops."""
    words = ("all_reduce", "all_gather", "reduce_scatter")
    return {
        "::".join(name.split(".")[:2]): change for name, change in diff.items() if any(word in name for word in words)
    }


def _fusions(passes: Sequence[Facts]) -> list[Facts]:
    """The passes that changed collectives or their operands, each with what it was measured to save at some number of tokens."""
    keys = ("shape", "tokens", "microseconds", "baseline", "saved")
    return [
        {
            "pass": row["name"],
            "matches": row["matches"],
            "measured": [{key: each[key] for key in keys} for each in row["microseconds"]],
        }
        for row in passes
        if row["matches"] and (collectives_of(row["diff"]) or row["name"].startswith("userbuffers_"))
    ]
