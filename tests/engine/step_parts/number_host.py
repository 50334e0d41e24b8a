"""A part that carries one number a row and returns it: the host's file."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.scheduler.parts.base import Host, StepPart, StepRows
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.step import Payload, Step, StepResult


@dataclass(frozen=True)
class Numbers(Payload):
    """float32 [rows]."""

    numbers: np.ndarray


@dataclass
class Exchange:
    """What a step carried and returned for its requests with a seed."""

    slots: list[int]
    sent: list[float]
    returned: list[float] = field(default_factory=list)


class NumberPart(StepPart):
    """Of requests with a seed."""

    name = "number"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.slots: set[int] = set()
        self.exchanges: dict[int, Exchange] = {}

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> bool:
        if state.request.sampling.seed is None:
            return False
        self.slots.add(slot)
        return True

    def release(self, slot: int) -> None:
        self.slots.remove(slot)

    def payload(self, rows: StepRows) -> Numbers:
        numbers = np.where(np.isin(rows.slots, list(self.slots)), rows.slots + rows.index / 1024, 0).astype(np.float32)
        self.exchanges[rows.index] = Exchange(rows.slots.tolist(), numbers.tolist())
        return Numbers(numbers)

    def take(self, step: Step, result: StepResult, rows: np.ndarray) -> np.ndarray:
        if self.name in step.parts:
            self.exchanges[step.index].returned = result.parts[self.name]
        return rows


PART = NumberPart
