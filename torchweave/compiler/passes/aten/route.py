"""Fuse the scores, top-k and weights of an MoE router into one launch.

Before (Qwen3-MoE)                                 After
    scores = aten.softmax(logits, -1, float32)         weights, index = torchweave.route(logits, None, k, "softmax", ...,
    top, index = aten.topk(scores, k)                                                     renormalize, dtype=bfloat16)
    weights = aten.div(top, aten.sum(top, -1))
    weights = aten.to(weights, bfloat16)

When      logits are `[T, E]`; scores are float32 by softmax or sigmoid, with or without a selection bias, with group selection as
          in DeepSeek V2 and V3, or the softmax is over the selected experts alone (gpt-oss, Granite). Later steps are fused one
          by one: division by the sum (plus an epsilon), a factor, a cast, the column of a shared expert (`shared_expert`). Any
          other step stays after the op.
Numerics  exact, except that ties take the smaller index, best expert first; `torch.topk` may take any.
Pays      three to twenty launches a layer in either build: neither Inductor nor torch has a single kernel for topk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

import torchweave.ops.moe.routing  # noqa: F401 (defines torchweave::route)
from torchweave.compiler.ir.graph import FakeGraph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.base import PassResult
from torchweave.compiler.passes.matcher import Match, either
from torchweave.compiler.passes.pattern import Fusion

aten = torch.ops.aten
op = torch.ops.torchweave.route.default

_F32 = torch.float32
_NO_GROUPS = (1, 1, 1, 0.0)
_NOT_SCALED = (False, 0.0, 1.0)  # not normalized by the sum, not scaled
Function = Callable[..., Any]


def softmax() -> tuple[Function, Function]:
    """Qwen, Mixtral, OLMoE: top-k of a softmax."""

    def pattern(logits: Tensor, k: int, in_dtype: Any, ranked: bool) -> Any:
        scores = aten.softmax.int(logits, -1, in_dtype)
        best = aten.topk.default(scores, k, -1, True, ranked)
        return best[0], best[1]

    def replacement(logits: Tensor, k: int) -> Any:
        return op(logits, None, k, "softmax", _F32, *_NO_GROUPS, *_NOT_SCALED)

    return pattern, replacement


def biased(score: str) -> tuple[Function, Function]:
    """MiniMax, AFMoE, ERNIE: a bias affects the selection, not the weights."""

    def pattern(logits: Tensor, bias: Tensor, k: int, in_dtype: Any, ranked: bool) -> Any:
        scores = aten.sigmoid.default(logits) if score == "sigmoid" else aten.softmax.int(logits, -1, in_dtype)
        index = aten.topk.default(aten.add.Tensor(scores, bias), k, -1, True, ranked)[1]
        return aten.gather.default(scores, -1, index), index

    def replacement(logits: Tensor, bias: Tensor, k: int) -> Any:
        return op(logits, bias, k, score, _F32, *_NO_GROUPS, *_NOT_SCALED)

    return pattern, replacement


def _mask(best: Any, groups: Any, top_groups: Any, size: Any, rows: Any, experts: Any, pin: Any) -> Any:
    """Mask of the experts outside the selected groups, as the models compute it."""
    at = aten.topk.default(best, top_groups, -1, True, False)[1]
    ones = aten.scatter.value(aten.zeros_like.default(best, pin_memory=pin), 1, at, 1)
    spread = aten.expand.default(aten.unsqueeze.default(ones, -1), [-1, groups, size])
    copy = aten.clone.default(spread, memory_format=torch.contiguous_format)
    flat = either(aten._unsafe_view.default(copy, [rows, experts]), aten.view.default(spread, [rows, experts]))
    return aten.bitwise_not.default(aten._to_copy.default(flat, dtype=torch.bool))


def grouped_sigmoid() -> tuple[Function, Function]:
    """DeepSeek-V3, GLM-4.5, dots.1: groups by the sum of their two best scores."""

    def pattern(
        logits: Tensor, bias: Tensor, groups: int, size: int, top_groups: int, rows: Any, experts: int, pin: Any,
        fill: float, k: int, ranked: bool,
    ) -> Any:  # fmt: skip
        scores = aten.sigmoid.default(logits)
        choice = aten.add.Tensor(scores, bias)
        two = aten.topk.default(aten.view.default(choice, [-1, groups, size]), 2, -1, True, True)[0]
        best = aten.sum.dim_IntList(two, [-1])
        mask = _mask(best, groups, top_groups, size, rows, experts, pin)
        index = aten.topk.default(aten.masked_fill.Scalar(choice, mask, fill), k, -1, True, ranked)[1]
        return aten.gather.default(scores, 1, index), index

    def replacement(logits: Tensor, bias: Tensor, groups: int, top_groups: int, fill: float, k: int) -> Any:
        return op(logits, bias, k, "sigmoid", _F32, groups, top_groups, 2, fill, *_NOT_SCALED)

    return pattern, replacement


def grouped_softmax() -> tuple[Function, Function]:
    """DeepSeek-V2: groups by their best score."""

    def pattern(
        logits: Tensor, groups: int, size: int, top_groups: int, rows: Any, experts: int, pin: Any, fill: float, k: int,
        in_dtype: Any, ranked: bool,
    ) -> Any:  # fmt: skip
        scores = aten.softmax.int(logits, -1, in_dtype)
        best = aten.max.dim(aten.view.default(scores, [-1, groups, size]), -1)[0]
        mask = _mask(best, groups, top_groups, size, rows, experts, pin)
        chosen = aten.topk.default(aten.masked_fill.Scalar(scores, mask, fill), k, -1, True, ranked)
        return chosen[0], chosen[1]

    def replacement(logits: Tensor, groups: int, top_groups: int, fill: float, k: int) -> Any:
        return op(logits, None, k, "softmax", _F32, groups, top_groups, 1, fill, *_NOT_SCALED)

    return pattern, replacement


def chosen_softmax() -> tuple[Function, Function]:
    """gpt-oss, Granite: softmax of the top-k logits."""

    def pattern(logits: Tensor, k: int, in_dtype: Any, ranked: bool) -> Any:
        best = aten.topk.default(logits, k, -1, True, ranked)
        index = best[1]
        return aten.softmax.int(best[0], -1, in_dtype), index

    def replacement(logits: Tensor, k: int, in_dtype: Any) -> Any:
        dtype = in_dtype or logits.dtype
        return op(logits, None, k, "chosen_softmax", dtype, *_NO_GROUPS, *_NOT_SCALED)

    return pattern, replacement


def _routed(
    logits: Tensor, bias: Tensor | None, k: int, score: str, groups: int, top_groups: int, best: int, fill: float,
    over_sum: bool, epsilon: float, factor: float, dtype: torch.dtype = _F32,
) -> Any:  # fmt: skip
    """Replacement of the steps that change one argument of the op."""
    return op(logits, bias, k, score, dtype, groups, top_groups, best, fill, over_sum, epsilon, factor)


def float32_logits() -> tuple[Function, Function]:
    """Logits cast to float32, the dtype in which the op reads them anyway."""

    def pattern(
        logits: Tensor, bias: Tensor | None, k: int, score: str, dtype: torch.dtype, groups: int, top_groups: int,
        best: int, fill: float, over_sum: bool, epsilon: float, factor: float,
    ) -> Any:  # fmt: skip
        wide = aten._to_copy.default(logits, dtype=torch.float32)
        routed = op(wide, bias, k, score, dtype, groups, top_groups, best, fill, over_sum, epsilon, factor)
        return routed[0], routed[1]

    return pattern, _routed


def normalized() -> tuple[Function, Function]:
    """Weights divided by their sum, with or without an added epsilon."""

    def pattern(
        logits: Tensor, bias: Tensor | None, k: int, score: str, groups: int, top_groups: int, best: int, fill: float,
        epsilon: float,
    ) -> Any:  # fmt: skip
        routed = op(logits, bias, k, score, _F32, groups, top_groups, best, fill, *_NOT_SCALED)
        weights, index = routed[0], routed[1]
        total = aten.sum.dim_IntList(weights, [-1], True)
        return aten.div.Tensor(weights, either(total, aten.add.Tensor(total, epsilon))), index

    def replacement(
        logits: Tensor, bias: Tensor | None, k: int, score: str, groups: int, top_groups: int, best: int, fill: float,
        epsilon: float = 0.0,
    ) -> Any:  # fmt: skip
        return op(logits, bias, k, score, _F32, groups, top_groups, best, fill, True, epsilon, 1.0)

    return pattern, replacement


def scaled() -> tuple[Function, Function]:
    """Weights multiplied by a factor."""

    def pattern(
        logits: Tensor, bias: Tensor | None, k: int, score: str, groups: int, top_groups: int, best: int, fill: float,
        over_sum: bool, epsilon: float, factor: float,
    ) -> Any:  # fmt: skip
        routed = op(logits, bias, k, score, _F32, groups, top_groups, best, fill, over_sum, epsilon, 1.0)
        weights, index = routed[0], routed[1]
        return aten.mul.Tensor(weights, factor), index

    return pattern, _routed


def cast(like: bool) -> tuple[Function, Function]:
    """Weights cast to the model's dtype, or to that of a tensor (`like`)."""

    def pattern(
        logits: Tensor, bias: Tensor | None, k: int, score: str, groups: int, top_groups: int, best: int, fill: float,
        over_sum: bool, epsilon: float, factor: float, dtype: torch.dtype, other: Tensor,
    ) -> Any:  # fmt: skip
        routed = op(logits, bias, k, score, _F32, groups, top_groups, best, fill, over_sum, epsilon, factor)
        weights, index = routed[0], routed[1]
        if like:
            return aten.type_as.default(weights, other), index
        return aten._to_copy.default(weights, dtype=dtype), index

    def replacement(
        logits: Tensor, bias: Tensor | None, k: int, score: str, groups: int, top_groups: int, best: int, fill: float,
        over_sum: bool, epsilon: float, factor: float, dtype: Any = None, other: Any = None,
    ) -> Any:  # fmt: skip
        dtype = other.dtype if like else dtype
        return op(logits, bias, k, score, dtype, groups, top_groups, best, fill, over_sum, epsilon, factor)

    return pattern, replacement


