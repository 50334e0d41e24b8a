"""Routed experts of a mixture: the weighted sum of the outputs of the experts that the router chose for a token.

Routing is not part of `torchweave::experts`. On a CPU a loop over the chosen experts runs, in the order of transformers' eager
loop. On a GPU no launch may depend on the routing, or the step could not be captured in a CUDA graph; the number of tokens is
known when the op runs, which is when a graph is recorded, so the op chooses its kernels for each bucket (`choose`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweave.ops.moe.reference import ACTIVATIONS, ExpertForm, ExpertsCall, dense_experts, loop_over_experts
from torchweave.ops.registry import define

__all__ = ["ACTIVATIONS", "experts"]


def _fake(x: Tensor, *_: object, **__: object) -> Tensor:
    return x.new_empty(x.shape)


@define("torchweave::experts", fake=_fake)
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

    Numerics: products are summed in float32 and rounded to x's dtype; so is the activation; the weighted sum on a GPU stays in
    float32 until it is rounded once. No result depends on timing: the same call gives the same bits.
    """
    form = ExpertForm(activation, gated, interleaved, transposed, alpha, limit)
    out = x.new_empty(x.shape)
    call = ExpertsCall(x, index, weight, up, down, up_bias, down_bias, out, form)
    if not x.is_cuda:
        loop_over_experts(call)
    elif x.dtype in (torch.bfloat16, torch.float16):
        from torchweave.ops.moe.fused_experts import run

        run(call)
    else:
        dense_experts(call)
    return out
