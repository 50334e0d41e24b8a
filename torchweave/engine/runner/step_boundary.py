"""The boundary handler of a step: attention over the paged KV cache, and recurrent ops over the requests' states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchweave.ops.attention.op import (
    ATTENTION_OPS,
    AttentionBackend,
    AttentionMetadata,
    AttentionStep,
    LayerKVCache,
    run_attention_op,
)
from torchweave.ops.attention.sparse import SPARSE_OPS, run_sparse_op
from torchweave.ops.recurrent.call import RecurrentCall
from torchweave.ops.recurrent.op import RECURRENT_OPS, commit_recurrent_op, read_recurrent_op, run_recurrent_op

BEGIN = "begin"  # passed to the boundary once a step's metadata is in place, before the model runs
COMMIT = "commit"  # passed with `SlotState.position` at the end of a step with drafts, once the slots have advanced


class StepBoundary:
    """Runs boundary ops: attention with the layer's cache and the metadata of its layer group, recurrent ops with their states.

    `BEGIN` runs the backend's host-side preparation of a step. It passes through the boundary like attention itself, so that a
    piecewise recording repeats it at every replay.

    Args:
        has_drafts: recurrent ops read the states, which `COMMIT` advances by the tokens that were kept.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        caches: list[LayerKVCache],
        recurrent_states: Sequence[Tensor],
        metas: Sequence[AttentionMetadata],
        has_drafts: bool = False,
    ) -> None:
        self._backend = backend
        self._caches = caches
        self._recurrent_states = recurrent_states
        self._metas = metas
        self._steps: list[AttentionStep] = []
        self._has_drafts = has_drafts
        self._held: list[RecurrentCall] = []

    def __call__(self, op: Any, args: tuple, kwargs: dict) -> None:
        if op is BEGIN:
            self._steps = [self._backend.begin(meta) for meta in self._metas]
        elif op in RECURRENT_OPS and self._has_drafts:
            self._held.append(read_recurrent_op(self._metas[0], self._recurrent_states, op, args, kwargs))
        elif op in RECURRENT_OPS:
            run_recurrent_op(self._metas[0], self._recurrent_states, op, args, kwargs)
        elif op is COMMIT:
            for held in self._held:
                commit_recurrent_op(self._metas[0], self._recurrent_states, held, *args)
            self._held.clear()
        elif op in SPARSE_OPS:
            run_sparse_op(self._metas, self._caches, op, args, kwargs)
        elif op in ATTENTION_OPS:
            run_attention_op(self._steps, self._caches, op, args, kwargs)
        else:  # of `splitting_ops`, or a boundary op of the user's
            op(*args, **kwargs)
