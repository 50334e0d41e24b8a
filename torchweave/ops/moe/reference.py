"""Routed experts in plain torch: the eager reference of the op, and its path where the kernels do not run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

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
    """Operands of one call of `torchweave::experts`."""

    x: Tensor
    index: Tensor
    weight: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    out: Tensor
    form: ExpertForm

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
        return self.down.shape[1 if self.form.transposed else 2]

    def tokens(self, begin: int, end: int) -> ExpertsCall:
        """The same call for tokens `[begin, end)`."""
        part = slice(begin, end)
        return replace(self, x=self.x[part], index=self.index[part], weight=self.weight[part], out=self.out[part])


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
    h = x @ call.up[e] if form.transposed else F.linear(x, call.up[e])
    if call.up_bias is not None:
        h = h + call.up_bias[e]
    h = activate(h, form)
    y = h @ call.down[e] if form.transposed else F.linear(h, call.down[e])
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


def dense_experts(call: ExpertsCall) -> None:
    """Run every expert on every token, weighted by 0 where it was not chosen. Slow, capture-safe, any dtype."""
    total = torch.zeros(call.out.shape, dtype=torch.float32, device=call.out.device)
    for e in range(call.num_experts):
        share = torch.where(call.index == e, call.weight, 0).sum(dim=1, keepdim=True)
        total += apply_expert(call, call.x, e).float() * share
    call.out.copy_(total)
