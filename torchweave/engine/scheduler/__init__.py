"""Capacity policies, one file each. A policy is a pure function from a `Snapshot` to a `Decision`."""

from __future__ import annotations

from torchweave.engine.scheduler.base import Decision, Policy, Snapshot, Waiting
from torchweave.engine.scheduler.guaranteed_no_evict import guaranteed_no_evict

POLICIES: dict[str, Policy] = {"guaranteed_no_evict": guaranteed_no_evict}

__all__ = ["POLICIES", "Decision", "Policy", "Snapshot", "Waiting"]
