"""Rotary embedding of q and k, with and without their norm, against transformers, and the kernel without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.fusion_cases import DIALECTS, angles, draw, heads_of, norm64, rope64
from tests.ops.interpreted import run_interpreted
from torchweave.ops.norm import rms_norm
from torchweave.ops.rope import qk_norm_rope, rope

EPS = 1e-6


def as_models_write_it(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[1, H, T, D]`, cos `[1, T, R]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turning[..., : turning.shape[-1] // 2], turning[..., turning.shape[-1] // 2 :]
    return torch.cat((turning * cos + torch.cat((-high, low), -1) * sin, rest), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 8])
def test_references_equal_the_models_code(width: int, dtype: torch.dtype) -> None:
    q, k = (x[None] for x in heads_of(draw(7, 96, dtype=dtype), 4, 2))
    cos, sin = (x[None] for x in angles(7, width, dtype))
    for got, x in zip(rope(q, k, cos, sin), (q, k), strict=True):
        assert got.is_contiguous() and got.transpose(1, 2).equal(as_models_write_it(x.transpose(1, 2), cos, sin))
    weights = draw(16, dtype=dtype), draw(16, dtype=dtype) + 1
    for _, options in DIALECTS:
        got = qk_norm_rope(q, k, *weights, cos, sin, EPS, **options)
        normed = (rms_norm(x, weight, EPS, **options) for x, weight in zip((q, k), weights, strict=True))
        assert all(map(torch.equal, got, rope(*normed, cos, sin)))


def test_within_its_bound_of_float64() -> None:
    q, k = heads_of(draw(7, 96), 4, 2)
    cos, sin = angles(7, 16)
    weight = draw(16)
    for got, x in zip(qk_norm_rope(q, k, weight, weight, cos, sin, EPS), (q, k), strict=True):
        torch.testing.assert_close(got.double(), rope64(norm64(x, weight, EPS), cos, sin), rtol=2**-20, atol=1e-6)


def test_opcheck() -> None:
    q, k = heads_of(draw(3, 96), 4, 2)
    cos, sin = angles(3, 16)
    torch.library.opcheck(rope, (q, k, cos, sin))
    torch.library.opcheck(qk_norm_rope, (q, k, draw(16), draw(16) + 1, cos, sin, EPS, 1.0, True))


def test_the_kernel_in_the_interpreter() -> None:
    run_interpreted("tests.ops.interpreted_rope")


@pytest.mark.parametrize(("dim", "width"), [(64, 64), (128, 128), (96, 96), (80, 32)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_the_kernel_builds_for_hopper(dim: int, width: int, with_norm: bool) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels import rope as kernels

    bf16 = torch.bfloat16
    q, k, _ = heads_of(torch.empty(8, 12 * dim, dtype=bf16), 8, 2, 2)
    cos, sin = torch.empty(2, 8, width, dtype=bf16).unbind()
    weight = torch.empty(dim, dtype=bf16)
    with recorded(kernels, "rope_kernel") as launches:
        kernels.launch_rope(q, k, cos, sin, kernels.QKNorm(weight, weight, EPS, 0.0, False) if with_norm else None)
    assert compile_for_hopper(launches[0]).asm["ptx"]
