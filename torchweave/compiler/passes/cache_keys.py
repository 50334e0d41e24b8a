"""Cache-key factors of the ATen passes: their order, their settings, and the source of passes from other packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torchweave.compiler.cache.keys import describe, source_digests
from torchweave.compiler.passes.base import Pass


def aten_cache_keys(passes: Sequence[Pass]) -> dict[str, Any]:
    """Factors of the compile cache: nothing when no pass runs."""
    if not passes:
        return {}
    modules = {name for each in passes for name in _sources(each) if not name.startswith("torchweave.")}
    return {
        "aten_stage": {
            "passes": [describe_pass(each) for each in passes],
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
