"""FP8 ops: rounding and saturation, the layouts of scales, the product, and the kernels without a GPU."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tests.ops.interpreted import run_interpreted
from torchweave.ops.quant.fp8 import FP8, GROUP, MIN_AMAX, fp8_quant, scale_from_amax, to_fp8
from torchweave.ops.quant.fp8_linear import MAX_TOKENS, Fp8Config, block_scales, choose, fp8_linear

SCHEMES = [(0, None), (GROUP, None), (0, torch.tensor([0.02]))]
FINITE = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 != 127].view(FP8).float()
"""Every finite number of e4m3."""
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""opcheck's utilities but for `test_schema`, which compares tensors by operations that FP8 does not have."""


def dequantized(q: Tensor, s: Tensor) -> Tensor:
    """What q and s stand for, float64 `[T, K]`."""
    x = q.double().flatten(0, -2)
    return x * (s.t().repeat_interleave(GROUP, 1)[:, : x.shape[1]] if s.ndim == 2 and s.shape[1] != 1 else s)


def test_values_round_to_nearest_even() -> None:
    values = FINITE[FINITE >= 0].unique()
    one = torch.ones(1)
    assert torch.equal(to_fp8(values, one).float(), values)
    middles = (values[1:] + values[:-1]) / 2
    for moved, right in ((0.999, values[:-1]), (1.001, values[1:])):
        assert torch.equal(to_fp8(middles * moved, one).float()[8:], right[8:])
    even = torch.where(torch.arange(len(middles)) % 2 == 0, values[:-1], values[1:])  # the one whose last bit is 0
    assert torch.equal(to_fp8(middles, one).float(), even)


def test_large_values_saturate_and_nan_is_kept() -> None:
    x = torch.tensor([[449.0, 1e30, -1e30, float("inf"), float("nan"), 2.0**-11]])
    q, _ = fp8_quant(x, 0, torch.ones(1))
    assert q.float()[0, :4].tolist() == [448, 448, -448, 448] and bool(q.float()[0, 4].isnan()) and q.float()[0, 5] == 0


