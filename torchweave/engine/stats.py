"""Statistics of a step for the batch manager's `return_stats` callback.

The first keys are those of TensorRT-LLM's batch manager, verbatim; the others those of its later iteration record. Fields that are
not measured are absent.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.scheduler.parts.beams import BeamRows
from torchweave.engine.scheduler.scheduler import Scheduler
from torchweave.engine.scheduler.step import Step


@dataclass(frozen=True)
class IterationFacts:
    """Counts of one iteration; times in seconds, GPU memory in bytes (None: no GPU).

    Attributes:
        num_running: requests that held a slot while the step ran.
        num_decoded: tokens that decode rows generated.
        max_requests: most requests that the batch manager takes at a time.
    """

    latency: float
    num_active: int
    num_running: int
    num_decoded: int
    num_new: int
    num_waiting: int
    num_completed: int
    max_requests: int
    memory_in_use: int | None = None


def _extra_rows(step: Step) -> int:
    """Rows beyond one per request: further beams."""
    beams = step.parts.get("beams")
    return beams.extra_rows if isinstance(beams, BeamRows) else 0


def _num_padded(scheduler: Scheduler, facts: IterationFacts) -> int:
    """Slots of a static batch whose requests have ended while others still generate. One that skips a step has not ended."""
    return max(scheduler.static_batch_size - facts.num_running, 0)


def _gptmanager_stats(step: Step, scheduler: Scheduler, facts: IterationFacts) -> dict[str, int]:
    """The batch manager's record of a step, by batching mode."""
    record = {"Scheduled Requests": step.num_rows - _extra_rows(step), "Context Requests": len(step.chunks)}
    if scheduler.static:  # V1 batching
        return {
            **record,
            "Total Generation Tokens": facts.num_decoded,
            "Total Context Tokens": step.num_prefill_tokens,
            "Empty Generation Slots": _num_padded(scheduler, facts),
        }
    return {
        **record,
        "Generation Requests": step.num_decode_rows - _extra_rows(step),
        "Total Context Tokens": step.num_prefill_tokens,
        "MicroBatch ID": step.index % scheduler.limits.num_micro_batches,
    }


def _batching_stats(step: Step, scheduler: Scheduler, facts: IterationFacts) -> dict[str, dict[str, int | float]]:
    """The same for the later record."""
    record: dict[str, int | float] = {
        "numScheduledRequests": step.num_rows - _extra_rows(step),
        "numContextRequests": len(step.chunks),
        "numCtxTokens": step.num_prefill_tokens,
    }
    if scheduler.static:
        record |= {"numGenTokens": facts.num_decoded, "emptyGenSlots": _num_padded(scheduler, facts)}
        return {"staticBatchingStats": record}
    record |= {
        "numGenRequests": step.num_decode_rows - _extra_rows(step),
        "numPausedRequests": scheduler.num_paused,
        "microBatchId": step.index % scheduler.limits.num_micro_batches,
    }
    if step.num_decode_rows:
        record["avgNumDecodedTokensPerIter"] = facts.num_decoded / step.num_decode_rows
    return {"inflightBatchingStats": record}


def _reuse_stats(kv: BlockManager) -> dict[str, int | float]:
    """Blocks since the engine's start: allocated ones, and full prompt blocks that were reused or missed in the prefix cache.

    `restoredBlocks` are reused blocks that came from host memory. `restoredStates` are requests that started from a snapshot of the
    recurrent states, and `savedStates` the snapshots taken.
    """
    record: dict[str, int | float] = {
        "allocTotalBlocks": kv.allocated_total + kv.reused_total,
        "allocNewBlocks": kv.allocated_total,
        "reusedBlocks": kv.reused_total,
        "missedBlocks": kv.missed_total,
    }
    if kv.host is not None:
        record |= {
            "restoredBlocks": kv.restored_total,
            "hostMaxNumBlocks": kv.host.num_host_blocks,
            "hostUsedNumBlocks": kv.host.num_cached,
        }
    if (snapshots := kv.snapshots) is not None:
        record |= {
            "maxNumStates": snapshots.count,
            "usedNumStates": snapshots.num_used,
            "savedStates": snapshots.saved_total,
            "restoredStates": snapshots.restored_total,
        }
    if num_lookups := kv.reused_total + kv.missed_total:
        record["cacheHitRate"] = kv.reused_total / num_lookups
    return record


def iteration_stats(step: Step, scheduler: Scheduler, facts: IterationFacts) -> str:
    """One iteration as a JSON string."""
    kv = scheduler.kv
    record: dict[str, object] = {
        "Timestamp": time.strftime("%m-%d-%Y %H:%M:%S"),
        "Iteration Counter": step.index,
        "Active Request Count": facts.num_active,
        "Max Request Count": facts.max_requests,
        "Max KV cache blocks": kv.num_blocks,
        "Free KV cache blocks": kv.num_free,
        "Used KV cache blocks": kv.num_used,
        "Tokens per KV cache block": kv.block_size,
        **_gptmanager_stats(step, scheduler, facts),
        "iter": step.index,
        "iterLatencyMS": facts.latency * 1e3,
        "numNewActiveRequests": facts.num_new,
        "numActiveRequests": facts.num_active,
        "numQueuedRequests": facts.num_waiting,
        "numCompletedRequests": facts.num_completed,
        "maxNumActiveRequests": facts.max_requests,
        "kvCacheStats": {
            "maxNumBlocks": kv.num_blocks,
            "freeNumBlocks": kv.num_free,
            "usedNumBlocks": kv.num_used,
            "tokensPerBlock": kv.block_size,
            **_reuse_stats(kv),
        },
        **_batching_stats(step, scheduler, facts),
    }
    if scheduler.limits.query_len > 1:
        record["spec_decode"] = scheduler.speculation.as_dict()
    if facts.memory_in_use is not None:
        record["gpuMemUsage"] = facts.memory_in_use
    return json.dumps(record)
