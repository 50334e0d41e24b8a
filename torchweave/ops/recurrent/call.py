"""Calls of the recurrent ops as values, in the order of their schemas, and the shapes of their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

CONV_ACTIVATIONS = ("", "silu", "swish")


class StateAccess(IntEnum):
    """What a run of a call does with the states of its rows. A step with drafts runs each call twice.

    ADVANCE: advance them by all tokens of the row.
    READ: read them only; which drafts are kept is not known yet.
    COMMIT: advance them by the tokens of the row that were kept, and write no results.
    """

    ADVANCE = 0
    READ = 1
    COMMIT = 2


Copy = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Copies up to four tensors."""


def clone_each(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [each.clone() for each in tensors]


def _without_memory(out: Tensor) -> Tensor:
    return torch.empty_like(out, device="meta")


@dataclass(frozen=True, slots=True)
class ConvCall:
    """Arguments of `torchweave::causal_conv`, a depthwise causal convolution:
    `out[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - K + 1 + j, c])`.

    Attributes:
        x: `[T, C]`; inputs before a request's first token are zeros.
        weight: `[C, K]`.
        bias: `[C]`.
        out: `[T, C]`, written whole.
        state: index of the state, `[S, C, K - 1]` of x's dtype: the inputs of the last K - 1 tokens, the oldest first.
        activation: `""`, `"silu"` or `"swish"`; others raise ValueError.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    state: int
    activation: str

    def __post_init__(self) -> None:
        if self.activation not in CONV_ACTIVATIONS:
            raise ValueError(f"causal_conv has no activation {self.activation!r}; use '', 'silu' or 'swish'")

    @property
    def state_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """`[C, K - 1]`: the inputs of the last K - 1 tokens, the oldest first."""
        channels, width = self.weight.shape
        return (channels, width - 1), self.x.dtype

    def held(self, copy: Copy = clone_each) -> ConvCall:
        """The same call for `StateAccess.COMMIT`, later: copies of the inputs that the state depends on, and `out` on the meta
        device."""
        (x,) = copy([self.x])
        return replace(self, x=x, out=_without_memory(self.out))


@dataclass(frozen=True, slots=True)
class DeltaCall:
    """Arguments of `torchweave::gated_delta`, the gated delta rule, for each value head, with a state `S[K, V]`:
    `S = exp(g) * S; S += k (beta * (v - k S))^T; out = K**-0.5 * q S`.

    Attributes:
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

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    out: Tensor
    state: int
    normalize: bool
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None

    @property
    def state_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """`[HV, K, V]`."""
        return (self.v.shape[1], self.k.shape[2], self.v.shape[2]), torch.float32

    def held(self, copy: Copy = clone_each) -> DeltaCall:
        """See `ConvCall.held`; q has no part in the state."""
        k, v, g, beta = copy([self.k, self.v, self.g, self.beta])
        return replace(self, q=k, k=k, v=v, g=g, beta=beta, out=_without_memory(self.out))


@dataclass(frozen=True, slots=True)
class SsdCall:
    """Arguments of `torchweave::ssd`, the scan of Mamba2 (state space duality), for each head, with a state `S[P, N]`:
    `S = exp(dt * A) * S + dt * x B^T; out = S C + D * x`.

    Lightning attention is this op with `x = v, B = k, C = q, A = -slope`, a `dt` of ones (which may be expanded) and no limits.

    Attributes:
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

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    out: Tensor
    state: int
    softplus: bool
    dt_min: float
    dt_max: float
    z: Tensor | None = None
    log_rate: bool = False

    @property
    def state_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """`[H, P, N]`."""
        return (self.x.shape[1], self.x.shape[2], self.B.shape[2]), torch.float32

    def held(self, copy: Copy = clone_each) -> SsdCall:
        """See `ConvCall.held`; C, D and z have no part in the state."""
        x, dt, B = copy([self.x, self.dt, self.B])
        return replace(self, x=x, dt=dt, B=B, C=B, D=None, z=None, out=_without_memory(self.out))


@dataclass(frozen=True, slots=True)
class ScanCall:
    """Arguments of `torchweave::selective_scan`, the scan of Mamba, for each channel, with a state `S[N]` and
    `dt = softplus(dt + dt_bias)`: `S = exp(dt * A) * S + dt * x * B; out = (S C + D * x) * silu(z)`.

    Attributes:
        x, dt, z: `[T, I]`.
        A: `[I, N]`, at most 0; with `log_rate` the logarithm of -A, as in `ssd`.
        B, C: `[T, N]`.
        D, dt_bias: `[I]`.
        out: `[T, I]`, written whole.
        state: index of the state, `[S, I, N]` float32.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    out: Tensor
    state: int
    log_rate: bool = False

    @property
    def state_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """`[I, N]`."""
        return (self.A.shape[0], self.A.shape[1]), torch.float32

    def held(self, copy: Copy = clone_each) -> ScanCall:
        """See `ConvCall.held`; C, D and z have no part in the state."""
        x, dt, B = copy([self.x, self.dt, self.B])
        return replace(self, x=x, dt=dt, B=B, C=B, D=None, z=None, out=_without_memory(self.out))


@dataclass(frozen=True, slots=True)
class LruCall:
    """Arguments of `torchweave::rg_lru`, the linear recurrence of the RG-LRU: `h = a * h + x; out = h`, from h = 0.

    Attributes:
        a, x, out: `[T, I]`.
        state: index of the state, `[S, I]` float32.
    """

    a: Tensor
    x: Tensor
    out: Tensor
    state: int

    @property
    def state_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """`[I]`."""
        return (self.x.shape[1],), torch.float32

    def held(self, copy: Copy = clone_each) -> LruCall:
        """See `ConvCall.held`."""
        a, x = copy([self.a, self.x])
        return replace(self, a=a, x=x, out=_without_memory(self.out))


RecurrentCall = ConvCall | DeltaCall | SsdCall | ScanCall | LruCall
