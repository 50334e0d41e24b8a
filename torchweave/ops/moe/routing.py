"""`torchweave::route`: chosen experts and their weights from a router's logits, in one launch.

Models write routing as four to twenty operations (softmax, topk, gather, sum, divide, masks over groups), each of which costs a
launch at decode. The op covers their common forms with the same roundings at the same places; its eager reference is their
arithmetic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.registry import define

SCORES = ("softmax", "sigmoid", "chosen_softmax")
MAX_EXPERTS = 2048
"""Largest number of experts: a program holds the scores of a token in registers; above it torch's own operations run."""


def _fake(
    logits: Tensor, bias: Tensor | None, top_k: int, score: str, dtype: torch.dtype, num_groups: int = 1, top_groups: int = 1,
    group_best: int = 1, fill: float = 0.0, renormalize: bool = False, epsilon: float = 0.0, scale: float = 1.0,
    shared: bool = False, shared_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    size = (logits.shape[0], top_k + shared)
    return logits.new_empty(size, dtype=dtype), logits.new_empty(size, dtype=torch.int64)


@define("torchweave::route", fake=_fake)
def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    score: str,
    dtype: torch.dtype,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
    fill: float = 0.0,
    renormalize: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
    shared: bool = False,
    shared_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights `[T, k]` of `dtype` and experts `[T, k]` (int64) of logits `[T, E]`, the best expert first.

    Args:
        bias: `[E]`, added to the scores for the choice only; weights exclude it.
        top_k: k, experts of a token.
        score: `softmax` or `sigmoid` of the logits in float32; `chosen_softmax`: choose by the logits, then take the softmax over
            the chosen experts.
        num_groups: groups of neighboring experts; with more than one, experts outside the `top_groups` best groups get `fill`
            as score. A group's score is the sum of its `group_best` best experts, 1 or 2.
        renormalize: divide by the sum over the chosen experts, plus epsilon; then multiply by scale.
        shared: append a column, so that both results are `[T, k + 1]`: expert E, which every token has, of weight 1, or of the
            sigmoid of shared_gate `[T, 1]`, which is rounded to that dtype first.

    Among equal scores the kernel takes the smaller expert index. `torch.topk`, and so the reference, does not specify it. Logits in
    16 bits, without bias and groups, are compared themselves: of different logits whose scores are equal in float32 the kernel
    takes the larger. A NaN among such logits under softmax makes the token's weights NaN, as in torch; other NaN scores are not
    chosen, and instead of a missing expert the index is E.
    """
    assert score in SCORES, f"score {score!r}: expected one of {SCORES}"
    if logits.is_cuda and logits.shape[1] <= MAX_EXPERTS and logits.stride(1) == 1:
        from torchweave.ops.kernels.dependent_launch import supports_pdl
        from torchweave.ops.kernels.moe.routing import launch_route

        weights, index = _fake(logits, bias, top_k, score, dtype, shared=shared)
        if logits.shape[0]:
            launch_route(
                logits, bias, weights, index, score=score, num_groups=num_groups, top_groups=top_groups, group_best=group_best,
                fill=fill, renormalize=renormalize, epsilon=epsilon, scale=scale, shared=shared, shared_gate=shared_gate,
                dependent=supports_pdl(logits.device),
            )  # fmt: skip
        return weights, index
    scores = _scores(logits, score)
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        choice = _within_groups(choice, num_groups, top_groups, group_best, fill)
    weights, index = torch.topk(choice, top_k, dim=-1)
    if bias is not None:
        weights = scores.gather(1, index)
    if score == "chosen_softmax":
        weights = torch.softmax(weights, dim=-1)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + epsilon)
    if scale != 1.0:
        weights = weights * scale
    weights = weights.to(dtype)
    return _with_shared(weights, index, logits.shape[1], shared_gate) if shared else (weights, index)


def _with_shared(weights: Tensor, index: Tensor, expert: int, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """The routing with a column for the shared expert."""
    own = weights.new_ones(weights.shape[0], 1) if gate is None else gate.sigmoid().to(weights.dtype)
    return torch.cat([weights, own], -1), F.pad(index, (0, 1), value=expert)


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    return logits.float().sigmoid() if score == "sigmoid" else logits.float()


def _within_groups(choice: Tensor, num_groups: int, top_groups: int, group_best: int, fill: float) -> Tensor:
    """The scores of the best groups, and `fill` for the others."""
    grouped = choice.view(choice.shape[0], num_groups, -1)
    best = grouped.topk(group_best, dim=-1)[0].sum(dim=-1)
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(top_groups, dim=-1)[1], True)
    return grouped.masked_fill(~allowed[:, :, None], fill).view(choice.shape)
