"""Run a function of the caller on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchweave.engine.control.rank import Rank


def apply_model(rank: Rank, function: Callable[[Any], Any]) -> Any:
    """What `function` returns for this rank's model."""
    return function(rank.model)


def collective_rpc(
    rank: Rank, method: Callable[..., Any], arguments: Sequence[Any] = (), options: Mapping[str, Any] | None = None
) -> Any:
    """What `method` returns for this rank, which is its first argument."""
    return method(rank, *arguments, **(options or {}))
