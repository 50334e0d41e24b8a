"""Routed experts of a mixture: the weighted sum of the outputs of the experts that the router chose for a token.

Routing is not part of `torchweave::experts`. On a CPU a loop over the chosen experts runs, in the order of transformers' eager
loop. On a GPU no launch may depend on the routing, or the step could not be captured in a CUDA graph; the number of tokens is
known when the op runs, which is when a graph is recorded, so the op chooses its kernels for each bucket (`choose`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.kernels.moe.packing import PLAIN, Packing
from torchweave.ops.quant.fp8 import GROUP
from torchweave.ops.quant.int_linear import dequantize_int
from torchweave.ops.registry import define

PACKED_DTYPES = (torch.int32, torch.int8)
"""Dtypes of weights in the layout of `torchweave::int_linear`."""
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True)
class ExpertForm:
    """Activation of an expert and layout of its weights; see `torchweave::experts`."""

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True)
class ExpertsCall:
    """Operands of one call of `torchweave::experts`, or of `torchweave::quantized_experts`, whose weights have scales."""

    x: Tensor
    index: Tensor
    weight: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    out: Tensor
    form: ExpertForm
    up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    up_packing: Packing = PLAIN
    down_packing: Packing = PLAIN
    shared: bool = False
    residual: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def top_k(self) -> int:
        return self.index.shape[1]

    @property
    def num_experts(self) -> int:
        return self.up.shape[0]

    @property
    def inner(self) -> int:
        """I: columns between the two products."""
        if self.up_scale is not None:
            return self.up.shape[1] // (2 if self.form.gated else 1)
        return self.down.shape[1 if self.form.transposed else 2]

    def up_of(self, e: int) -> Tensor:
        """The first weight of expert e, in x's dtype."""
        if self.up_scale is None:
            return self.up[e]
        return _dequantize(self.up[e], self.up_scale[e], self.x.dtype, self.up_packing, e, self.x.shape[1])

    def down_of(self, e: int) -> Tensor:
        """The second weight of expert e, in x's dtype."""
        if self.down_scale is None:
            return self.down[e]
        return _dequantize(self.down[e], self.down_scale[e], self.x.dtype, self.down_packing, e, self.inner)

    def tokens(self, begin: int, end: int) -> ExpertsCall:
        """The same call for tokens `[begin, end)`."""
        part = slice(begin, end)
        residual = None if self.residual is None else self.residual[part]
        return replace(
            self,
            x=self.x[part],
            index=self.index[part],
            weight=self.weight[part],
            out=self.out[part],
            residual=residual,
        )


def _dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype, packing: Packing, e: int, width: int) -> Tensor:
    """A weight `[N, width]` of expert e in `dtype`, from its part of what `torchweave::quantized_experts` takes."""
    if weight.dtype in PACKED_DTYPES:
        zero, row_scale = packing.of(e)
        return dequantize_int(weight, scale, zero, width, packing.group or width, dtype, row_scale)
    if scale.shape[0] != weight.shape[0]:
        scale = scale.repeat_interleave(GROUP, 0)[: weight.shape[0]]
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
    return (weight.float() * scale).to(dtype)


def activate(h: Tensor, form: ExpertForm) -> Tensor:
    """[..., 2 I] (or [..., I] when not gated) -> [..., I]."""
    if not form.gated:
        return ACTIVATIONS[form.activation](h)
    gate, up = (h[..., ::2], h[..., 1::2]) if form.interleaved else h.chunk(2, dim=-1)
    if form.limit > 0:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    if form.alpha > 0:
        return (up + 1) * (gate * torch.sigmoid(gate * form.alpha))
    return ACTIVATIONS[form.activation](gate) * up


def apply_expert(call: ExpertsCall, x: Tensor, e: int) -> Tensor:
    """Expert e on the rows of x."""
    form = call.form
    h = x @ call.up_of(e) if form.transposed else F.linear(x, call.up_of(e))
    if call.up_bias is not None:
        h = h + call.up_bias[e]
    h = activate(h, form)
    y = h @ call.down_of(e) if form.transposed else F.linear(h, call.down_of(e))
    return y if call.down_bias is None else y + call.down_bias[e]


def loop_over_experts(call: ExpertsCall) -> None:
    """Run the chosen experts in ascending order. Reads the routing on the host: for CPUs."""
    call.out.zero_()
    for e in call.index.unique().tolist():
        if e >= call.num_experts:
            continue
        slot, token = torch.where(call.index.t() == e)
        y = apply_expert(call, call.x[token], e)
        call.out.index_add_(0, token, (y * call.weight[token, slot, None]).to(call.out.dtype))
    _add_residual(call)


def dense_experts(call: ExpertsCall) -> None:
    """Run every expert on every token, weighted by 0 where it was not chosen. Slow, capture-safe, any dtype."""
    total = torch.zeros(call.out.shape, dtype=torch.float32, device=call.out.device)
    for e in range(call.num_experts):
        share = torch.where(call.index == e, call.weight, 0).sum(dim=1, keepdim=True)
        total += apply_expert(call, call.x, e).float() * share
    call.out.copy_(total)
    _add_residual(call)


def _add_residual(call: ExpertsCall) -> None:
    if call.residual is not None:
        call.out.add_(call.residual)


def fake_sum(x: Tensor, *_: object, **__: object) -> Tensor:
    """`[T, K]` -> `[T, K]`."""
    return x.new_empty(x.shape)


@define("torchweave::experts", fake=fake_sum)
def experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    alpha: float = 0.0,
    limit: float = 0.0,
    shared: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`sum_j weight[t, j] * expert[index[t, j]](x[t])`: `[T, K]` of x's dtype.

    Args:
        x: `[T, K]`.
        index: `[T, k]` experts of each token, 0..E-1. An index >= E (an expert of another rank) adds nothing.
        weight: `[T, k]` of x's dtype or float32.
        up: `[E, 2 I, K]`, gate and up halves; `[E, I, K]` when not gated. `transposed`: `[E, K, 2 I]`.
        down: `[E, K, I]`; `transposed`: `[E, I, K]`.
        up_bias, down_bias: `[E, 2 I]`, `[E, K]`, both or neither.
        activation: a key of `ACTIVATIONS`.
        interleaved: gate and up alternate in the columns instead of being two halves.
        alpha, limit: where alpha > 0, `(up + 1) * gate * sigmoid(alpha * gate)`; where limit > 0, gate is clamped from above
            and up on both sides by it before.
        shared: the last expert is a shared one, which every token's last column of `index` names.
        residual: `[T, K]` of x's dtype, with contiguous rows; added to the rounded sum.

    Numerics: products are summed in float32 and rounded to x's dtype; so is the activation; the weighted sum on a GPU stays in
    float32 until it is rounded once. A shared expert's output is added to that: rounded, weighted and rounded, as models with
    shared experts do. No result depends on timing: the same call gives the same bits.
    """
    form = ExpertForm(activation, gated, interleaved, transposed, alpha, limit)
    out = x.new_empty(x.shape)
    call = ExpertsCall(x, index, weight, up, down, up_bias, down_bias, out, form, shared=shared, residual=residual)
    if not x.is_cuda:
        loop_over_experts(call)
    elif x.dtype in (torch.bfloat16, torch.float16):
        from torchweave.ops.moe.fused_experts import run

        run(call)
    else:
        dense_experts(call)
    return out
