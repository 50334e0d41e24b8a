"""Move the rotary embedding of queries and keys, and the RMSNorm of their heads before it, into attention.

Before                                                      After
    q, k = rotary(norm(q)), rotary(norm(k))                     torchweave.attention(q, k, v, out, ..., cos, sin,
    torchweave.attention(q, k, v, out, ...)                                          q_weight, k_weight, eps, ...)

When      on a GPU, where the decode kernel rotates the values that it loads; q and k rotate by the same cos and sin in a dialect
          of `torchweave.compiler.passes.rope_dialects`. A norm over heads moves as well when it is in a dialect of
          `norm_dialects` and the same for both (Qwen 3, Gemma 3); else it stays in the piece.
Numerics  exact.
Pays      one launch a layer in a decode graph of more than a few rows, two with norms; in mixed steps the launch that writes
          the cache rotates as well. See bench/compiler/fusions.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

import torchweave.ops.attention.op  # noqa: F401 (defines torchweave::attention)
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import calls_of
from torchweave.compiler.passes import norm_dialects as norm
from torchweave.compiler.passes import rope_dialects as rope
from torchweave.compiler.passes.base import DevicePass, PassResult, near_misses_by_reason
from torchweave.compiler.passes.matcher import Match, PartialMatch, Pattern, either, same_value
from torchweave.compiler.passes.rewrite import erase

_ATTENTION = torch.ops.torchweave.attention.default
_ROTARY = 10
"""Position of `cos` in the op's arguments."""


def _rope(x: Tensor, cos: Tensor, sin: Tensor, half: int, width: int, dtype: torch.dtype) -> Any:
    """A projection from its heads to the op's `[T, H, D]`, rotated before or after tokens and heads change places."""
    rotated = either(
        rope.full_rope(rope.TORCH_IR, x, cos, sin, half),
        rope.partial_rope(rope.TORCH_IR, x, cos, sin, half, width),
        rope.full_rope_float32(rope.TORCH_IR, x, cos, sin, half, dtype),
        rope.chunked_rope(x, cos, sin),
    )
    return either(rotated, rotated.transpose(1, 2)).squeeze(0).transpose(0, 1)


_ROPE = Pattern(_rope, torch_ir=True)
_NORMS = (
    (Pattern(norm.rounded_before_weight(norm.TORCH_IR), torch_ir=True), False),
    (Pattern(norm.rounded_after_weight(norm.TORCH_IR), torch_ir=True), True),
)


@dataclass(frozen=True)
class _Heads:
    """Queries or keys before norm and rotation.

    Attributes:
        node: `[1, T, H, D]`, or `[1, H, T, D]` when `transposed`.
        norm: (weight, eps, offset, wide) or None.
        covered: the calls between the node and the rotation.
    """

    node: fx.Node
    transposed: bool
    norm: tuple[fx.Node, float, float, bool] | None = None
    covered: tuple[fx.Node, ...] = ()


class RotaryAttention(DevicePass):
    __doc__ = __doc__
    name = "rotary_attention"

    def run(self, graph: CapturedGraph) -> PassResult:
        matches, before = 0, graph.num_calls()
        rejected: dict[str, list[str]] = {}
        for node, arguments in calls_of(graph, _ATTENTION):
            if value(arguments[0]).device.type not in self.devices or arguments[_ROTARY] is not None:
                continue
            why = _rewrite(graph, node, list(arguments))
            if why is None:
                matches += 1
            elif why:
                rejected.setdefault(why, []).append(node.name)
        return PassResult(matches, before - graph.num_calls(), near_misses_by_reason(rejected))


