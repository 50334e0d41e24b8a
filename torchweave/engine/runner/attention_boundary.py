"""What carries out attention within a step: each layer with its own cache, by the metadata of its group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchweave.ops.attention.call import run_attention_op
from torchweave.ops.attention.op import AttentionBackend, AttentionMetadata, AttentionStep, LayerKVCache
from torchweave.ops.slot_state import SlotState

BEGIN = "begin"  # handed to the boundary once the step's metadata is in place, before the model runs


class AttentionBoundary:
    """Carries out the attention op with the cache of the op's layer and the facts of one bucket, by the layer's group.

    A backend may want to look at a step's metadata on the host before the first layer (`begin`). That goes through the
    boundary like attention itself, so that a piecewise recording does it anew at every replay.
    """

    def __init__(
        self, backend: AttentionBackend, caches: list[LayerKVCache], metas: Sequence[AttentionMetadata]
    ) -> None:
        self._backend = backend
        self._caches = caches
        self._metas = metas
        self._steps: list[AttentionStep] = []

    def __call__(self, op: Any, args: tuple, kwargs: dict) -> None:
        if op is BEGIN:
            self._steps = [self._backend.begin(meta) for meta in self._metas]
            return
        run_attention_op(self._steps, self._caches, op, args, kwargs)


def build_attention_boundary(
    backend: AttentionBackend, caches: list[LayerKVCache], meta: AttentionMetadata, state: SlotState
) -> AttentionBoundary:
    """The boundary of a step, of which `meta` has the tables and the slot mappings of all groups of layers."""
    metas = [meta]
    if state.num_tables > 1:
        pairs = zip(state.tables, meta.slot_mapping, strict=True)
        metas = [replace(meta, block_table=table, slot_mapping=mapping) for table, mapping in pairs]
    return AttentionBoundary(backend, caches, metas)
