"""RMSNorm ops round exactly as models do, in every dialect, and their kernel without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.fusion_cases import DIALECTS, draw, heads_of, norm64
from tests.ops.interpreted import run_interpreted
from torchweave.ops.norm import add_rms_norm, gated_rms_norm, rms_norm, rms_norm_of_sum

EPS = 1e-5


def as_models_write_it(x: Tensor, weight: Tensor, dialect: str) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    if dialect == "llama":
        return weight * y.to(x.dtype)
    return (weight * y).to(x.dtype) if dialect == "olmo" else (y * (1.0 + weight.float())).type_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dialect", "options"), DIALECTS)
def test_the_references_round_as_models_do(dialect: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    x, residual, weight = draw(2, 7, 48, dtype=dtype), draw(2, 7, 48, dtype=dtype) * 3, draw(48, dtype=dtype)
    assert rms_norm(x, weight, EPS, **options).equal(as_models_write_it(x, weight, dialect))
    total = x + residual
    y, h = add_rms_norm(x, residual, weight, EPS, **options)
    assert h.equal(total) and y.equal(as_models_write_it(total, weight, dialect))
    assert rms_norm_of_sum(x, residual, weight, EPS, **options).equal(y)


def test_dialects_differ_only_in_rounding() -> None:
    x, weight = draw(64, 48, dtype=torch.bfloat16), draw(48, dtype=torch.bfloat16)
    early, late = rms_norm(x, weight, EPS), rms_norm(x, weight, EPS, wide=True)
    assert not early.equal(late), "rounding twice must show somewhere"
    exact = norm64(x, weight, EPS)
    unit = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(late.double(), exact, rtol=unit / 2 * 1.001, atol=1e-7)
    torch.testing.assert_close(early.double(), exact, rtol=unit * 1.01, atol=1e-7)


def test_without_a_weight_and_on_strided_heads() -> None:
    q, k = heads_of(draw(5, 96), 4, 2)
    for x in (q, k):
        got = rms_norm(x, None, EPS)
        assert got.is_contiguous() and got.shape == x.shape
        torch.testing.assert_close(got.double(), norm64(x, None, EPS), rtol=2**-21, atol=1e-7)


def test_opcheck() -> None:
    x, weight = draw(1, 3, 16), draw(16)
    torch.library.opcheck(rms_norm, (x, weight, EPS))
    torch.library.opcheck(rms_norm, (x, None, EPS, 1.0, True))
    torch.library.opcheck(add_rms_norm, (x, x * 2, weight, EPS))
    torch.library.opcheck(rms_norm_of_sum, (x, x * 2, weight, EPS))
    torch.library.opcheck(gated_rms_norm, (x, draw(3, 32)[:, :16], weight, EPS, 0.0, False, "silu"))


def test_the_kernel_in_the_interpreter() -> None:
    run_interpreted("tests.ops.interpreted_norm")


@pytest.mark.parametrize("width", [128, 2048, 5120])
@pytest.mark.parametrize("wide", [False, True])
def test_the_kernel_builds_for_hopper(width: int, wide: bool) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels import norm as kernels

    x, weight = torch.empty(8, width, dtype=torch.bfloat16), torch.empty(width, dtype=torch.bfloat16)
    with recorded(kernels, "norm_kernel") as launches:
        kernels.launch_norm(x, x, weight, EPS, 1.0, wide)
        kernels.launch_norm(x, None, weight, EPS, 1.0, wide, gate=x, activation="silu")
    for launch in launches:
        ptx = compile_for_hopper(launch).asm["ptx"]
        assert ".v4.b32" in ptx or width == 128, "rows must be read 16 bytes at a time"