def with_shared(gated: bool) -> tuple[Function, Function]:
    """A column for a shared expert, whose weight is the sigmoid of a gate, or 1."""

    def pattern(
        logits: Tensor, bias: Tensor | None, k: int, score: str, groups: int, top_groups: int, best: int, fill: float,
        over_sum: bool, epsilon: float, factor: float, dtype: torch.dtype, expert: float, shared_gate: Tensor,
        to_dtype: torch.dtype,
    ) -> Any:  # fmt: skip
        routed = op(logits, bias, k, score, dtype, groups, top_groups, best, fill, over_sum, epsilon, factor)
        if gated:
            own = aten.sigmoid.default(shared_gate)
            weights = aten.cat.default([routed[0], either(own, aten._to_copy.default(own, dtype=to_dtype))], -1)
        else:
            weights = aten.pad.default(routed[0], [0, 1], "constant", 1.0)
        return weights, aten.pad.default(routed[1], [0, 1], "constant", expert)

    def replacement(
        logits: Tensor, bias: Tensor | None, k: int, score: str, groups: int, top_groups: int, best: int, fill: float,
        over_sum: bool, epsilon: float, factor: float, dtype: torch.dtype, shared_gate: Tensor | None = None,
    ) -> Any:  # fmt: skip
        return op(
            logits, bias, k, score, dtype, groups, top_groups, best, fill, over_sum, epsilon, factor, True, shared_gate
        )  # fmt: skip

    return pattern, replacement


