"""Run by test_fp8 with TRITON_INTERPRET=1: quantising and both products against the torch references, with odd sizes."""

from __future__ import annotations

import sys

import torch

from torchweave.ops.fp8 import FP8, GROUP, like_quantized, quantize, to_fp8
from torchweave.ops.fp8_linear import Fp8Config, block_scales, reference
from torchweave.ops.kernels.fp8_quant import launch_quant

CONFIGS = (
    Fp8Config("row", 4, 128, 4, 2),
    Fp8Config("row", 8, 256, 4, 1),
    Fp8Config("dot", 16, 128, 4, 2),
    Fp8Config("dot", 32, 256, 4, 2, block_t=16),
)


def quant() -> None:
    for width in (16, 128, 208, 1040):
        x = torch.randn(3, width) * 10.0 ** torch.arange(-3, 3).repeat(width)[:width]
        x[1] = 0
        for group in (0, GROUP):
            # The interpreter does not round to e4m3 as GPUs do: the kernel's last cast is left to torch.
            q, scale = torch.empty_like(x), like_quantized(x, group)[1]
            launch_quant(x, q, scale, group)
            right_q, right_scale = quantize(x, group)
            assert torch.equal(scale, right_scale), (width, group)
            assert torch.equal(q.to(FP8).float(), right_q.float()), (width, group)
        given = torch.tensor([0.01])
        launch_quant(x, q, given, None)
        assert torch.equal(q.to(FP8).float(), to_fp8(x, given).float()), width


def products() -> None:
    for config in CONFIGS:
        for tokens in (1, 2) if config.kernel == "row" else (1, 3, 17):
            for outputs, width in ((32, 128), (144, 336)):
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
                        expected = reference(q, scale, w, w_scale, bias, torch.float32)
                        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4 * float(expected.abs().max()))


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ("quant", "products"):
        {"quant": quant, "products": products}[wanted]()
