"""The kernel that copies blocks between the device and pinned host memory, without a GPU: interpreted, and built for sm_90."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreted import run_interpreted

pytest.importorskip("triton")

from tests.ops.cross_compile import compile_for_hopper, recorded
from torchweave.ops.kernels.attention import copy_blocks as kernels


def test_interpreted_kernel_equals_the_reference() -> None:
    run_interpreted("tests.ops.attention.interpreted_copy_blocks")


@pytest.mark.parametrize("to_host", [True, False])
def test_kernel_builds_for_hopper(to_host: bool) -> None:
    with recorded(kernels, "copy_blocks_kernel") as launches:
        kernels.launch_copy_blocks(torch.zeros(4, 2, dtype=torch.int64), torch.zeros(32, 3, dtype=torch.int64), to_host)
    (launch,) = launches
    assert launch.grid == (kernels.NUM_PROGRAMS,)
    assert compile_for_hopper(launch).metadata.shared == 0
