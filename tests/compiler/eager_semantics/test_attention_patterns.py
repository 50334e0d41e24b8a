"""Attention that Inductor's stored patterns match and do not mean; see `attention_patterns`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.compiler.eager_semantics.as_eager import check


def _qkv(tokens: int, batch: int = 2) -> dict[str, Tensor]:
    return {name: torch.randn(batch, tokens, 4, 4) * 3 for name in "qkv"}


def _attention(permuted_key: tuple[int, ...], dim: int, scale: Any) -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.permute(0, 2, 1, 3), k.permute(*permuted_key), v.permute(0, 2, 1, 3)
        return scale(torch.matmul(q, k)).softmax(dim).matmul(v)

    return forward


def _times(x: Tensor) -> Tensor:
    return x * 0.35


def _divided(x: Tensor) -> Tensor:
    return x.div(2.0)


@pytest.mark.parametrize(("dim", "scale"), [(0, _times), (1, _divided), (2, _times)])
def test_a_softmax_over_another_dimension(dim: int, scale: Any) -> None:
    """Over the queries (slot attention), over heads, over the batch."""
    check(_attention((0, 2, 3, 1), dim, scale), lambda: _qkv(4))


def test_attention_over_the_last_dimension_is_one_kernel() -> None:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(q, k.transpose(-2, -1)).div(4.0).softmax(dim=3).matmul(v)

    before = counters["inductor"]["fuse_attention"]
    check(forward, lambda: {name: torch.randn(2, 3, 7, 16) for name in "qkv"})
    assert counters["inductor"]["fuse_attention"] > before


def test_a_key_kept_as_batch_heads_dim_tokens() -> None:
    """Equal sizes let wrong permutations pass, others raised an error without a cause."""
    dynamic = {name: {0: "B", 1: "T"} for name in "qkv"}
    check(
        _attention((0, 2, 3, 1), -1, _times), lambda: _qkv(4), lambda: _qkv(9, 1), lambda: _qkv(5, 3), dynamic=dynamic
    )


def test_co_attention_by_bmm() -> None:
    def forward(self: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.bmm(a, b.transpose(1, 2)) / 2.0
        return torch.bmm(scores.softmax(2), b), torch.bmm(scores.softmax(1).transpose(1, 2), a)

    check(forward, lambda: {"a": torch.randn(2, 5, 4), "b": torch.randn(2, 5, 4)})


def test_a_row_that_is_masked_as_a_whole_is_not_a_number() -> None:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (torch.matmul(q, k.transpose(-2, -1)).div(2.0) + mask).softmax(-1).matmul(v)

    def inputs() -> dict[str, Tensor]:
        mask = torch.zeros(2, 1, 4, 4)
        mask[:, :, 2] = -float("inf")
        return {**{name: torch.randn(2, 3, 4, 8) for name in "qkv"}, "mask": mask}

    check(forward, inputs)
