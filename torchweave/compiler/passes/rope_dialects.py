"""Dialects of rotary embedding: each formula is written once, over the operations of the stage whose graph is searched.

    x * cos + cat(-x[R/2:], x[:R/2]) * sin      the half style (`rotate_half`) over all D numbers of a head
    cat(rotated(x[:R]), x[R:])                  over the first R numbers (Phi 3, GPT-NeoX)
    rotated(x).to(dtype)                        with cos and sin in float32, rounded once at the end (OLMo 2)
    cat(a * cos - b * sin, b * cos + a * sin)   a, b the halves of x, with cos and sin `[1, 1, T, D/2]` of one half (gpt-oss)

x is `[1, H, T, D]` with cos `[1, 1, T, R]`, or `[1, T, H, D]` with cos `[1, T, 1, R]` (Gemma 4). Queries and keys may each have an
`unsqueeze` of the same cos and sin: the matcher compares those views by value. The interleaved style is not recognized.

The canonical op is `torchweave::rope` (`torchweave.ops.rope`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweave.compiler.passes.matcher import Match

aten = torch.ops.aten
_END = 2**63 - 1


class RopeOps(NamedTuple):
    """Spellings of slices of the last dimension, concatenation and casts in the graphs of a stage."""

    columns: Callable[[Any, Any, Any], Any]
    join: Callable[[list[Any]], Any]
    rounded: Callable[[Any, Any], Any]


ATEN = RopeOps(
    columns=lambda x, start, stop: aten.slice.Tensor(
        x, 3, 0 if start is None else start, _END if stop is None else stop
    ),
    join=lambda parts: aten.cat.default(parts, -1),
    rounded=lambda y, dtype: aten._to_copy.default(y, dtype=dtype),
)
TORCH_IR = RopeOps(
    columns=lambda x, start, stop: x[..., start:stop],
    join=lambda parts: torch.cat(parts, dim=-1),
    rounded=lambda y, dtype: y.to(dtype),
)


def full_rope(ops: RopeOps, x: Any, cos: Any, sin: Any, half: Any) -> Any:
    return x * cos + ops.join([-ops.columns(x, half, None), ops.columns(x, None, half)]) * sin


def partial_rope(ops: RopeOps, x: Any, cos: Any, sin: Any, half: Any, width: Any) -> Any:
    return ops.join([full_rope(ops, ops.columns(x, None, width), cos, sin, half), ops.columns(x, width, None)])


def full_rope_float32(ops: RopeOps, x: Any, cos: Any, sin: Any, half: Any, dtype: Any) -> Any:
    return ops.rounded(full_rope(ops, x, cos, sin, half), dtype)


def chunked_rope(x: Any, cos: Any, sin: Any) -> Any:
    """Of Torch IR. `cat(cos, cos)` and `cat(sin, sin)` are the angles of `full_rope`, which has the same roundings."""
    halves = torch.chunk(x, 2, dim=-1)
    low, high = halves[0], halves[1]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def halves_mismatch(match: Match, x: Tensor, cos: Tensor) -> str | None:
    """Why `half` and `width` of a match do not fit the R numbers of cos, or None."""
    width = cos.shape[-1]
    if "half" not in match.bindings:
        half = x.shape[-1] // 2
        return None if half == width else f"the halves have {half} numbers and cos has {width}"
    if 2 * match["half"] != width or match.bindings.get("width", x.shape[-1]) != width:
        return f"the halves are {match['half']} of {width} numbers that cos has"
    return None


def angle_dtype(match: Match, x: Tensor) -> torch.dtype:
    """The dtype that cos and sin must have: float32 where the result is rounded at the end, else that of x."""
    return torch.float32 if "dtype" in match.bindings else x.dtype
