"""The Triton kernel of `varlen_attention` without a GPU: interpreted against float64, and built for sm_90."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreted import run_interpreted

pytest.importorskip("triton")

from tests.ops.cross_compile import Launch, compile_for_hopper, recorded
from torchweave.ops.attention.varlen import (
    TRITON_HEAD_DIMS,
    VarlenConfig,
    default_varlen_config,
    launch_varlen_attention,
    takes_triton_kernel,
)
from torchweave.ops.kernels.attention import varlen as kernels

HOPPER_SMEM = 232448


def launch(head_dim: int, lengths: list[int], config: VarlenConfig | None = None) -> Launch:
    """What a call launches."""
    query, key, value = torch.empty(sum(lengths), 3, 2, head_dim, dtype=torch.bfloat16).unbind(1)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    with recorded(kernels, "varlen_attention_kernel") as found:
        launch_varlen_attention(query, key, value, bounds, 0.1, config)
    return found[0]


def test_interpreted_kernel_equals_float64() -> None:
    run_interpreted("tests.ops.attention.interpreted_varlen")


@pytest.mark.parametrize("head_dim", [*TRITON_HEAD_DIMS, 104])
@pytest.mark.parametrize("length", [64, 512, 4096])
def test_kernel_builds_for_hopper(head_dim: int, length: int) -> None:
    kernel = compile_for_hopper(launch(head_dim, [length]))
    assert kernel.metadata.shared <= HOPPER_SMEM
    assert "wgmma" in kernel.asm["ptx"] and "cp.async.cg.shared.global" in kernel.asm["ptx"]


def test_products_take_the_columns_of_two_parts() -> None:
    columns = {size: launch(size, [64]).kwargs for size in (24, 40, 72, 80, 88, 96, 104, 160)}
    assert {size: (found["PART"], found["TAIL"]) for size, found in columns.items()} == {
        24: (16, 16), 40: (32, 16), 72: (64, 16), 80: (64, 16), 88: (64, 32), 96: (64, 32), 104: (64, 64), 160: (128, 32),
    }  # fmt: skip


def test_tiles_follow_the_length_of_sequences() -> None:
    assert default_varlen_config(64 * 64, 64, 16) == VarlenConfig(64, 64, 4, 3)
    assert default_varlen_config(1024, 1, 16) == VarlenConfig(128, 64, 8, 3)
    assert default_varlen_config(4096, 1, 16) == default_varlen_config(4096, 4, 16) == VarlenConfig(128, 64, 4, 3)


def test_calls_that_run_the_kernel() -> None:
    half, single = torch.empty(4, 2, 72, dtype=torch.bfloat16), torch.empty(4, 2, 72)
    assert takes_triton_kernel(half, 1, 0.1) and not takes_triton_kernel(single, 1, 0.1)
    assert not takes_triton_kernel(half, 1, -0.1), "the largest product would be the smallest score"
    assert not takes_triton_kernel(half[..., :64], 4, 0.1), "a power of two has no padding to save"


@pytest.mark.parametrize("head_dim", [64, 128, 20, 16])
def test_other_head_sizes_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"heads of {head_dim} do not suit the kernel"):
        launch(head_dim, [16])
