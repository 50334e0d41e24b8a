"""Run by test_fp4 with TRITON_INTERPRET=1: the kernel against the reference, with odd sizes, strides and a token of zeros."""

from __future__ import annotations

from itertools import pairwise

import torch

from torchweave.ops.kernels.quant import nvfp4_quant
from torchweave.ops.quant.fp8 import FP8
from torchweave.ops.quant.nvfp4 import VALUES, empty_fp4, fp4_scale_from_amax, quantize_fp4


def kept_wide(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The interpreter does not store e4m3 as GPUs do. The kernel has rounded the scales itself: here they stay float32."""
    q, s = empty_fp4(x)
    return q, s.float()


def main() -> None:
    torch.manual_seed(0)
    ties = torch.tensor([6.0, *((a + b) / 2 for a, b in pairwise(VALUES)), *VALUES])
    for width in (16, 208, 1040):
        x = torch.randn(4, 3, width) * 10.0 ** torch.arange(-4, 4).repeat(width)[:width]
        x[1] = 0
        x[2, 0, :16] = -ties
        for scale in (fp4_scale_from_amax(x.abs().max()), torch.tensor([1.0]), torch.tensor([1e-4])):
            for form in (x, x[:, :2], x.transpose(0, 1)):
                q, s = nvfp4_quant.launch_fp4_quant(form, scale)
                right_q, right_s = quantize_fp4(form, scale)
                assert torch.equal(s.to(FP8).float(), s) and torch.equal(s, right_s.float()), width
                assert torch.equal(q, right_q), width


if __name__ == "__main__":
    nvfp4_quant.empty_fp4 = kept_wide
    main()
