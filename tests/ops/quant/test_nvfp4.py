"""NVFP4: every code, ties, dequantized values, and the kernel without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreted import run_interpreted
from torchweave.ops.quant.fp8 import FP8
from torchweave.ops.quant.nvfp4 import BLOCK, VALUES, dequantize_fp4, fp4_quant, fp4_scale_from_amax

WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""opcheck's utilities but for `test_schema`, which compares tensors by operations that FP8 does not have."""


def test_codes_round_to_nearest_and_ties_to_even() -> None:
    x = torch.tensor([[6.0, -6.0, 0.25, 0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 0.26, 0.74, 1.26, 2.51, 3.4, 4.9, -5.1]])
    q, s = fp4_quant(x, torch.ones(1))
    assert s.float().tolist() == [[1.0]]
    expected = [6.0, -6.0, 0.0, 1.0, 1.0, 2.0, 2.0, -4.0, 4.0, 0.5, 0.5, 1.5, 3.0, 3.0, 4.0, -6.0]
    assert dequantize_fp4(q, s, torch.float32).tolist() == [expected]
    assert q[0, 0].item() == 7 | (15 << 4), "the even channel lies in the low half"


def test_representable_values_round_trip() -> None:
    values = torch.tensor(VALUES + tuple(-value for value in VALUES))
    blocks = torch.stack([values * share for share in (1.0, 0.5, 448.0, 2.0**-9)]).reshape(2, 2 * BLOCK)
    q, s = fp4_quant(blocks * 0.375, torch.tensor([0.375]))
    assert q.shape == (2, BLOCK) and s.shape == (2, 2) and s.dtype == FP8
    for dtype in (torch.float32, torch.bfloat16):
        assert dequantize_fp4(q, s, dtype).float().equal(blocks), "products of a code and a scale are exact in 16 bits"


def test_quantization_error_is_bounded() -> None:
    x = torch.randn(1, 5, 208)
    x[0, 2] = 0
    scale = fp4_scale_from_amax(x.abs().max())
    q, s = fp4_quant(x, scale)
    stands_for = dequantize_fp4(q, s, torch.float64) * scale.double()
    blocks = x.double().unflatten(-1, (-1, BLOCK))
    # Half a step between codes, at most 1/6 of the block's largest number, and what rounding its scale takes away.
    error = (stands_for.unflatten(-1, (-1, BLOCK)) - blocks).abs()
    assert bool((error <= blocks.abs().amax(-1, keepdim=True) * (1 / 6 + 1 / 16) + float(scale) * 2**-7).all())
    assert not stands_for[0, 2].any() and torch.equal(fp4_quant(x[:, 3:], scale)[0], q[:, 3:])


def test_width_that_is_no_multiple_of_the_block() -> None:
    with pytest.raises(ValueError, match="expected a multiple"):
        fp4_quant(torch.zeros(2, 24), torch.ones(1))


def test_opcheck() -> None:
    torch.library.opcheck(fp4_quant, (torch.randn(1, 5, 208), torch.tensor([0.01])), test_utils=WITHOUT_SCHEMA)


def test_the_kernel_in_the_interpreter() -> None:
    run_interpreted("tests.ops.quant.interpreted_nvfp4")


def test_the_kernel_builds_for_hopper() -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.quant import nvfp4_quant as kernels

    with recorded(kernels, "fp4_quant_kernel") as launches:
        kernels.launch_fp4_quant(torch.empty(2, 4096, dtype=torch.bfloat16), torch.empty(1))
    ptx = compile_for_hopper(launches[0]).asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "div.rn.f32" in ptx
