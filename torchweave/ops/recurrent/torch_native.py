"""Recurrent ops in plain torch: the path on a CPU, and the eager reference.

Rows with one token are one batch of single steps. A row with several tokens is read in chunks: the gated delta rule and SSD
solve a chunk by matrix products, the scans of Mamba and the RG-LRU take one torch operator a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.attention.op import AttentionMetadata
from torchweave.ops.recurrent.call import ConvCall, DeltaCall, LruCall, RecurrentCall, ScanCall, SsdCall

CHUNK = 64
"""Tokens of a chunk."""
CHANNEL_DECAY_CHUNK = 16
"""Tokens of a chunk of the gated delta rule with a decay per channel, whose decays are `[HV, chunk, chunk, K]`."""
NORM_EPS = 1e-6


class PrefillRow(NamedTuple):
    """Tokens `begin:end` of a row; `fresh`: it starts from zeros."""

    slot: int
    begin: int
    end: int
    fresh: bool


@dataclass(frozen=True)
class StepRows:
    """The rows of a step as the host reads them.

    Attributes:
        tokens: index of the tokens of rows with one token.
        slots: int64 `[n]`, the slots of these rows.
        fresh: bool `[n]`: the row starts from zeros; None if none does.
        prefill: rows with several tokens.
        padded: index of the padded tokens; None if there are none.
    """

    tokens: Tensor | slice
    slots: Tensor
    fresh: Tensor | None
    prefill: tuple[PrefillRow, ...]
    padded: Tensor | slice | None


def step_rows(meta: AttentionMetadata, position: Tensor | None = None) -> StepRows:
    """The rows of `meta`, whose tensors are on the CPU.

    Args:
        position: int32 `[S]`, of the slots after a step with drafts, which ends the rows after the tokens that were kept.
    """
    slots, lengths = meta.slots.numpy(), meta.seq_lens.numpy()
    if meta.decode_only:
        valid, fresh = slots >= 0, lengths == 1
        if valid.all():
            return StepRows(slice(0, len(slots)), meta.slots.long(), _mask(fresh), (), None)
        one = np.flatnonzero(valid)
        padding = torch.from_numpy(np.flatnonzero(~valid))
        return StepRows(torch.from_numpy(one), _index(slots[one]), _mask(fresh[one]), (), padding)
    bounds = meta.query_start.numpy()
    starts, counts, end = bounds[:-1], np.diff(bounds), int(bounds[-1])
    fresh = lengths == counts
    if position is not None:
        counts = np.where(slots >= 0, counts - (lengths - position.numpy()[slots]), 0)
    one, many = np.flatnonzero((counts == 1) & (slots >= 0)), np.flatnonzero((counts > 1) & (slots >= 0))
    prefill = (PrefillRow(int(slots[i]), int(starts[i]), int(starts[i] + counts[i]), bool(fresh[i])) for i in many)
    padded = slice(end, None) if end < meta.num_tokens else None
    return StepRows(_index(starts[one]), _index(slots[one]), _mask(fresh[one]), tuple(prefill), padded)


def _index(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int64))


def _mask(flags: np.ndarray) -> Tensor | None:
    return torch.from_numpy(flags) if flags.any() else None


def one_sequence(num_tokens: int) -> StepRows:
    """The tokens as one new row."""
    empty = torch.empty(0, dtype=torch.int64)
    prefill = (PrefillRow(0, 0, num_tokens, True),) if num_tokens else ()
    return StepRows(empty, empty, None, prefill, None)


def run_on_torch(call: RecurrentCall, state: Tensor, rows: StepRows, writes_state: bool = True) -> None:
    """Run a call over `rows` and advance their slots of `state` `[S, ...]`; without `writes_state`, it stays."""
    step, scan = _FUNCTIONS[type(call)]
    if len(rows.slots):
        before = state[rows.slots]
        if rows.fresh is not None:
            before[rows.fresh] = 0
        after = step(call, rows.tokens, before)
        if writes_state:
            state[rows.slots] = after
    for slot, begin, end, fresh in rows.prefill:
        before = torch.zeros_like(state[slot]) if fresh else state[slot].clone()
        after = scan(call, begin, end, before)
        if writes_state:
            state[slot] = after
    if rows.padded is not None:
        call.out[rows.padded] = 0


def _conv_step(call: ConvCall, tokens: Tensor | slice, before: Tensor) -> Tensor:
    window = torch.cat([before, call.x[tokens][:, :, None]], -1)
    result = (window.float() * call.weight.float()).sum(-1)
    call.out[tokens] = _apply_activation(call, result).to(call.out.dtype)
    return window[:, :, 1:]


def _conv_scan(call: ConvCall, begin: int, end: int, before: Tensor) -> Tensor:
    width = call.weight.shape[1]
    inputs = torch.cat([before.T, call.x[begin:end]])
    wide, weight = inputs.float(), call.weight.float()
    result = wide[: end - begin] * weight[:, 0]
    for j in range(1, width):
        result.addcmul_(wide[j : j + end - begin], weight[:, j])
    call.out[begin:end] = _apply_activation(call, result).to(call.out.dtype)
    return inputs[end - begin :].T


def _apply_activation(call: ConvCall, result: Tensor) -> Tensor:
    if call.bias is not None:
        result = result + call.bias.float()
    return F.silu(result) if call.activation else result


def _delta_inputs(call: DeltaCall, index: Tensor | slice) -> tuple[Tensor, ...]:
    """q with its scale, k, v, g and beta of some tokens in float32, q and k for each value head."""
    beta = call.beta[index] if call.A_log is None else call.beta[index].sigmoid()
    q, k, v, g, beta = (each.float() for each in (call.q[index], call.k[index], call.v[index], call.g[index], beta))
    if call.A_log is not None:
        assert call.dt_bias is not None, "A_log comes with dt_bias"
        g = -call.A_log.float().exp() * F.softplus(g + call.dt_bias.float())
    if call.normalize:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    group = v.shape[1] // k.shape[1]
    if group > 1:
        q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    return q * q.shape[-1] ** -0.5, k, v, g, beta


def _delta_step(call: DeltaCall, tokens: Tensor | slice, before: Tensor) -> Tensor:
    q, k, v, g, beta = _delta_inputs(call, tokens)
    state = before * (g[..., None] if g.ndim == 3 else g[..., None, None]).exp()
    expected = (k[:, :, None] @ state)[:, :, 0]
    state = torch.addcmul(state, k[..., None], ((v - expected) * beta[..., None])[:, :, None])
    call.out[tokens] = (q[:, :, None] @ state)[:, :, 0].to(call.out.dtype)
    return state


def _delta_scan(call: DeltaCall, begin: int, end: int, before: Tensor) -> Tensor:
    """The chunked form: the values that the delta rule adds in a chunk solve a unit triangular system."""
    size = CHANNEL_DECAY_CHUNK if call.g.ndim == 3 else CHUNK
    state = before
    for start in range(begin, end, size):
        chunk = slice(start, min(start + size, end))
        q, k, v, g, beta = (x.transpose(0, 1) for x in _delta_inputs(call, chunk))
        if g.ndim == 2:
            g = g[..., None]
        total = g.cumsum(1)
        # exp(total_i - total_j), the decay between two tokens, for i >= j only: elsewhere it overflows.
        between = total[:, :, None] - total[:, None]
        later = torch.ones(between.shape[1:3], dtype=torch.bool, device=k.device).triu(1)
        between = between.masked_fill(later[..., None], float("-inf")).exp()
        if g.shape[-1] == 1:
            k_to_k, q_to_k = ((x @ k.transpose(1, 2)) * between[..., 0] for x in (k, q))
        else:
            decay_keys = between * k[:, None]
            k_to_k, q_to_k = ((decay_keys @ x[..., None])[..., 0] for x in (k, q))
        decay = total.exp()
        known = beta[..., None] * (v - (k * decay) @ state)
        system = k_to_k * beta[..., None]
        values = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        call.out[chunk] = ((q * decay) @ state + q_to_k @ values).transpose(0, 1).to(call.out.dtype)
        remaining = (total[:, -1:] - total).exp()
        state = state * decay[:, -1, :, None] + (k * remaining).transpose(1, 2) @ values
    return state


def _time_steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if softplus else dt


def _rate(call: SsdCall | ScanCall) -> Tensor:
    """A in float32."""
    return -call.A.float().exp() if call.log_rate else call.A.float()


def _ssd_inputs(call: SsdCall, index: Tensor | slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, dt, B and C of some tokens in float32."""
    dt = _time_steps(call.dt[index], call.dt_bias, call.softplus).clamp(call.dt_min, call.dt_max)
    return call.x[index].float(), dt, call.B[index].float(), call.C[index].float()


