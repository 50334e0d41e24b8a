"""Replace the rotary embedding of queries and keys, a dozen operations, by one op.

Before                                                            After
    q_half = aten.cat([aten.neg(q[..., R/2:]), q[..., :R/2]], -1)     q', k' = torchweave.rope(q.T, k.T, cos, sin)
    q' = aten.add(aten.mul(q, cos), aten.mul(q_half, sin))
    k' = ...                                                          (q.T: tokens before heads)

When      in a dialect of `torchweave.compiler.passes.rope_dialects`: the half style over all of a head or its first R numbers; q
          and k are [1, H, T, D] or [1, T, H, D] and rotate by the same cos and sin, of their dtype or, rounded once at the end
          (OLMo 2), float32.
Numerics  exact.
Pays      10 to 14 launches become one in an FX build. In a decode graph `rotary_attention` goes further and leaves none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torchweave.ops.rope  # noqa: F401 (defines torchweave::rope)
from torchweave.compiler.passes import rope_dialects as dialects
from torchweave.compiler.passes.matcher import Match
from torchweave.compiler.passes.pattern import Fusion

aten = torch.ops.aten


def full_rope_float32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: int, dtype: torch.dtype) -> Any:
    return tuple(dialects.full_rope_float32(dialects.ATEN, x, cos, sin, half, dtype) for x in (q, k))


def full_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: int) -> Any:
    return tuple(dialects.full_rope(dialects.ATEN, x, cos, sin, half) for x in (q, k))


def partial_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: int, width: int) -> Any:
    return tuple(dialects.partial_rope(dialects.ATEN, x, cos, sin, half, width) for x in (q, k))


def replacement(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    heads = _heads_dim(cos)
    cos, sin = aten.squeeze.dim(cos, heads), aten.squeeze.dim(sin, heads)
    if heads == 2:
        return torch.ops.torchweave.rope.default(q, k, cos, sin)
    q, k = aten.transpose.int(q, 1, 2), aten.transpose.int(k, 1, 2)
    q, k = torch.ops.torchweave.rope.default(q, k, cos, sin)
    return aten.transpose.int(q, 1, 2), aten.transpose.int(k, 1, 2)


def _heads_dim(cos: Tensor) -> int:
    """The dimension of heads: the first that cos broadcasts over, after the batch."""
    return 1 if str(cos.shape[1]) == "1" else 2


def extra_check(match: Match) -> str | None:
    q, k, cos, sin = (match.value(name) for name in ("q", "k", "cos", "sin"))
    if cos.dim() != 4 or q.dim() != 4 or any(str(size) != "1" for size in (cos.shape[0], q.shape[0])):
        return f"q is {list(q.shape)} and cos {list(cos.shape)}, not [1, H, T, D] and [1, 1, T, R]"
    heads = _heads_dim(cos)
    broadcasts_tokens = str(cos.shape[3 - heads]) == "1" != str(q.shape[3 - heads])
    if str(cos.shape[heads]) != "1" or broadcasts_tokens:
        return f"q is {list(q.shape)} and cos {list(cos.shape)}, not [1, H, T, D] and [1, 1, T, R]"
    wide = dialects.angle_dtype(match, q)
    if q.dtype != k.dtype or cos.dtype != wide or sin.dtype != wide:
        return f"q is {q.dtype}, k {k.dtype}, cos {cos.dtype} and sin {sin.dtype}"
    return dialects.halves_mismatch(match, q, cos)


FUSION = Fusion("rope", (full_rope, partial_rope, full_rope_float32), replacement, extra_check=extra_check)