def extra_check(match: Match) -> str | None:
    logits, bindings = match.value("logits"), match.bindings
    if logits.dim() != 2:
        return f"the logits have {logits.dim()} dimensions, not tokens by experts"
    in_dtype = bindings.get("in_dtype")
    if in_dtype not in (None, torch.float32, logits.dtype):
        return f"the softmax converts to {in_dtype} before its sum"
    bias = match.value("bias") if bindings.get("bias") is not None else None
    if bias is not None and list(bias.shape) != [logits.shape[1]]:
        return f"the bias has shape {list(bias.shape)}, not one number per expert"
    if "size" in bindings and bindings["groups"] * bindings["size"] != logits.shape[1]:
        return f"{bindings['groups']} groups of {bindings['size']} are not {logits.shape[1]} experts"
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the logits are {logits.dtype}"
    if "expert" in bindings:
        return _unsupported_column(match)
    return _unsupported_dtype(match.outputs[0])


def _unsupported_column(match: Match) -> str | None:
    """Why a column of the routing is not that of a shared expert after the others, or None."""
    logits = match.value("logits")
    gate = match.value("shared_gate") if "shared_gate" in match.bindings else None
    if match["expert"] != logits.shape[1]:
        return f"the added column names expert {match['expert']}, not {logits.shape[1]}"
    if gate is not None and list(gate.shape) != [logits.shape[0], 1]:
        return f"the weights of the added column have shape {list(gate.shape)}"
    return None


def _unsupported_dtype(weights: fx.Node) -> str | None:
    """Why the op cannot return weights of this dtype, or None."""
    dtype = value(weights).dtype
    if weights.target in (aten._to_copy.default, aten.type_as.default):
        return None if dtype in (torch.float32, torch.bfloat16, torch.float16) else f"the weights become {dtype}"
    after_choice = weights.target is aten.softmax.int
    routed = weights.all_input_nodes[0].target is op
    if after_choice or routed or dtype == torch.float32:
        return None
    return f"the scores are {dtype}, not float32"


_UNRELATED = (f"not {op}", f"not {aten._to_copy.default}")


class RouterFusion(Fusion):
    """Fusion that drops near-misses unrelated to routers."""

    def run(self, graph: FakeGraph) -> PassResult:
        result = super().run(graph)
        near = tuple(miss for miss in result.near_misses if not miss.why.endswith(_UNRELATED))
        return replace(result, near_misses=near)


_PAIRS = (
    softmax(),
    *(biased(score) for score in ("sigmoid", "softmax")),
    grouped_sigmoid(),
    grouped_softmax(),
    chosen_softmax(),
    float32_logits(),
    normalized(),
    scaled(),
    cast(like=False),
    cast(like=True),
    with_shared(gated=True),
    with_shared(gated=False),
)

FUSION = RouterFusion(
    "route",
    *zip(*_PAIRS, strict=True),
    extra_check=extra_check,
    fixpoint=True,
)
