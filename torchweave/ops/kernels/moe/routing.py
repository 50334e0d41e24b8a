"""Triton: routing of a token (scores, groups, choice and weights) in one launch."""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait
from torchweave.ops.kernels.sizes import next_power_of_2

_TAKEN = tl.constexpr(-(1 << 31))
"""Key below that of every score: of an expert that was chosen, or whose score is NaN."""
_EXPERT_BITS = tl.constexpr(11)
_LAST_EXPERT = tl.constexpr((1 << 11) - 1)
"""The largest expert index of a key: `MAX_EXPERTS - 1`."""


@triton.jit
def _ordered(bits):
    """The bits of a float32 as an integer that sorts like it, and back. A warp reduces integers in one instruction."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _ordered_half(bits):
    """`_ordered` of 16 bits of a number, extended by its sign to 32."""
    return bits ^ ((bits >> 15) & 0x7FFF)


@triton.jit
def _largest_logits(
    logits, expert, real, num_experts, TOP: tl.constexpr, TOP_BLOCK: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Experts `[TOP_BLOCK]` of the largest logits of DTYPE, which has 16 bits, the smaller one of equals first, and their logits.

    A key holds a logit and its expert, so that one reduction finds both; `_best` and scores in float32 take two.
    """
    logits = tl.where(logits == 0.0, 0.0, logits)  # -0.0 is 0.0
    bits = logits.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    keys = (_ordered_half(bits) << _EXPERT_BITS) + _LAST_EXPERT - expert
    keys = tl.where(real & (logits == logits), keys, _TAKEN)
    slot = tl.arange(0, TOP_BLOCK)
    best = tl.full([TOP_BLOCK], _TAKEN, tl.int32)
    for j in tl.static_range(TOP):
        key = tl.max(tl.max(keys, axis=1), axis=0)
        keys = tl.where(keys == key, _TAKEN, keys)
        best = tl.where(slot == j, key, best)
    found = best != _TAKEN
    largest = _ordered_half(best >> _EXPERT_BITS).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return tl.where(found, _LAST_EXPERT - (best & _LAST_EXPERT), num_experts), tl.where(found, largest, float("-inf"))


@triton.jit
def _best(score, free, lane, BLOCK: tl.constexpr):
    """The first lane of the largest free score in each row; BLOCK if no lane is free or all scores are NaN."""
    best = tl.max(tl.where(free, score, float("-inf")), axis=1)
    return tl.min(tl.where(free & (score == best[:, None]), lane, BLOCK), axis=1), best


