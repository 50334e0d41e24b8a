"""Run by test_fp8 with TRITON_INTERPRET=1: quantizing and both products against the torch references, with odd sizes."""

from __future__ import annotations

import sys

import torch

from torchweave.ops.kernels.quant import fp8_fused, fp8_quant
from torchweave.ops.quant.fp8 import FP8, GROUP, empty_quantized, quantize
from torchweave.ops.quant.fp8_fused import add_rms_norm_fp8, gated_activation_fp8, rms_norm_fp8
from torchweave.ops.quant.fp8_linear import Fp8Config, block_scales, fp8_linear

CONFIGS = (
    Fp8Config("row", 16, 128, 4, 2),
    Fp8Config("row", 32, 256, 4, 1),
    Fp8Config("dot", 64, 128, 4, 2),
    Fp8Config("dot", 32, 256, 4, 2, block_t=16),
)


def kept_wide(x: torch.Tensor, width: int, group: int, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The interpreter does not round to e4m3 as GPUs do: kernels leave their last cast to torch."""
    q, s = empty_quantized(x, width, group, scale)
    return q.float(), s


def check(got: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...], what: object) -> None:
    assert torch.equal(got[1], right[1]), what
    assert torch.equal(got[0].to(FP8).float(), right[0].float()), what


def quant() -> None:
    for width in (16, 208, 1040):
        x = torch.randn(4, 3, width) * 10.0 ** torch.arange(-3, 3).repeat(width)[:width]
        x[1] = 0
        for group, scale in ((0, None), (GROUP, None), (0, torch.tensor([0.01]))):
            for form in (x, x[:, :2], x.transpose(0, 1)):
                check(fp8_quant.launch_quant(form, group, scale), quantize(form, group, scale), (width, group))


def fused() -> None:
    dialects = (("llama", {}), ("gemma", {"offset": 1.0, "wide": True}))
    for width in (208, 1040):
        x, residual = (torch.randn(3, width).half() for _ in range(2))
        weight, gate_up = torch.randn(width).half(), torch.randn(3, 2 * width).half()
        for group, scale in ((0, None), (GROUP, None), (0, torch.tensor([0.01]))):
            for _, options in dialects:
                dialect = (options.get("offset", 0.0), options.get("wide", False))
                got = fp8_fused.launch_norm_fp8(x, None, weight, 1e-5, *dialect, group, scale)
                check(got, rms_norm_fp8(x, weight, 1e-5, *dialect, group, scale), ("norm", width, group))
                got = fp8_fused.launch_norm_fp8(x, residual, weight, 1e-5, *dialect, group, scale)
                right = add_rms_norm_fp8(x, residual, weight, 1e-5, *dialect, group, scale)
                check(got, right, ("add norm", width, group))
                assert torch.equal(got[2], right[2])
            got = fp8_fused.launch_gated_fp8(gate_up, "silu", group, scale)
            check(got, gated_activation_fp8(gate_up, "silu", group, scale), ("gated", width, group))


def parts() -> None:
    for width in (208, 1040, 2048):
        gate_up = torch.randn(3, 2 * width).half()
        for form in (gate_up, gate_up[:, None].expand(3, 2, 2 * width).transpose(0, 1), gate_up * 0):
            got = fp8_fused.launch_gated_parts(form, "silu")
            check(got, gated_activation_fp8(form, "silu", 0, None), ("gated parts", width))


def products() -> None:
    for config in CONFIGS:
        for tokens in (1, 2) if config.kernel == "row" else (17,):
            outputs, width = 144, 336
            for blocks in (False, True):
                q, x_scale = quantize(torch.randn(tokens, width), GROUP if blocks else 0)
                w = torch.randn(outputs, width).to(torch.float8_e4m3fn)
                shape = (-(-outputs // GROUP), -(-width // GROUP)) if blocks else (outputs,)
                w_scale = torch.rand(shape) + 0.5
                if blocks:
                    w_scale = block_scales(w_scale)
                bias = torch.randn(outputs) if tokens != 2 else None
                for scale in (x_scale,) if blocks else (x_scale, torch.tensor([0.3])):
                    out = torch.full((tokens, outputs + 3), torch.nan)[:, :outputs]
                    config.run(q, scale, w, w_scale, bias, out)
                    expected = fp8_linear(q, scale, w, w_scale, bias, torch.float32)
                    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4 * float(expected.abs().max()))


CHECKS = {"quant": quant, "fused": fused, "parts": parts, "products": products}

if __name__ == "__main__":
    fp8_quant.empty_quantized = fp8_fused.empty_quantized = kept_wide
    for wanted in sys.argv[1:] or tuple(CHECKS):
        torch.manual_seed(0)  # where a sum ends next to a rounding edge, another order of it may round otherwise
        CHECKS[wanted]()
