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
from torchweave.ops.registry import define


def _alone(call: RecurrentCall) -> None:
    """Run a call whose tokens are one new sequence."""
    shape, dtype = call.state_shape
    run_on_torch(call, torch.zeros(1, *shape, dtype=dtype, device=call.out.device), one_sequence(call.out.shape[0]))


@define("torchweave::causal_conv", mutates=("out",), boundary=True)
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, state: int, activation: str) -> None:
    """Depthwise causal convolution: `out[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - K + 1 + j, c])`.

    Args:
        x: `[T, C]`; inputs before a request's first token are zeros.
        weight: `[C, K]`.
        bias: `[C]`.
        out: `[T, C]`, written whole.
        state: index of the state, `[S, C, K - 1]` of x's dtype: the inputs of the last K - 1 tokens, the oldest first.
        activation: `""`, `"silu"` or `"swish"`; others raise ValueError.
    """
    _alone(ConvCall(x, weight, bias, out, state, activation))


@define("torchweave::gated_delta", mutates=("out",), boundary=True)
def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    out: Tensor,
    state: int,
    normalize: bool,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> None:
    """Gated delta rule, for each value head, with a state `S[K, V]`:
    `S = exp(g) * S; S += k (beta * (v - k S))^T; out = K**-0.5 * q S`.

    Args:
        q, k: `[T, H, K]`. Value head h reads key head `h // (HV // H)`.
        v: `[T, HV, V]`.
        g: log decay, at most 0: `[T, HV]`, or `[T, HV, K]` with a decay for each key channel (Kimi delta attention).
        beta: `[T, HV]`.
        out: `[T, HV, V]`, written whole.
        state: index of the state, `[S, HV, K, V]` float32.
        normalize: divide q and k by `sqrt(sum of squares + 1e-6)` first.
        A_log, dt_bias: `[HV]`, both or none. With them g `[T, HV]` and beta are projections before their gates: the log decay is
            `-exp(A_log) * softplus(g + dt_bias)` in float32, the rate `sigmoid(beta)`, rounded to beta's dtype.
    """
    _alone(DeltaCall(q, k, v, g, beta, out, state, normalize, A_log, dt_bias))


@define("torchweave::ssd", mutates=("out",), boundary=True)
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    out: Tensor,
    state: int,
    softplus: bool,
    dt_min: float,
    dt_max: float,
    z: Tensor | None = None,
    log_rate: bool = False,
) -> None:
    """Scan of Mamba2 (state space duality), for each head, with a state `S[P, N]`:
    `S = exp(dt * A) * S + dt * x B^T; out = S C + D * x`.

    Lightning attention is this op with `x = v, B = k, C = q, A = -slope`, a `dt` of ones (which may be expanded) and no limits.

    Args:
        x: `[T, H, P]`.
        dt: `[T, H]`; the step is `clamp(softplus(dt + dt_bias), dt_min, dt_max)`.
        A: `[H]`, at most 0; with `log_rate` the logarithm of -A.
        B, C: `[T, G, N]`. Head h reads group `h // (H // G)`.
        D, dt_bias: `[H]`.
        out: `[T, H, P]`, written whole.
        state: index of the state, `[S, H, P, N]` float32.
        softplus: whether the step goes through softplus (linear above 20).
        dt_min, dt_max: limits of the step.
        z: `[T, H, P]`: out, rounded, is multiplied by `silu(z)`, rounded to z's dtype.
        log_rate: A is the parameter from which the layer computes its decay, `-exp(A)` in float32.
    """
    _alone(SsdCall(x, dt, A, B, C, D, dt_bias, out, state, softplus, dt_min, dt_max, z, log_rate))


@define("torchweave::selective_scan", mutates=("out",), boundary=True)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    out: Tensor,
    state: int,
    log_rate: bool = False,
) -> None:
    """Scan of Mamba, for each channel, with a state `S[N]` and `dt = softplus(dt + dt_bias)`:
    `S = exp(dt * A) * S + dt * x * B; out = (S C + D * x) * silu(z)`.

    Args:
        x, dt, z: `[T, I]`.
        A: `[I, N]`, at most 0; with `log_rate` the logarithm of -A, as in `ssd`.
        B, C: `[T, N]`.
        D, dt_bias: `[I]`.
        out: `[T, I]`, written whole.
        state: index of the state, `[S, I, N]` float32.
    """
    _alone(ScanCall(x, dt, A, B, C, D, z, dt_bias, out, state, log_rate))


@define("torchweave::rg_lru", mutates=("out",), boundary=True)
def rg_lru(a: Tensor, x: Tensor, out: Tensor, state: int) -> None:
    """Linear recurrence of the RG-LRU: `h = a * h + x; out = h`; before a request's first token h is 0.

    Args:
        a, x, out: `[T, I]`.
        state: index of the state, `[S, I]` float32.
    """
    _alone(LruCall(a, x, out, state))


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