@triton.jit
def _largest_scores(
    score, bias, expert, real, lane, num_experts,
    GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, TOP: tl.constexpr, TOP_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, FILL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Experts `[TOP_BLOCK]` of the largest scores with bias in the best groups, and their scores without bias."""
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
    if GROUPS > 1:
        first, value = _best(choice, real, lane, SIZE_BLOCK)
        if GROUP_BEST == 2:
            _, second = _best(choice, real & (lane != first[:, None]), lane, SIZE_BLOCK)
            value += second
        allowed = tl.zeros([GROUP_BLOCK], tl.int32)
        group = tl.arange(0, GROUP_BLOCK)
        for _ in tl.static_range(TOP_GROUPS):
            at, _ = _best(value[None, :], ((allowed == 0) & (group < GROUPS))[None, :], group[None, :], GROUP_BLOCK)
            allowed = tl.where(group == at, 1, allowed)
        choice = tl.where(allowed[:, None] == 1, choice, FILL)
    slot = tl.arange(0, TOP_BLOCK)
    chosen = tl.zeros([TOP_BLOCK], tl.int32)
    value = tl.zeros([TOP_BLOCK], tl.float32)
    bits = tl.where(choice == 0.0, 0.0, choice).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    keys = tl.where(real & (choice == choice), _ordered(bits), _TAKEN)
    for j in tl.static_range(TOP):
        best = tl.max(tl.max(keys, axis=1), axis=0)
        found = best != _TAKEN
        at = tl.min(tl.min(tl.where((keys == best) & found, expert, num_experts), axis=1), axis=0)
        if HAS_BIAS:
            top_score = tl.sum(tl.sum(tl.where((expert == at) & real, score, 0.0), axis=1), axis=0)
        else:
            top_score = tl.where(found, _ordered(best).to(tl.float32, bitcast=True), 0.0)
        keys = tl.where(expert == at, _TAKEN, keys)
        chosen = tl.where(slot == j, at, chosen)
        value = tl.where(slot == j, top_score, value)
    return chosen, value


@triton.jit
def _score(logit, largest, total, SCORE: tl.constexpr):
    """The score of a logit; of softmax from the largest logit and the sum over all experts."""
    if SCORE == "softmax":
        logit = tl.exp(logit - largest) / total
    elif SCORE == "sigmoid":
        logit = tl.sigmoid(logit)
    return logit


@triton.jit
def route_kernel(
    logits, bias, gate, weights, index, logits_stride, gate_stride, num_experts,
    GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    TOP: tl.constexpr, TOP_BLOCK: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, FILL: tl.constexpr,
    SCORE: tl.constexpr, HAS_BIAS: tl.constexpr, BY_LOGIT: tl.constexpr, RENORMALIZE: tl.constexpr, EPSILON: tl.constexpr,
    SCALE: tl.constexpr, SHARED: tl.constexpr, HAS_GATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a token. Experts form a tile of [groups, experts of a group]; among equal scores the first expert wins.

    BY_LOGIT: choose by logits of 16 bits, which sort like their scores. SHARED: the last column is the shared expert's.
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, GROUP_BLOCK)[:, None]
    lane = tl.arange(0, SIZE_BLOCK)[None, :]
    expert = row * SIZE + lane
    real = (row < GROUPS) & (lane < SIZE)
    pdl_wait(DEPENDENT)
    logit = tl.load(logits + token * logits_stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    largest, total = 0.0, 1.0
    if SCORE == "softmax":
        largest = tl.max(tl.max(logit, axis=1), axis=0)
        total = tl.sum(tl.sum(tl.exp(logit - largest), axis=1), axis=0)
    if BY_LOGIT:
        chosen, value = _largest_logits(logit, expert, real, num_experts, TOP, TOP_BLOCK, logits.dtype.element_ty)
        value = _score(value, largest, total, SCORE)
    else:
        chosen, value = _largest_scores(
            _score(logit, largest, total, SCORE), bias, expert, real, lane, num_experts,
            GROUPS, GROUP_BLOCK, SIZE_BLOCK, TOP, TOP_BLOCK, TOP_GROUPS, GROUP_BEST, FILL, HAS_BIAS,
        )  # fmt: skip
    slot = tl.arange(0, TOP_BLOCK)
    used = slot < TOP
    if SCORE == "chosen_softmax":
        share = tl.where(used, tl.exp(value - tl.max(tl.where(used, value, float("-inf")), axis=0)), 0.0)
        value = share / tl.sum(share, axis=0)
    if RENORMALIZE:
        value = value / (tl.sum(tl.where(used, value, 0.0), axis=0) + EPSILON)
    value = value * SCALE
    COLUMNS: tl.constexpr = TOP + 1 if SHARED else TOP
    at = token * COLUMNS + slot
    tl.store(weights + at, value.to(weights.dtype.element_ty), mask=used)
    tl.store(index + at, chosen.to(index.dtype.element_ty), mask=used)
    if SHARED:
        own = 1.0
        if HAS_GATE:
            own = tl.sigmoid(tl.load(gate + token * gate_stride).to(tl.float32)).to(gate.dtype.element_ty)
        tl.store(weights + token * COLUMNS + TOP, own)
        tl.store(index + token * COLUMNS + TOP, num_experts)


def supports_logit_keys(logits: Tensor, bias: Tensor | None, num_groups: int) -> bool:
    """Whether a key of 32 bits holds a logit and its expert, and their order is that of the scores."""
    return logits.dtype.itemsize == 2 and bias is None and num_groups == 1


def launch_route(
    logits: Tensor, bias: Tensor | None, weights: Tensor, index: Tensor,
    *, score: str, num_groups: int, top_groups: int, group_best: int, fill: float, renormalize: bool, epsilon: float,
    scale: float, shared: bool = False, shared_gate: Tensor | None = None, dependent: bool = False,
) -> None:  # fmt: skip
    """logits [T, E] with contiguous rows, bias [E], shared_gate [T, 1], weights and index [T, k], or [T, k + 1] if shared."""
    experts, top = logits.shape[1], index.shape[1] - shared
    by_logit = supports_logit_keys(logits, bias, num_groups)
    gate = logits if shared_gate is None else shared_gate
    size = experts // num_groups
    route_kernel[(logits.shape[0],)](
        logits, logits if bias is None else bias, gate, weights, index, logits.stride(0), gate.stride(0), experts,
        GROUPS=num_groups, GROUP_BLOCK=next_power_of_2(num_groups), SIZE=size,
        SIZE_BLOCK=next_power_of_2(size), TOP=top, TOP_BLOCK=next_power_of_2(top), TOP_GROUPS=top_groups,
        GROUP_BEST=group_best, FILL=fill, SCORE=score, HAS_BIAS=bias is not None, BY_LOGIT=by_logit, RENORMALIZE=renormalize,
        EPSILON=epsilon, SCALE=scale, SHARED=shared, HAS_GATE=shared_gate is not None, DEPENDENT=dependent,
        num_warps=1 if by_logit or experts <= 256 else 4, **pdl_options(dependent),
    )  # fmt: skip
