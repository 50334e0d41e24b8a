"""The products of low-rank adapters: the op's kernels, and the op in a compiled graph."""

from __future__ import annotations

import torch
from torch.library import opcheck

from tests.ops.interpreted import run_interpreted
from torchweave.ops.low_rank import low_rank


def test_kernels_and_reference_equal_float64() -> None:
    run_interpreted("tests.ops.interpreted_low_rank")


def test_op_is_declared_as_it_behaves() -> None:
    index = torch.tensor([1, 0, 2], dtype=torch.int32)
    arguments = torch.randn(1, 2, 6), torch.randn(1, 2, 5), index, torch.randn(2, 3, 5), torch.randn(2, 6, 3)
    opcheck(low_rank, arguments, test_utils=("test_schema", "test_faketensor"))
