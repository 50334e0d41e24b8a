"""`torchweave::varlen_attention`: attention inside each of several sequences that follow each other, without a cache or a mask.

Vision towers of images in patches call it: each image, frame or window is a sequence.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.kernels.sizes import cdiv, next_power_of_2
from torchweave.ops.registry import define

ALIGNMENT = 8
"""Flash attention takes heads whose size is a multiple of this; the Triton kernel takes such strides."""
TRITON_HEAD_DIMS = {72: 1, 80: 2}
"""Head sizes for which the Triton kernel is chosen, and from how many sequences (`bench/kernels/attention.py --only varlen`)."""


@dataclass(frozen=True)
class VarlenConfig:
    """Launch configuration of the Triton kernel: `block_m` queries and `block_n` keys a tile; `maxnreg` registers a thread."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None


def default_varlen_config(tokens: int, sequences: int, heads: int) -> VarlenConfig:
    """Small tiles for short sequences, as windows of 64 patches; eight warps where programs do not fill the multiprocessors twice:
    1,024 patches with 16 heads of 72 take 20.8 us instead of 31.5 (H100), 4,096 would take 272 instead of 227."""
    if tokens <= 128 * sequences:
        return VarlenConfig(block_m=64)
    return VarlenConfig(num_warps=8) if tokens * heads <= 128 * 128 else VarlenConfig()


@functools.cache
def has_triton_kernel(device: torch.device) -> bool:
    """Whether the Triton kernel was measured on such a device: Hopper GPUs."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def takes_triton_kernel(query: Tensor, sequences: int, scale: float) -> bool:
    """Whether `varlen_attention` runs the Triton kernel for these queries, on a device that has it; no value is read."""
    head_dim, half = query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
    return half and scale > 0.0 and head_dim in TRITON_HEAD_DIMS and sequences >= TRITON_HEAD_DIMS[head_dim]


def _like_query(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`[S, H, D]` of one sequence, contiguous."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, scale=scale)[0].transpose(0, 1).contiguous()


def _varlen_cuda(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    if has_triton_kernel(query.device) and takes_triton_kernel(query, len(cu_seqlens) - 1, scale):
        return launch_varlen_attention(query, key, value, cu_seqlens, scale)
    if len(cu_seqlens) == 2:
        return _attend(query, key, value, scale)
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] % ALIGNMENT:
        return varlen_reference(query, key, value, cu_seqlens, scale)
    bounds = cu_seqlens.to(torch.int32)
    longest = int((bounds[1:] - bounds[:-1]).max())
    out = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, bounds, longest, longest, 0.0, False, False, scale=scale
    )
    return out[0].contiguous()


def launch_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float, config: VarlenConfig | None = None
) -> Tensor:
    """The Triton kernel; arguments as of `varlen_attention`, in float16 or bfloat16, heads of 24 to 248 channels in steps of 8.

    A head size that is a power of two has no tail and is refused.
    """
    from torchweave.ops.kernels.attention.varlen import varlen_attention_kernel

    tokens, heads, head_dim = query.shape
    part = next_power_of_2(head_dim) // 2
    if head_dim % ALIGNMENT or head_dim < 24 or 2 * part == head_dim:
        raise ValueError(
            f"heads of {head_dim} do not suit the kernel; use a multiple of 8 from 24 that is no power of two"
        )
    sequences = len(cu_seqlens) - 1
    config = config or default_varlen_config(tokens, sequences, heads)
    query, key, value = (_aligned(tensor) for tensor in (query, key, value))
    out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    varlen_attention_kernel[(cdiv(tokens, config.block_m) + sequences, heads)](
        query, key, value, out, cu_seqlens, sequences, scale * math.log2(math.e),
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        HEAD_DIM=head_dim, PART=part, TAIL=max(next_power_of_2(head_dim - part), 16),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps, num_stages=config.num_stages,
        maxnreg=config.maxnreg,
    )  # fmt: skip
    return out


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor with strides that the kernel takes."""
    steps = tensor.stride()
    return tensor if steps[2] == 1 and not (steps[0] % ALIGNMENT or steps[1] % ALIGNMENT) else tensor.contiguous()


def varlen_reference(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Attention of one sequence after the other."""
    bounds = cu_seqlens.tolist()
    return torch.cat([_attend(query[a:b], key[a:b], value[a:b], scale) for a, b in pairwise(bounds)])


@define("torchweave::varlen_attention", fake=_like_query, cuda=_varlen_cuda)
def varlen_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Attention of each sequence to itself, in both directions.

    Args:
        query, key, value: `[S, H, D]`, all sequences one after the other.
        cu_seqlens: integers `[sequences + 1]`: 0, and where each sequence ends.
        scale: factor of the products of queries and keys.

    Returns:
        `[S, H, D]`, contiguous.
    """
    return varlen_reference(query, key, value, cu_seqlens, scale)
