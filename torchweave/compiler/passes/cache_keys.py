"""Compile-cache keys of the ATen passes: order, settings, and sources of user passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torchweave.compiler.cache.keys import describe, source_digests
from torchweave.compiler.passes.base import Pass


def aten_cache_keys(passes: Sequence[Pass]) -> dict[str, Any]:
    """Compile-cache keys; empty when no pass runs."""
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
    """Type and settings of a pass as text."""
    if dataclasses.is_dataclass(each):
        facts = {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
    else:
        own = type(each).__module__.startswith("torchweave.")  # their private attributes do not change results
        facts = {key: fact for key, fact in vars(each).items() if not (own and key.startswith("_"))}
        facts = {"name": each.name, **facts}
    return f"{type(each).__module__}.{type(each).__qualname__}{describe(facts)}"


def _sources(each: Pass) -> tuple[str, ...]:
    """Modules that define a pass."""
    return (type(each).__module__, *getattr(each, "sources", ()))
