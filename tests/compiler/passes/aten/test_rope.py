"""rope and qk_norm_rope: full and partial, in one dtype or with float32 angles, and near-misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiler.passes.written import (
    BF16,
    heads,
    rotary,
    rotary_each,
    rotary_part,
    rotary_tokens_first,
    rotary_wide,
)
from torchweave.compiler.passes.aten import qk_norm_rope, rope
from torchweave.compiler.passes.manager import run_pass
from torchweave.compiler.passes.testing import T, check, graph_of
from torchweave.ops.norm import rms_norm


def operands(width: int = 16, dtype: torch.dtype = BF16, angles: torch.dtype = BF16) -> list[Tensor]:
    """A merged product of 4 + 2 + 2 heads of 16 numbers, cos and sin."""
    return [torch.randn(1, T, 128).to(dtype), torch.randn(1, T, width).to(angles), torch.randn(1, T, width).to(angles)]


def of(turn: Any) -> Any:
    def function(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k, _ = product.split([64, 32, 32], -1)
        return turn(heads(q), heads(k), cos, sin)

    return function


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("turn", "width"), [(rotary, 16), (rotary_part, 8), (rotary_part, 16)])
def test_rope_fires_once_for_q_and_k(turn: Any, width: int, dtype: torch.dtype) -> None:
    result = check(rope.FUSION, of(turn), operands(width, dtype, dtype), matches=1)
    assert result.rewritten >= 14


def tokens_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotary_tokens_first(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


@pytest.mark.parametrize("turn", [rotary_each, tokens_first])
def test_rope_with_an_unsqueeze_for_each_projection(turn: Any) -> None:
    check(rope.FUSION, of(turn), operands(), matches=1)


def test_rope_with_float32_angles() -> None:
    check(rope.FUSION, of(rotary_wide), operands(angles=torch.float32), matches=1)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        return x * cos[:, None] + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin[:, None]

    return turned(q), turned(k)


def other_angles(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotary(q, k, cos, sin)[0], rotary(q, k, cos * 2, sin)[1]


def third(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin

    return turned(q), turned(k)


@pytest.mark.parametrize(
    ("turn", "angles", "why"),
    [
        (other_angles, BF16, "argument other of mul"),
        (third, BF16, "the halves are 4 of 16"),
        (rotary, torch.float32, "and sin torch.float32"),
    ],
)
def test_rope_names_near_misses(turn: Any, angles: torch.dtype, why: str) -> None:
    check(rope.FUSION, of(turn), operands(angles=angles), near_miss=why)


def test_the_interleaved_form_is_left_alone() -> None:
    check(rope.FUSION, of(interleaved), operands(), matches=0)


WEIGHTS = [torch.rand(16).to(BF16) + 0.5, torch.rand(16).to(BF16) + 0.5]


def normed(eps: float = 1e-6, k_eps: float = 1e-6) -> Any:
    def function(
        product: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, _ = (part.view(1, product.shape[1], -1, 16) for part in product.split([64, 32, 32], -1))
        q, k = rms_norm(q, q_weight, eps).transpose(1, 2), rms_norm(k, k_weight, k_eps).transpose(1, 2)
        return rotary(q, k, cos, sin)

    return function


def raised(function: Any) -> Any:
    """A graph in which rope is one op, as qk_norm_rope expects."""
    graph = graph_of(function, [*operands(), *WEIGHTS])
    assert run_pass(rope.FUSION, graph).matches == 1
    return graph


def test_qk_norm_rope_fires_once_behind_rope() -> None:
    graph = raised(normed())
    result = run_pass(qk_norm_rope.FUSION, graph, debug=True)
    assert result.matches == 1 and not result.near_misses
    assert [str(n.target) for n in graph.graph.nodes if "torchweave" in str(n.target)] == [
        "torchweave.qk_norm_rope.default"
    ]
    for tokens in (1, 2, 7, 64):
        product, cos, sin = (
            item[:, :1].repeat(1, tokens, 1) * torch.rand(1, tokens, 1).to(BF16) for item in operands()
        )
        got = graph.module(product, cos, sin, *WEIGHTS)
        assert all(map(torch.equal, got, normed()(product, cos, sin, *WEIGHTS)))


def test_qk_norm_rope_names_norms_of_two_kinds() -> None:
    result = run_pass(qk_norm_rope.FUSION, raised(normed(k_eps=1e-5)))
    assert result.matches == 0 and "argument eps" in result.near_misses[0].why


def test_qk_norm_rope_passes_opcheck() -> None:
    q, k = torch.randn(1, 7, 4, 16), torch.randn(1, 7, 2, 16)
    cos, sin = torch.randn(1, 7, 16), torch.randn(1, 7, 16)
    torch.library.opcheck(torch.ops.torchweave.qk_norm_rope, (q, k, torch.rand(16), torch.rand(16), cos, sin, 1e-6))
