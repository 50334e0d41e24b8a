"""Start and end a batch as a whole: no request joins while one of the batch runs.

Source: V1 batching of TensorRT-LLM's batch manager. Blocks are reserved as in `guaranteed_no_evict`.
"""

from __future__ import annotations

from dataclasses import replace

from torchweave.engine.scheduler.policies.base import Decision, Snapshot
from torchweave.engine.scheduler.policies.guaranteed_no_evict import guaranteed_no_evict


def static_batch(snapshot: Snapshot) -> Decision:
    if snapshot.used_slots:
        return guaranteed_no_evict(replace(snapshot, waiting=()))
    return guaranteed_no_evict(snapshot)
