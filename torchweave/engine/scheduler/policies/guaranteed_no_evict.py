"""Reserve the blocks that each running request needs to its end, and pause none.

Source: GUARANTEED_NO_EVICT of TensorRT-LLM's batch manager. Requests are admitted first come, first served, while the most blocks
that they may need are unreserved. The first request that does not fit stops admission, so that small requests cannot overtake a
large one forever.
"""

from __future__ import annotations

from torchweave.engine.scheduler.policies.admission import admit
from torchweave.engine.scheduler.policies.base import Decision, Snapshot


def guaranteed_no_evict(snapshot: Snapshot) -> Decision:
    blocks = snapshot.unreserved_blocks
    num_fitting = 0
    for request in snapshot.waiting:
        if request.max_blocks > blocks:
            break
        blocks -= request.max_blocks
        num_fitting += 1
    return admit(snapshot, num_fitting)
