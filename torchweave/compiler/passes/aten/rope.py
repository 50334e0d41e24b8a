"""Rotary embedding of queries and keys, a dozen operations, becomes one.

Before                                                            After
    q_half = aten.cat([aten.neg(q[..., R/2:]), q[..., :R/2]], -1)     q', k' = torchweave.rope(q.T, k.T, cos, sin)
    q' = aten.add(aten.mul(q, cos), aten.mul(q_half, sin))
    k' = ...                                                          (q.T: tokens before heads)

When      the halves of a head turn (`rotate_half` as most models write it, not the interleaved form), all of it or its first R
          numbers; q and k are [1, H, T, D] of the dtype of cos and sin, which both read, or the latter are float32 and all is
          rounded once, at the end (OLMo 2).
Numerics  exact.
Pays      10 to 14 launches become one in an FX build. In a decode graph `rotary_attention` goes further, and leaves none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torchweave.ops.rope  # noqa: F401 (defines torchweave::rope)
from torchweave.compiler.passes.matcher import Match
from torchweave.compiler.passes.pattern import Fusion

aten = torch.ops.aten
END = 2**63 - 1


def _rotate(x: Any, cos: Any, sin: Any, half: Any) -> Any:
    low, high = aten.slice.Tensor(x, 3, 0, half), aten.slice.Tensor(x, 3, half, END)
    swapped = aten.cat.default([aten.neg.default(high), low], -1)
    return aten.add.Tensor(aten.mul.Tensor(x, cos), aten.mul.Tensor(swapped, sin))


def _turned_part(x: Any, cos: Any, sin: Any, half: Any, width: Any) -> Any:
    turning, rest = aten.slice.Tensor(x, 3, 0, width), aten.slice.Tensor(x, 3, width, END)
    return aten.cat.default([_rotate(turning, cos, sin, half), rest], -1)


def full_rope_float32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: int, dtype: torch.dtype) -> Any:
    """OLMo 2: cos and sin are float32, and so is everything up to the end."""
    return tuple(aten._to_copy.default(_rotate(x, cos, sin, half), dtype=dtype) for x in (q, k))


def full_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: int) -> Any:
    return _rotate(q, cos, sin, half), _rotate(k, cos, sin, half)


def partial_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: int, width: int) -> Any:
    return _turned_part(q, cos, sin, half, width), _turned_part(k, cos, sin, half, width)


def replacement(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = aten.transpose.int(q, 1, 2), aten.transpose.int(k, 1, 2)
    cos, sin = aten.squeeze.dim(cos, 1), aten.squeeze.dim(sin, 1)
    q, k = torch.ops.torchweave.rope.default(q, k, cos, sin)
    return aten.transpose.int(q, 1, 2), aten.transpose.int(k, 1, 2)


def extra_check(match: Match) -> str | None:
    q, k, cos, sin = (match.value(name) for name in ("q", "k", "cos", "sin"))
    if cos.dim() != 4 or q.dim() != 4 or any(str(size) != "1" for size in (*cos.shape[:2], q.shape[0])):
        return f"q is {list(q.shape)} and cos {list(cos.shape)}, not [1, H, T, D] and [1, 1, T, R]"
    wide = torch.float32 if "dtype" in match.bindings else q.dtype
    if q.dtype != k.dtype or cos.dtype != wide or sin.dtype != wide:
        return f"q is {q.dtype}, k {k.dtype}, cos {cos.dtype} and sin {sin.dtype}"
    width = cos.shape[-1]
    if 2 * match["half"] != width or match.bindings.get("width", q.shape[-1]) != width:
        return f"the halves are {match['half']} of {width} numbers that cos has"
    return None


FUSION = Fusion("rope", (full_rope, partial_rope, full_rope_float32), replacement, extra_check=extra_check)
