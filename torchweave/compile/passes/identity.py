"""What a built piece depends on besides its graph: the passes of the ATen stage, how they are set, and their source text."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchweave.compile.factors import describe, source_digests
from torchweave.compile.passes.base import Pass

_ROOT = Path(__file__).resolve().parents[2]


def stage_factors(passes: Sequence[Pass]) -> dict[str, Any]:
    """Factors of the compile cache: nothing when no pass runs."""
    if not passes:
        return {}
    modules = {name for each in passes for name in _sources(each) if not name.startswith("torchweave.")}
    return {
        "aten_stage": {
            "passes": [describe_pass(each) for each in passes],
            "stack": _stack(),
            "sources": source_digests(sorted(modules)),
        }
    }


def describe_pass(each: Pass) -> str:
    """A pass as text: its type and how it is set."""
    if dataclasses.is_dataclass(each):
        facts = {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
    else:
        own = type(each).__module__.startswith("torchweave.")  # what those keep to themselves changes nothing
        facts = {key: fact for key, fact in vars(each).items() if not (own and key.startswith("_"))}
        facts = {"name": each.name, **facts}
    return f"{type(each).__module__}.{type(each).__qualname__}{describe(facts)}"


def _sources(each: Pass) -> tuple[str, ...]:
    """Modules that a pass comes from."""
    return (type(each).__module__, *getattr(each, "sources", ()))


@functools.cache
def _stack() -> str:
    """Hash of the source text that the stack's own passes, their ops, tables and the lowering are written in."""
    digest = hashlib.sha256()
    for folder in ("compile/passes", "compile/tuning", "ops"):
        for path in sorted(path for path in (_ROOT / folder).rglob("*") if path.suffix in (".py", ".json")):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + path.read_bytes())
    digest.update((_ROOT / "compile" / "lower.py").read_bytes())
    return digest.hexdigest()[:16]
