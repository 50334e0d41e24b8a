"""Rotary position embedding of queries and keys in one kernel, with their RMSNorm where the model has one (Qwen 3, Gemma 3).

The half style of transformers: the two halves of the first R channels of a head are rotated against each other,

    x * cos + cat(-x[R/2:], x[:R/2]) * sin

and the other channels pass through. Each product is rounded before the sum, to the dtype of eager mode: that of x and cos, or
float32 where cos is float32. The kernel does the same, without fused multiply-add, and is bit-equal. With the norm, see
`torchweave.ops.norm` for the tolerance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweave.ops.norm import _normalize
from torchweave.ops.registry import define


def _fake(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return (torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(k.shape, dtype=k.dtype, device=k.device))


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from torchweave.ops.kernels.rope import launch_rope

    return launch_rope(q, k, cos, sin)


@define("torchweave::rope", fake=_fake, cuda=_launch)
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys.

    Args:
        q: `[..., T, H, D]`; the dimensions before T are 1.
        k: `[..., T, KH, D]`.
        cos, sin: `[..., T, R]` of the same dtype, or float32; R even and at most D.

    Returns:
        q and k rotated, contiguous.
    """
    return _apply_rotary(q, cos, sin), _apply_rotary(k, cos, sin)


def _launch_norm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *norm: Any
) -> tuple[Tensor, Tensor]:
    from torchweave.ops.kernels.rope import QKNorm, launch_rope

    return launch_rope(q, k, cos, sin, QKNorm(q_weight, k_weight, *norm))


@define("torchweave::qk_norm_rope", fake=_fake, cuda=_launch_norm)
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float = 0.0,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rope` of `rms_norm(q, q_weight, ...)` and `rms_norm(k, k_weight, ...)`, the norm over each head; weights `[D]`."""
    return (
        _apply_rotary(_normalize(q, q_weight, eps, offset, wide), cos, sin),
        _apply_rotary(_normalize(k, k_weight, eps, offset, wide), cos, sin),
    )


def _apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotary_dims = x[..., :width]
    rotated_half = torch.cat((-rotary_dims[..., width // 2 :], rotary_dims[..., : width // 2]), -1)
    rotated = (rotary_dims * cos + rotated_half * sin).to(x.dtype)
    if width == x.shape[-1]:
        return rotated.contiguous()
    return torch.cat((rotated, x[..., width:]), -1)


class Rotary(NamedTuple):
    """Arguments of `rope` or `qk_norm_rope`, for attention backends that apply the rotary embedding themselves.

    Without weights there is no norm. `cos` and `sin` are `[..., T, R]`.
    """

    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    wide: bool = False

    def apply_rotary(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q `[T, H, D]` and k `[T, KH, D]`, rotated, and normed before it if there are weights."""
        cos, sin = self.cos.reshape(-1, self.cos.shape[-1]), self.sin.reshape(-1, self.sin.shape[-1])
        if self.q_weight is None or self.k_weight is None:
            return rope(q, k, cos, sin)
        return qk_norm_rope(q, k, self.q_weight, self.k_weight, cos, sin, self.eps, self.offset, self.wide)
