"""`torchweave::varlen_attention`: attention inside each of several sequences that follow each other, without a cache or a mask.

Vision towers of images in patches call it: each image, frame or window is a sequence.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.registry import define

_FLASH_ALIGNMENT = 8
"""Flash attention takes heads whose size is a multiple of this."""


def _like_query(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`[S, H, D]` of one sequence, contiguous."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, scale=scale)[0].transpose(0, 1).contiguous()


def _varlen_cuda(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    if len(cu_seqlens) == 2:
        return _attend(query, key, value, scale)
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] % _FLASH_ALIGNMENT:
        return varlen_reference(query, key, value, cu_seqlens, scale)
    bounds = cu_seqlens.to(torch.int32)
    longest = int((bounds[1:] - bounds[:-1]).max())
    out = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, bounds, longest, longest, 0.0, False, False, scale=scale
    )
    return out[0].contiguous()


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
