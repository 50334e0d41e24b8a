"""route: routers of many models become one op, step by step; unsupported steps stay behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.compiler.eager_semantics.size_answers import dynamic_shapes_mode
from torchweave.compiler.passes.aten.route import FUSION
from torchweave.compiler.passes.testing import T, check, graph_of

E, K = 16, 4
ROUTE = torch.ops.torchweave.route.default


def nothing(logits: Tensor) -> Tensor:
    """Weights scattered to [T, E]: independent of the order of the experts, which unsorted top-k leaves open."""
    return torch.zeros(logits.shape[0], E)


def qwen3(logits: Tensor) -> tuple[Tensor, Tensor]:
    top, index = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), K, dim=-1)
    top /= top.sum(dim=-1, keepdim=True)
    return top.to(logits.dtype), index


def mixtral(logits: Tensor) -> tuple[Tensor, Tensor]:
    top, index = torch.topk(F.softmax(logits.float(), dim=1), K, dim=-1)
    return top / top.sum(dim=-1, keepdim=True), index


def gpt_oss(logits: Tensor) -> tuple[Tensor, Tensor]:
    top, index = torch.topk(logits, K, dim=-1)
    return F.softmax(top, dim=1, dtype=top.dtype), index


def granite(logits: Tensor) -> tuple[Tensor, Tensor]:
    top, index = logits.float().topk(K, dim=1)
    return torch.softmax(top, dim=1).type_as(logits), index


def minimax(logits: Tensor, bias: Tensor) -> Tensor:
    table = nothing(logits)
    scores = F.sigmoid(logits.float())
    index = torch.topk(scores + bias, K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, index)
    return table.scatter(1, index, weights / weights.sum(dim=-1, keepdim=True))


def within_groups(scores: Tensor, best: Tensor, fill: float) -> Tensor:
    index = torch.topk(best, k=2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best).scatter_(1, index, 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
    return scores.masked_fill(~mask.bool(), fill)


def deepseek_v3(logits: Tensor, bias: Tensor) -> Tensor:
    table = nothing(logits)
    scores = logits.sigmoid()
    choice = scores + bias
    choice = within_groups(choice, choice.view(-1, 4, E // 4).topk(2, dim=-1)[0].sum(dim=-1), float("-inf"))
    index = torch.topk(choice, k=K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, index)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return table.scatter(1, index, weights * 2.5)


def deepseek_v2(logits: Tensor) -> Tensor:
    table = nothing(logits)
    scores = logits.softmax(dim=-1, dtype=torch.float32)
    scores = within_groups(scores, scores.view(-1, 4, E // 4).max(dim=-1).values, 0.0)
    weights, index = torch.topk(scores, k=K, dim=-1, sorted=False)
    return table.scatter(1, index, weights * 16.0)


def distinct(dtype: torch.dtype) -> Tensor:
    """Logits [T, E] without ties in a row."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(E, generator=generator) for _ in range(T)]).to(dtype) / 4 - 2


ROUTERS: dict[str, tuple[Callable[..., Any], torch.dtype, bool, int]] = {
    # router: dtype, bias, number of fused steps
    "qwen3": (qwen3, torch.bfloat16, False, 3),
    "qwen3 in float32": (qwen3, torch.float32, False, 2),
    "mixtral": (mixtral, torch.bfloat16, False, 3),
    "gpt_oss": (gpt_oss, torch.bfloat16, False, 1),
    "granite": (granite, torch.bfloat16, False, 3),
    "minimax": (minimax, torch.bfloat16, True, 3),
    "deepseek_v3": (deepseek_v3, torch.float32, True, 3),
    "deepseek_v2": (deepseek_v2, torch.float32, False, 2),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_router_is_fused_into_one_op(name: str) -> None:
    """Matches; results are equal at every token count; opcheck passes."""
    router, dtype, biased, steps = ROUTERS[name]
    bias = (
        [torch.linspace(-0.3, 0.3, E)[torch.randperm(E, generator=torch.Generator().manual_seed(1))]] if biased else []
    )
    examples = [distinct(dtype), *bias]
    # Unsorted top-k leaves the summation order of the weights open.
    check(FUSION, router, examples, matches=steps, rtol=3e-7 if biased else 0.0)
    graph = graph_of(router, examples)
    with dynamic_shapes_mode("backed_size_oblivious"):
        while FUSION.run(graph).matches:
            pass
    computed = [str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "getitem" not in str(n.target)]
    assert [name for name in computed if not name.startswith(("aten.zeros", "aten.scatter", "aten.sym_size"))] == [
        str(ROUTE)
    ]


def in_bfloat16(logits: Tensor) -> tuple[Tensor, Tensor]:
    top, index = torch.topk(F.softmax(logits, dim=-1), K, dim=-1)
    return top, index


def scores_seen(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores = F.softmax(logits, dtype=torch.float, dim=-1)
    top, index = torch.topk(scores, K, dim=-1)
    return top, index, scores.sum(dim=0)


def smallest(logits: Tensor) -> tuple[Tensor, Tensor]:
    top, index = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), K, dim=-1, largest=False)
    return top, index


def batched(logits: Tensor) -> tuple[Tensor, Tensor]:
    top, index = torch.topk(F.softmax(logits[None], dtype=torch.float, dim=-1), K, dim=-1)
    return top, index


@pytest.mark.parametrize(
    ("router", "why"),
    [
        (in_bfloat16, "the scores are torch.bfloat16"),
        (scores_seen, "is also read by sum"),
        (smallest, "argument largest of topk is False"),
        (batched, "3 dimensions"),
    ],
)
def test_near_misses_are_left_alone_and_named(router: Callable[..., Any], why: str) -> None:
    check(FUSION, router, [distinct(torch.bfloat16)], near_miss=why)


def test_an_unsupported_step_stays_behind_the_op() -> None:
    def ernie(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.softmax(logits, dim=1, dtype=torch.float)
        index = torch.topk(scores + bias, K, dim=-1)[1]
        weights = scores.gather(-1, index)
        return weights / torch.clamp(weights.sum(dim=-1, keepdim=True), min=1e-12), index

    check(FUSION, ernie, [distinct(torch.float32), torch.linspace(-0.1, 0.1, E)], matches=1, near_miss="aten.clamp")


def test_a_graph_without_router_has_no_near_miss() -> None:
    def rotary(x: Tensor) -> Tensor:
        one, two = x.split(E // 2, dim=-1)
        return torch.cat((one * 2.0, two.float().to(x.dtype)), dim=-1)

    result = check(FUSION, rotary, [distinct(torch.bfloat16)], matches=0)
    assert not result.near_misses
