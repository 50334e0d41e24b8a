"""Fused collectives in one process: opcheck, symbolic T, and unread outputs. Their numerics: tests/distributed."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.collectives.collective_cases import mirrored
from torchweave.ops.collectives.all_reduce_norm import (
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_fp4,
    all_reduce_add_rms_norm_fp8,
)
from torchweave.ops.norm import add_rms_norm

WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""opcheck's utilities but for `test_schema`, which compares tensors by operations that FP8 does not have."""


def test_opcheck() -> None:
    x, weight, one = torch.randn(1, 5, 128), torch.randn(128), torch.tensor([0.02])
    with mirrored() as group:
        for residual in (x * 2, None):
            norm = (x, residual, weight, 1e-5, 0.0, False)
            torch.library.opcheck(all_reduce_add_rms_norm, (*norm, True, group))
            for keep in (True, False):
                for quant in ((0, None), (128, None), (0, one)):
                    torch.library.opcheck(
                        all_reduce_add_rms_norm_fp8, (*norm, *quant, keep, keep, group), test_utils=WITHOUT_SCHEMA
                    )
                torch.library.opcheck(
                    all_reduce_add_rms_norm_fp4, (*norm, one, keep, keep, group), test_utils=WITHOUT_SCHEMA
                )


def test_one_graph_for_all_token_counts() -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor, group: str) -> tuple[Tensor, Tensor]:
        return torch.ops.torchweave.all_reduce_add_rms_norm(x, residual, weight, 1e-5, 0.0, False, True, group)

    with mirrored() as group:
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for tokens in (6, 5, 9):
                x, residual, weight = torch.randn(1, tokens, 16), torch.randn(1, tokens, 16), torch.randn(16)
                y, total = add_rms_norm(x * 2, residual, weight, 1e-5)
                got = compiled(x, residual, weight, group)
                assert got[0].equal(y) and got[1].equal(total)
