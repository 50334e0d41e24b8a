"""Run by test_int_linear with TRITON_INTERPRET=1: every kernel against float64, with odd sizes and every kind of group."""

from __future__ import annotations

import sys

import torch

from tests.ops.int_cases import IntCase, Operands, fp4_operands, operands, weight_values
from torchweave.ops.kernels.quant.dequantize import launch_dequantize
from torchweave.ops.quant.int_linear import IntConfig

GROUPS = (128, 64, 32, 256, 0)


def check(config: IntConfig, made: Operands) -> None:
    tokens, outputs = len(made.x), len(made.q)
    out = torch.full((tokens, outputs + 3), torch.nan)[:, :outputs]
    config.run(made.x, *made.weight[:3], made.bias, made.group, out)
    torch.testing.assert_close(out.double(), made.expected(), rtol=1e-5, atol=1e-4)


def row() -> None:
    for group in GROUPS:
        for zero in (False, True):
            for width, words in ((336, 16), (520, 64)):
                made = operands(IntCase(4, group, zero, bias=zero), 2, 13, width)
                check(IntConfig("row", 8, 4, words, hopper=False), made)


def split() -> None:
    for group in GROUPS:
        for zero in (False, True):
            for tokens, width in ((3, 336), (17, 520)):
                made = operands(IntCase(4, group, zero, bias=zero), tokens, 21, width)
                check(IntConfig("split", 16, 2, 2, block_t=8, programs=tokens % 3 + 1, hopper=False), made)


def tile() -> None:
    for group in GROUPS:
        for zero in (False, True):
            for tokens, width, programs in ((3, 336, 1), (17, 384, 2), (5, 520, 4)):
                made = operands(IntCase(4, group, zero, bias=zero), tokens, 21, width)
                check(IntConfig("tile", 16, 4, 2, block_t=16, programs=programs, hopper=False), made)


def byte() -> None:
    for group in GROUPS:
        for zero in (False, True):
            for tokens, width in ((1, 336), (17, 520)):
                made = operands(IntCase(8, group, zero, bias=zero), tokens, 21, width)
                check(IntConfig("split", 16, 2, 2, block_t=8, programs=1 + tokens // 17, hopper=False), made)


def dequantize() -> None:
    for bits in (4, 8):
        for group in GROUPS:
            made = operands(IntCase(bits, group, zero=group != 64), 1, 21, 520)
            out = torch.full((21, 520), torch.nan)
            launch_dequantize(*made.weight[:3], made.group, out)
            torch.testing.assert_close(out.double(), weight_values(made), rtol=1e-6, atol=1e-9)


def fp4() -> None:
    for kind in ("mxfp4", "nvfp4"):
        for kernel, tokens, width, programs in (
            ("split", 3, 352, 1),
            ("split", 9, 544, 2),
            ("tile", 9, 352, 2),
            ("split", 2, 32, 1),
            ("row", 2, 544, 1),
        ):
            made = fp4_operands(kind, tokens, 21, width, bias=kind == "nvfp4")
            out = torch.full((tokens, 24), torch.nan)[:, :21]
            depth = 32 if kernel == "row" else 2
            config = IntConfig(kernel, 16, 2, depth, block_t=8, programs=programs, hopper=False)  # type: ignore[arg-type]
            config.run(made.x, made.w, made.scale, None, made.bias, made.group, out, made.row_scale)
            torch.testing.assert_close(out.double(), made.expected(), rtol=1e-5, atol=1e-4)
        out = torch.full((21, 544), torch.nan)
        made = fp4_operands(kind, 1, 21, 544)
        launch_dequantize(made.w, made.scale, None, made.group, out, made.row_scale)
        torch.testing.assert_close(out.double(), made.values, rtol=1e-6, atol=1e-9)


CHECKS = {"row": row, "split": split, "tile": tile, "byte": byte, "dequantize": dequantize, "fp4": fp4}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or tuple(CHECKS):
        torch.manual_seed(0)
        CHECKS[wanted]()
