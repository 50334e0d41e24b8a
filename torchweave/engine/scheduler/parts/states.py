"""Recurrent states: copies from and to snapshots, and from a beam to its fork."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.kv_cache.state_snapshots import Copies
from torchweave.engine.scheduler.parts.base import Host, StepPart, StepRows
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.running_set import NO_SLOTS
from torchweave.engine.scheduler.step import Payload


@dataclass(frozen=True)
class StateCopies(Payload):
    """Rows of the recurrent states to copy, as (sources, targets); None for none.

    Attributes:
        restores: before the model, from snapshots and forked beams.
        saves: after it, to snapshots.
    """

    restores: Copies | None = None
    saves: Copies | None = None


class StatesPart(StepPart):
    """Cuts prompts where a snapshot is due, and carries the copies of a step."""

    name = "states"

    @classmethod
    def needed(cls, host: Host) -> bool:
        return host.limits.has_recurrent_states

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> bool:
        snapshots = self.host.kv.snapshots
        if snapshots is not None:
            snapshots.begin(slot, hit, state.prefill_len)
        return snapshots is not None or state.search is not None

    def fit(self, chunks: list[tuple[int, int]], room: int) -> list[tuple[int, int]]:
        snapshots, table = self.host.kv.snapshots, self.host.running.slots
        if snapshots is None or not self.host.limits.chunked_context:
            return chunks
        return [
            (slot, snapshots.chunk_size(slot, int(table.num_computed[slot]), size, int(table.prefill_len[slot])))
            for slot, size in chunks
        ]

    def payload(self, rows: StepRows) -> StateCopies | None:
        snapshots, table, block_size = self.host.kv.snapshots, self.host.running.slots, self.host.kv.block_size
        copies: dict[str, Copies] = {}
        if snapshots is not None:
            for slot, chunk in rows.chunks:
                if table.group[slot] < 0:
                    num_computed = chunk.start + len(chunk.tokens)
                    hashes = table.state_of(slot).hashes(table.sequence(slot, num_computed), block_size)
                    snapshots.save(slot, hashes, num_computed)
            copies = snapshots.take_copies()
        if rows.forks:
            parents, children = np.array(rows.forks, np.int64).T
            sources, targets = copies.get("restores", (NO_SLOTS, NO_SLOTS))
            copies["restores"] = np.append(sources, parents), np.append(targets, children)
        return StateCopies(**copies) if copies else None


PART = StatesPart
