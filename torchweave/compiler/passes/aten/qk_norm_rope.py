"""Fuse the RMSNorms of queries and keys into the rotary embedding that reads them.

Before                                                          After
    q, k = torchweave.rms_norm(q, ...), torchweave.rms_norm(k, ...)     q', k' = torchweave.qk_norm_rope(q, k, ...)
    q', k' = torchweave.rope(q, k, cos, sin)

When      each norm is over the heads of one tensor (Qwen 3, Gemma 3; not OLMo 2, whose norm is over all heads), both have
          one dialect and eps, and nothing else reads their results.
Numerics  exact.
Pays      two launches in an FX build. In a decode graph `rotary_attention` goes further and leaves none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torchweave.ops.rope  # noqa: F401 (defines the ops)
from torchweave.compiler.passes.pattern import Fusion

aten = torch.ops.aten
torchweave_ops = torch.ops.torchweave


def pattern(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    eps: float, offset: float, wide: bool,
) -> Any:  # fmt: skip
    q_heads, k_heads = (
        torchweave_ops.rms_norm.default(x, weight, eps, offset, wide) for x, weight in ((q, q_weight), (k, k_weight))
    )
    q_heads, k_heads = (aten.transpose.int(aten.transpose.int(x, 1, 2), 1, 2) for x in (q_heads, k_heads))
    rotated = torchweave_ops.rope.default(q_heads, k_heads, cos, sin)
    return rotated[0], rotated[1]


def replacement(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    eps: float, offset: float, wide: bool,
) -> Any:  # fmt: skip
    return torchweave_ops.qk_norm_rope.default(q, k, q_weight, k_weight, cos, sin, eps, offset, wide)


FUSION = Fusion("qk_norm_rope", pattern, replacement)
