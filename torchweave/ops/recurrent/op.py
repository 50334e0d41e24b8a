"""Boundary ops of layers with a recurrent state, and their execution over the rows of a step.

Each op reads and advances a state per request, which the engine keeps in a state cache: one tensor `[S, ...]` for each call of
an op in the model, whose index is the op's `state` argument and whose row is the request's state slot. Called directly, without
an engine, the tokens are one sequence that starts from zeros; that is the eager reference.

    RecurrentSpec.of(op, args, tokens)                    once, to allocate a slot's state
    run_recurrent_op(meta, states, op, args, kwargs)      once per call and step, from the boundary handler

A step with drafts cannot advance a state before it knows which of them are kept, and a state cannot go back. So it runs each
call twice:

    held = read_recurrent_op(meta, states, op, args, kwargs)     the results; states stay
    commit_recurrent_op(meta, states, held, position)            the states, once the slots have advanced

Numerics: inputs are widened to float32, results are computed in float32 and rounded once, to `out`'s dtype. transformers rounds
intermediate results of bfloat16 models (dt, the output of the convolution before its activation) to bfloat16 as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchweave.ops.attention.op import AttentionMetadata
from torchweave.ops.recurrent.call import ConvCall, DeltaCall, LruCall, RecurrentCall, ScanCall, SsdCall, StateAccess
from torchweave.ops.recurrent.torch_native import one_sequence, run_on_torch, step_rows
from torchweave.ops.registry import define_boundary


def _alone(call: RecurrentCall) -> None:
    """Run a call whose tokens are one new sequence."""
    shape, dtype = call.state_shape
    run_on_torch(call, torch.zeros(1, *shape, dtype=dtype, device=call.out.device), one_sequence(call.out.shape[0]))


define_boundary("torchweave::causal_conv", ConvCall, _alone, ("out",))
define_boundary("torchweave::gated_delta", DeltaCall, _alone, ("out",))
define_boundary("torchweave::ssd", SsdCall, _alone, ("out",))
define_boundary("torchweave::selective_scan", ScanCall, _alone, ("out",))
define_boundary("torchweave::rg_lru", LruCall, _alone, ("out",))

_CALLS: dict[Any, type[RecurrentCall]] = {
    torch.ops.torchweave.causal_conv.default: ConvCall,
    torch.ops.torchweave.gated_delta.default: DeltaCall,
    torch.ops.torchweave.ssd.default: SsdCall,
    torch.ops.torchweave.selective_scan.default: ScanCall,
    torch.ops.torchweave.rg_lru.default: LruCall,
}

RECURRENT_OPS = frozenset(_CALLS)
"""The overloads of the ops above."""


def state_shape(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of one slot of the state that a call of `op` advances; its tensors may be on the meta device."""
    return _CALLS[op](*args, **(kwargs or {})).state_shape


@dataclass(frozen=True)
class RecurrentSpec:
    """A call of a recurrent op in a model.

    Attributes:
        op: the overload.
        args: its arguments; tensors are on the meta device.
        tokens: the size of those tensors' first dimension that counts tokens.
        shape: of one slot of the state.
        dtype: of the state.
    """

    op: Any
    args: tuple[Any, ...]
    tokens: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(op: Any, args: Sequence[Any], tokens: int) -> RecurrentSpec:
        """The spec of a call whose tensors may be on the meta device."""
        return RecurrentSpec(op, tuple(args), tokens, *state_shape(op, args))

    @property
    def num_bytes(self) -> int:
        """Bytes of one slot of the state."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that launch the same kernels."""
        return self.op, *(
            (each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else each
            for index, each in enumerate(self.args)
            if index != self._state_index
        )

    @property
    def _state_index(self) -> int:
        return next(index for index, each in enumerate(self.op._schema.arguments) if each.name == "state")

    def zeros(self, tokens: int, state: int, device: torch.device) -> tuple[Any, ...]:
        """Arguments of such a call for `tokens` tokens and another state, of zeros in the same layout."""
        args = list(self.args)
        args[self._state_index] = state
        for index, each in enumerate(args):
            if isinstance(each, Tensor):
                shape = (tokens, *each.shape[1:]) if each.shape[0] == self.tokens else each.shape
                args[index] = torch.empty_strided(shape, each.stride(), dtype=each.dtype, device=device).zero_()
        return tuple(args)


def run_recurrent_op(
    meta: AttentionMetadata, states: Sequence[Tensor], op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Run an intercepted call over the rows of a step, and advance the states of their slots.

    Row i owns the tokens `query_start[i]:query_start[i + 1]` and slot `slots[i]` of `states[state]`. A row whose first token has
    position 0 starts from zeros, whatever the slot holds. Padding rows and rows without tokens touch no state; `out` of padded
    tokens becomes zero.
    """
    _run(_CALLS[op](*args, **kwargs), states, meta)


def read_recurrent_op(
    meta: AttentionMetadata, states: Sequence[Tensor], op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> RecurrentCall:
    """As `run_recurrent_op`, of a step with drafts and without writing a state; returns what `commit_recurrent_op` takes.

    The step goes on before the states advance, and a later operation may write into the arguments, so they are copied.
    """
    call = _CALLS[op](*args, **kwargs)
    _run(call, states, meta, StateAccess.READ)
    if states[call.state].is_cuda:
        from torchweave.ops.recurrent.triton import copy_on_triton

        return call.held(copy_on_triton)
    return call.held()


def commit_recurrent_op(
    meta: AttentionMetadata, states: Sequence[Tensor], held: RecurrentCall, position: Tensor
) -> None:
    """Advance the states by the tokens that a step with drafts kept.

    Args:
        meta: of the step, unchanged.
        held: result of `read_recurrent_op`.
        position: int32 `[S]`, `SlotState.position` after the step: of a row's tokens, those at lower positions were kept.
    """
    dropped = torch.empty_like(held.out, device=states[held.state].device)
    _run(replace(held, out=dropped), states, meta, StateAccess.COMMIT, position)


def _run(
    call: RecurrentCall,
    states: Sequence[Tensor],
    meta: AttentionMetadata,
    access: StateAccess = StateAccess.ADVANCE,
    position: Tensor | None = None,
) -> None:
    state = states[call.state]
    if state.is_cuda:
        from torchweave.ops.recurrent.triton import run_on_triton

        run_on_triton(call, state, meta, access, position)
    else:
        run_on_torch(call, state, step_rows(meta, position), access != StateAccess.READ)