def _ssd_step(call: SsdCall, tokens: Tensor | slice, before: Tensor) -> Tensor:
    x, dt, B, C = _ssd_inputs(call, tokens)
    groups = (B.shape[1], x.shape[1] // B.shape[1])
    state = (before * (dt * _rate(call)).exp()[..., None, None]).unflatten(1, groups)
    state.addcmul_((x * dt[..., None]).unflatten(1, groups)[..., None], B[:, :, None, None])
    result = (state @ C[:, :, None, :, None])[..., 0].flatten(1, 2)
    _write_ssd(call, tokens, result, x)
    return state.flatten(1, 2)


def _ssd_scan(call: SsdCall, begin: int, end: int, before: Tensor) -> Tensor:
    """The chunked form: attention with decays inside a chunk, and the state for what lies before it."""
    groups = (call.B.shape[1], call.x.shape[1] // call.B.shape[1])
    state = before.unflatten(0, groups)
    for start in range(begin, end, CHUNK):
        chunk = slice(start, min(start + CHUNK, end))
        x, dt, B, C = _ssd_inputs(call, chunk)
        total = (dt * _rate(call)).cumsum(0).T.unflatten(0, groups)
        between = total[..., :, None] - total[..., None, :]
        later = torch.ones(between.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        between = between.masked_fill(later, float("-inf")).exp()
        B, C = B.transpose(0, 1)[:, None], C.transpose(0, 1)[:, None]
        steps = (x * dt[..., None]).transpose(0, 1).unflatten(0, groups)
        result = (C @ B.transpose(2, 3) * between) @ steps
        result += (C @ state.transpose(2, 3)) * total.exp()[..., None]
        _write_ssd(call, chunk, result.flatten(0, 1).transpose(0, 1), x)
        remaining = (total[..., -1:] - total).exp()
        state = state * total[..., -1:, None].exp() + (steps * remaining[..., None]).transpose(2, 3) @ B
    return state.flatten(0, 1)


def _write_ssd(call: SsdCall, index: Tensor | slice, result: Tensor, x: Tensor) -> None:
    if call.D is not None:
        result = result + call.D.float()[:, None] * x
    result = result.to(call.out.dtype)
    call.out[index] = result if call.z is None else result * F.silu(call.z[index])


def _selective_inputs(call: ScanCall, index: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
    """x, the decay `[n, I, N]` of the state and what is added to it, for some tokens in float32."""
    x = call.x[index].float()
    dt = _time_steps(call.dt[index], call.dt_bias, True)
    return x, (dt[..., None] * _rate(call)).exp(), (dt * x)[..., None] * call.B[index].float()[:, None]


def _write_selective(call: ScanCall, index: Tensor | slice, states: Tensor, x: Tensor) -> None:
    result = (states @ call.C[index].float()[..., None])[..., 0]
    if call.D is not None:
        result = result + call.D.float() * x
    if call.z is not None:
        result = result * F.silu(call.z[index].float())
    call.out[index] = result.to(call.out.dtype)


def _selective_step(call: ScanCall, tokens: Tensor | slice, before: Tensor) -> Tensor:
    x, decay, added = _selective_inputs(call, tokens)
    state = torch.addcmul(added, decay, before)
    _write_selective(call, tokens, state, x)
    return state


def _selective_scan(call: ScanCall, begin: int, end: int, before: Tensor) -> Tensor:
    state = before
    for start in range(begin, end, CHUNK):
        chunk = slice(start, min(start + CHUNK, end))
        x, decay, states = _selective_inputs(call, chunk)
        state = _recurrence(decay, states, state)
        _write_selective(call, chunk, states, x)
    return state


def _recurrence(decay: Tensor, states: Tensor, before: Tensor) -> Tensor:
    """`states[t] += decay[t] * states[t - 1]`, token by token; the last state."""
    for factor, state in zip(decay.unbind(), states.unbind(), strict=True):
        before = state.addcmul_(factor, before)
    return before


def _lru_step(call: LruCall, tokens: Tensor | slice, before: Tensor) -> Tensor:
    state = torch.addcmul(call.x[tokens].float(), call.a[tokens].float(), before)
    call.out[tokens] = state.to(call.out.dtype)
    return state


def _lru_scan(call: LruCall, begin: int, end: int, before: Tensor) -> Tensor:
    states = call.x[begin:end].to(torch.float32, copy=True)
    after = _recurrence(call.a[begin:end].float(), states, before)
    call.out[begin:end] = states.to(call.out.dtype)
    return after


_FUNCTIONS: dict[type, tuple[Callable[[Any, Any, Tensor], Tensor], Callable[[Any, int, int, Tensor], Tensor]]] = {
    ConvCall: (_conv_step, _conv_scan),
    DeltaCall: (_delta_step, _delta_scan),
    SsdCall: (_ssd_step, _ssd_scan),
    ScanCall: (_selective_step, _selective_scan),
    LruCall: (_lru_step, _lru_scan),
}
"""For each call: one token of many rows, `(call, tokens, states before) -> states after`; many tokens of one row,
`(call, begin, end, state before) -> state after`. Both write `out`."""
