"""One rank's side of control calls."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchweave.engine.control.errors import Fault, fault_of
from torchweave.engine.runner.model_runner import ModelRunner

_log = logging.getLogger("torchweave")


@dataclass
class Rank:
    """What rank handlers use.

    Attributes:
        runner: of this rank; no step is in flight.
        number: of this rank; 0 is the leader.
        model: transformers' module with the weights of this rank.
        state: what handlers keep between calls, by a name of theirs.
    """

    runner: ModelRunner
    number: int = 0
    model: Any = None
    state: dict[str, Any] = field(default_factory=dict)


class RankAnswer(NamedTuple):
    """The result of a rank handler, or its error."""

    result: Any = None
    fault: Fault | None = None


def answer(rank: Rank, name: str, arguments: dict[str, Any]) -> RankAnswer:
    """Run the rank handler of a call; its errors are part of the answer."""
    from torchweave.engine.control.calls import CALLS  # the table names handlers that use this module

    handler = CALLS[name].rank
    assert handler is not None, f"{name} has no rank handler"
    try:
        return RankAnswer(handler(rank, **arguments))
    except Exception as error:
        if (fault := fault_of(error)).kind == "failed":
            _log.exception("The control call %s failed on rank %d.", name, rank.number)
        return RankAnswer(fault=fault)
