"""Routed experts of a mixture: each token goes through the few experts that the router chose for it.

`torchweave::experts` writes the weighted sum of the chosen experts' outputs. Routing stays the model's. On a CPU a loop over
the experts that were hit does the work, in the order of transformers' own eager loop. On a GPU nothing may depend on
where tokens went, or the step could not be captured in a CUDA graph: pairs of token and expert are sorted by
expert and go through one grouped matmul, whose group boundaries stay on the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.registry import define

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@define("torchweave::experts", mutates=("out",))
def experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    out: Tensor,
    activation: str,
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> None:
    """Write `sum_j weight[t, j] * expert[index[t, j]](x[t])` into `out`.

    Args:
        x: `[T, K]`; out: `[T, K]` of the same dtype.
        index: `[T, k]` experts of each token, 0..E-1. An index >= E (an expert of another rank) adds nothing.
        weight: `[T, k]` of x's dtype or float32.
        up: `[E, 2 I, K]`, gate and up halves; `[E, I, K]` when not gated. `transposed`: `[E, K, 2 I]`.
        down: `[E, K, I]`; `transposed`: `[E, I, K]`.
        up_bias, down_bias: `[E, 2 I]`, `[E, K]`, both or neither.
        activation: a key of `ACTIVATIONS`.
        interleaved: gate and up alternate in the columns instead of being two halves.
        alpha, limit: where alpha > 0, `(up + 1) * gate * sigmoid(alpha * gate)`; where limit > 0, gate is clamped from above
            and up on both sides by it before.
    """
    on_gpu = _grouped if x.dtype == torch.bfloat16 else _dense
    rows = on_gpu if x.is_cuda else _looped
    rows(
        x, index, weight, up, down, up_bias, down_bias, out, (activation, gated, interleaved, transposed, alpha, limit)
    )


_Form = tuple[str, bool, bool, bool, float, float]


def _activate(h: Tensor, form: _Form) -> Tensor:
    activation, gated, interleaved, _, alpha, limit = form
    if not gated:
        return ACTIVATIONS[activation](h)
    gate, up = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if alpha > 0:
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    return ACTIVATIONS[activation](gate) * up


def _one_expert(
    x: Tensor, e: int, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None, form: _Form
) -> Tensor:
    transposed = form[3]
    h = x @ up[e] if transposed else F.linear(x, up[e])
    if up_bias is not None:
        h = h + up_bias[e]
    h = _activate(h, form)
    y = h @ down[e] if transposed else F.linear(h, down[e])
    return y if down_bias is None else y + down_bias[e]


def _looped(
    x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    out: Tensor, form: _Form,
) -> None:  # fmt: skip
    """Only the experts that were hit, in ascending order. Reads the routing on the host: for CPUs."""
    out.zero_()
    hit = index.unique().tolist()
    for e in hit:
        if e >= up.shape[0]:
            continue
        slot, token = torch.where(index.t() == e)
        y = _one_expert(x[token], e, up, down, up_bias, down_bias, form)
        out.index_add_(0, token, (y * weight[token, slot, None]).to(out.dtype))


def _dense(
    x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    out: Tensor, form: _Form,
) -> None:  # fmt: skip
    """Every expert on every token, weighted by 0 where it was not chosen. Wasteful, capture-safe, any dtype."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for e in range(up.shape[0]):
        share = torch.where(index == e, weight, 0).sum(dim=1, keepdim=True)
        total += _one_expert(x, e, up, down, up_bias, down_bias, form).float() * share
    out.copy_(total)


def _grouped(
    x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    out: Tensor, form: _Form,
) -> None:  # fmt: skip
    """Pairs sorted by expert through `torch._grouped_mm`; pairs of other ranks lie behind the last group and count nothing."""
    transposed, num_experts, top_k = form[3], up.shape[0], index.shape[1]
    experts_of_pairs, order = torch.sort(index.reshape(-1).to(torch.int32), stable=True)
    tokens = order // top_k
    ends = torch.searchsorted(
        experts_of_pairs, torch.arange(num_experts, device=x.device, dtype=torch.int32), right=True, out_int32=True
    )
    mine = (experts_of_pairs < num_experts)[:, None]
    bias_row = experts_of_pairs.clamp(max=num_experts - 1)
    h = torch._grouped_mm(x[tokens], up if transposed else up.transpose(1, 2), offs=ends)
    if up_bias is not None:
        h = h + up_bias[bias_row]
    y = torch._grouped_mm(_activate(h, form).contiguous(), down if transposed else down.transpose(1, 2), offs=ends)
    if down_bias is not None:
        y = y + down_bias[bias_row]
    weighted = torch.where(mine, y.float() * weight.reshape(-1)[order, None].float(), 0.0)
    restored = torch.empty_like(weighted)
    restored[order] = weighted
    out.copy_(restored.view(index.shape[0], top_k, -1).sum(dim=1))