@pytest.mark.parametrize(("group", "scale"), SCHEMES)
@pytest.mark.parametrize("shape", [(3, 256), (1, 5, 208), (1, 16), (0, 64)])
def test_quantization_error_is_bounded(shape: tuple[int, ...], group: int, scale: Tensor | None) -> None:
    x = torch.randn(shape)
    q, s = fp8_quant(x, group, scale)
    tokens = x.numel() // shape[-1]
    assert q.dtype == FP8 and q.shape == x.shape and q.is_contiguous() and s.dtype == torch.float32
    assert list(s.shape) == ([1] if scale is not None else [-(-shape[-1] // GROUP), tokens] if group else [tokens, 1])
    if tokens:
        error = (dequantized(q, s) - x.double().flatten(0, -2)).abs()
        # Half a unit of three bits of mantissa; below the least normal number, of the least subnormal one.
        assert bool((error <= x.flatten(0, -2).abs() / 16 + float(s.max()) * 2**-10).all())


def test_a_token_of_zeros_has_a_scale_and_others_do_not_change_it() -> None:
    x = torch.randn(3, 256)
    x[1] = 0
    for group in (0, GROUP):
        q, s = fp8_quant(x, group)
        assert bool((q[1].float() == 0).all()) and bool((s > 0).all())
        alone_q, alone_s = fp8_quant(x[2:], group)
        assert torch.equal(alone_q.float(), q[2:].float())
        assert torch.equal(alone_s, s[:, 2:] if group else s[2:])
    assert scale_from_amax(torch.zeros(())) == torch.tensor(MIN_AMAX) / 448


def test_an_unknown_quantization_scheme_is_refused() -> None:
    for group, scale in ((64, None), (GROUP, torch.ones(1)), (0, torch.ones(3))):
        with pytest.raises(ValueError, match="expected 0"):
            fp8_quant(torch.zeros(2, 256), group, scale)


def operands(tokens: int, outputs: int, width: int, blocks: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens + outputs)
    q, x_scale = fp8_quant(torch.randn(tokens, width), GROUP if blocks else 0)
    shape = (-(-outputs // GROUP), -(-width // GROUP)) if blocks else (outputs,)
    w_scale = torch.rand(shape) + 0.5
    return q, x_scale, torch.randn(outputs, width).to(FP8), block_scales(w_scale) if blocks else w_scale


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shape", [(3, 48, 208), (1, 256, 640), (0, 16, 128)])
def test_linear_equals_that_of_dequantized_operands(shape: tuple[int, int, int], blocks: bool) -> None:
    q, x_scale, w, w_scale = operands(*shape, blocks)
    weight = w.double() * (
        w_scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[: shape[1], : shape[2]]
        if blocks
        else w_scale[:, None]
    )
    bias = torch.randn(shape[1])
    x = q.double() * (x_scale.t().repeat_interleave(GROUP, 1)[:, : shape[2]] if blocks else x_scale)
    got = fp8_linear(q[None], x_scale, w, w_scale, bias, torch.float32)
    assert got.shape == (1, *shape[:2])
    torch.testing.assert_close(got[0].double(), x @ weight.t() + bias, rtol=1e-5, atol=1e-3)


def test_opcheck() -> None:
    x = torch.randn(1, 5, 208)
    for group, scale in SCHEMES:
        torch.library.opcheck(fp8_quant, (x, group, scale), test_utils=WITHOUT_SCHEMA)
    for blocks in (False, True):
        q, x_scale, w, w_scale = operands(5, 48, 208, blocks)
        torch.library.opcheck(
            fp8_linear, (q[None], x_scale, w, w_scale, torch.randn(48), torch.bfloat16), test_utils=WITHOUT_SCHEMA
        )


def test_kernel_choice() -> None:
    for blocks in (False, True):
        assert choose(1, 6144, 4096, blocks=blocks).kernel == choose(2, 6144, 4096, blocks=blocks).kernel == "row"  # type: ignore[union-attr]
        assert choose(3, 6144, 4096, blocks=blocks).kernel == "dot"  # type: ignore[union-attr]
        assert choose(MAX_TOKENS + 1, 6144, 4096, blocks=blocks) is None
    assert not choose(1, 6144, 4096, blocks=False, hopper=False).dependent, "dependent launch is Hopper's"  # type: ignore[union-attr]
    assert choose(64, 6144, 4096, blocks=True, hopper=False) is not None, "only Hopper's cuBLAS multiplies by blocks"
    assert choose(64, 6144, 4112, blocks=True) is not None, "cuBLAS wants whole groups"


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("tests.ops.quant.interpreted_fp8")


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("config", "tokens", "reads"),
    [
        (Fp8Config("row", 4, 2048, 4, 2, dependent=True), 1, r"ld\.global\S*v4"),
        (Fp8Config("dot", 64, 128, 4, 6), 8, "wgmma.mma_async.*e4m3"),
        (Fp8Config("dot", 16, 256, 4, 5), 8, "cp.async.cg"),
        (Fp8Config("dot", 128, 128, 8, 4, block_t=128), 4096, "wgmma.mma_async.*e4m3"),
    ],
)
def test_products_build_for_hopper(config: Fp8Config, tokens: int, reads: str, blocks: bool) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.quant import fp8_linear as kernels

    outputs, width = 4096, 4096
    scales = (
        (torch.empty(32, tokens), torch.empty(32, 32)) if blocks else (torch.empty(tokens, 1), torch.empty(outputs))
    )
    q, w = torch.empty(tokens, width, dtype=FP8), torch.empty(outputs, width, dtype=FP8)
    with recorded(kernels, "row_kernel", "dot_kernel") as launches:
        config.run(q, scales[0], w, scales[1], None, torch.empty(tokens, outputs, dtype=torch.bfloat16))
    ptx = compile_for_hopper(launches[0]).asm["ptx"]
    assert re.search(reads, ptx), "the weight must be read 16 bytes at a time, and multiplied as it is where it can"
    assert ("griddepcontrol.wait" in ptx) == config.dependent


@pytest.mark.parametrize(("group", "scale"), SCHEMES)
def test_quant_builds_for_hopper(group: int, scale: Tensor | None) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.quant import fp8_quant as kernels

    with recorded(kernels, "quant_kernel") as launches:
        kernels.launch_quant(torch.empty(2, 4096, dtype=torch.bfloat16), group, scale)
    ptx = compile_for_hopper(launches[0]).asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "div.rn.f32" in ptx


def test_activations_in_parts_build_for_hopper() -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.quant import fp8_fused

    gate_up = torch.empty(1, 1, 2 * 14336, dtype=torch.bfloat16)
    with recorded(fp8_fused, "gated_part_kernel", "quant_part_kernel") as launches:
        fp8_fused.launch_gated_fp8(gate_up, "silu", 0, None)
    assert [launch.grid for launch in launches] == [(1, 14), (1, 14)]
    first, second = (compile_for_hopper(launch).asm["ptx"] for launch in launches)
    assert "ld.global.v4" in first and "cvt.rn.satfinite.e4m3x2.f32" in second and "div.rn.f32" in second
    assert fp8_fused.prefers_two_kernels(gate_up, 0, None) and not fp8_fused.prefers_two_kernels(gate_up, GROUP, None)
    assert not fp8_fused.prefers_two_kernels(gate_up.expand(65, 1, -1), 0, None), (
        "with many tokens there are programs enough"
    )
