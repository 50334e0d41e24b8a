"""raise_rms_norm: every dialect in every dtype, and near-misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.compiler.passes.written import BF16, NORMS, gemma_norm, heads, llama_norm
from torchweave.compiler.passes.aten.raise_rms_norm import FUSION
from torchweave.compiler.passes.testing import T, check


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("norm", NORMS)
def test_raise_rms_norm_fires_once_in_every_dialect(norm: Callable[..., Tensor], dtype: torch.dtype) -> None:
    result = check(FUSION, norm, [torch.randn(1, T, 48).to(dtype), torch.randn(48).to(dtype)], matches=1)
    assert not result.near_misses and result.rewritten >= 6


@pytest.mark.parametrize("norm", [llama_norm, gemma_norm])
def test_raise_rms_norm_of_heads_that_were_transposed_first(norm: Callable[..., Tensor]) -> None:
    check(FUSION, lambda x, w: norm(heads(x), w), [torch.randn(1, T, 48).to(BF16), torch.randn(16).to(BF16)], matches=1)


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.to(torch.float32)
    mean = y.mean(-1, keepdim=True)
    variance = (y - mean).pow(2).mean(-1, keepdim=True)
    return (weight.to(torch.float32) * ((y - mean) * torch.rsqrt(variance + 1e-5))).to(x.dtype)


def over_tokens(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6))


def cubed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6))


def in_half(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize(
    ("norm", "dtype", "why"),
    [
        (layer_norm, BF16, "argument self of pow_1 is sub, not sub_1"),
        (over_tokens, torch.float32, "of mean is 0, not -1"),
        (cubed, torch.float32, "argument exponent of pow_1 is 3, not 2"),
        (in_half, BF16, "its mean is taken in torch.bfloat16"),
        (lambda x, w: llama_norm(x, w[:, None] * w), torch.float32, "its weight is [48, 48]"),
        (lambda x, w: llama_norm(x, w.to(BF16)), torch.float32, "its weight is torch.bfloat16 and x torch.float32"),
    ],
)
def test_raise_rms_norm_names_near_misses(norm: Callable[..., Tensor], dtype: torch.dtype, why: str) -> None:
    check(FUSION, norm, [torch.randn(48, 48).abs().to(dtype), torch.randn(48).to(dtype)], near_miss=why)


def test_raise_rms_norm_keeps_a_norm_with_read_intermediates() -> None:
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * (x * scale), scale * 2

    check(FUSION, function, [torch.randn(T, 48), torch.randn(48)], near_miss="is also read by")