def _rewrite(graph: CapturedGraph, node: fx.Node, arguments: list[Any]) -> str | None:
    """Rewrite one call of attention; else return the reason, empty where no rotation is found."""
    rope_matches = []
    for argument in arguments[:2]:
        match = _ROPE.match_at(argument)
        if not isinstance(match, Match):
            return match.why if isinstance(match, PartialMatch) else ""
        rope_matches.append(match)
    why = _reject_reason(rope_matches)
    if why is not None:
        return why
    cos, sin = (rope_matches[0][name].args[0] for name in ("cos", "sin"))
    if "half" not in rope_matches[0].bindings:
        cos, sin = _both_halves(graph, cos), _both_halves(graph, sin)
    heads = [_heads(match["x"], _heads_dim(match)) for match in rope_matches]
    q_norm, k_norm = (each.norm for each in heads)
    if q_norm is not None and k_norm is not None and q_norm[1:] == k_norm[1:]:
        rotary = (cos, sin, q_norm[0], k_norm[0], *q_norm[1:])
    else:
        heads, rotary = [_Heads(match["x"], _heads_dim(match) == 1) for match in rope_matches], (cos, sin)
    with graph.graph.inserting_before(node):
        q, k = (_tokens_first(graph, each) for each in heads)
    node.args, node.kwargs = (q, k, *arguments[2:_ROTARY], *rotary), {}
    for match, each in zip(rope_matches, heads, strict=True):
        erase(graph, match.nodes)
        erase(graph, each.covered)
    return None


def _both_halves(graph: CapturedGraph, angles: fx.Node) -> fx.Node:
    """`cat([angles, angles])` after angles, once for all layers."""
    for reader in angles.users:
        if reader.target is torch.cat and reader.args == ([angles, angles], -1):
            return reader
    with graph.graph.inserting_after(angles):
        return graph.call(torch.cat, [angles, angles], -1)


def _heads_dim(match: Match) -> int:
    """The dimension of heads of the tensor that is rotated: 2 where tokens and heads change places afterwards."""
    return 2 if any(node.target == "transpose" and node.args[1:] == (1, 2) for node in match.nodes) else 1


def _reject_reason(rope_matches: list[Match]) -> str | None:
    q, k = rope_matches
    if _heads_dim(q) != _heads_dim(k):
        return "queries and keys have heads in different dimensions"
    if not (same_value(q["cos"], k["cos"]) and same_value(q["sin"], k["sin"])):
        return "queries and keys rotate by different angles"
    if ("half" in q.bindings) != ("half" in k.bindings):
        return "queries and keys rotate in different dialects"
    for name in ("cos", "sin"):
        angle = q[name]
        if angle.op != "call_method" or angle.target != "unsqueeze" or angle.args[1:] != (_heads_dim(q),):
            return f"{name} is not [1, T, R] with a dimension for heads inserted"
    x, cos = q.value("x"), q.value("cos")
    if {cos.dtype, q.value("sin").dtype} != {rope.angle_dtype(q, x)} or k.value("x").dtype != x.dtype:
        return f"q is {x.dtype} and cos {cos.dtype}"
    return rope.halves_mismatch(q, x, cos) or rope.halves_mismatch(k, k.value("x"), cos)


def _heads(x: fx.Node, heads_dim: int) -> _Heads:
    """The input of the norm over heads that makes x, before or after a transposition; x itself where no norm does."""
    source, transposed, between = x, heads_dim == 1, []
    if transposed and x.op == "call_method" and x.target == "transpose" and x.args[1:] == (1, 2):
        source, transposed, between = x.args[0], False, [x]
    assert isinstance(source, fx.Node)
    for pattern, wide in _NORMS:
        match = pattern.match_at(source)
        if isinstance(match, Match) and _over_heads(match):
            spec = (match["weight"], match["eps"], match.bindings.get("offset", 0.0), wide)
            return _Heads(match["x"], transposed, spec, (*match.nodes, *between))
    return _Heads(x, heads_dim == 1)


def _over_heads(match: Match) -> bool:
    x, weight = match.value("x"), match.value("weight")
    return weight.dtype == x.dtype and x.dim() == 4 and list(weight.shape) == [x.shape[-1]]


def _tokens_first(graph: CapturedGraph, heads: _Heads) -> fx.Node:
    """`[T, H, D]`, a view."""
    node = graph.call("squeeze", heads.node, 0)
    return graph.call("transpose", node, 0, 1) if heads.transposed else node
