"""Capacity policies, one file each. A policy is a pure function from a `Snapshot` to a `Decision`."""

from __future__ import annotations

from torchweave.engine.scheduler.policies.admission import should_delay_prefill
from torchweave.engine.scheduler.policies.base import (
    Decision,
    DecodeRequests,
    Policy,
    PrefillRequest,
    Snapshot,
    WaitingRequest,
)
from torchweave.engine.scheduler.policies.guaranteed_no_evict import guaranteed_no_evict
from torchweave.engine.scheduler.policies.max_utilization import max_utilization
from torchweave.engine.scheduler.policies.static_batch import static_batch

POLICIES: dict[str, Policy] = {
    "guaranteed_no_evict": guaranteed_no_evict,
    "max_utilization": max_utilization,
    "static_batch": static_batch,
}

__all__ = [
    "POLICIES",
    "Decision",
    "DecodeRequests",
    "Policy",
    "PrefillRequest",
    "Snapshot",
    "WaitingRequest",
    "should_delay_prefill",
    "static_batch",
]
