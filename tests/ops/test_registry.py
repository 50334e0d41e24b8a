"""Registration of ops, and sizes of launches."""

import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from torch._library.custom_ops import OPDEFS

from torchweave.ops import activation, linear, norm  # noqa: F401 (registers ops)
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2
from torchweave.ops.registry import cuda_kernel


def test_gpu_kernels_are_called_by_the_dispatcher_without_wrappers():
    for name in ("linear", "fused_linear", "rms_norm", "add_rms_norm", "gated_activation"):
        qualified = f"torchweave::{name}"
        assert cuda_kernel(qualified) is not None
        assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CUDA")
        assert "cuda" not in OPDEFS[qualified]._backend_fns


@given(st.integers(1, 2**40), st.integers(1, 2**20))
def test_sizes_equal_those_of_triton(size: int, part: int):
    assert cdiv(size, part) == triton.cdiv(size, part)
    assert next_power_of_2(size) == triton.next_power_of_2(size)
