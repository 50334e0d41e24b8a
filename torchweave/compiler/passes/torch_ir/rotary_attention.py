"""Attention turns queries and keys itself, and norms their heads first where the model does.

Before                                                      After
    q, k = rotary(norm(q)), rotary(norm(k))                     torchweave.attention(q, k, v, out, ..., cos, sin,
    torchweave.attention(q, k, v, out, ...)                                          q_weight, k_weight, eps, ...)

When      on a GPU, where the kernel that carries out a decode step turns what it loads anyway; both q and k turn by the same cos
          and sin, in the half style, whole or in part. The norm comes along when it is over heads, in one of the dialects of
          `torchweave.ops.norm`, and the same for both (Qwen 3, Gemma 3); else it stays in the piece.
Numerics  exact.
Pays      one launch a layer in a decode graph of more than a few rows, two with norms; in mixed steps the launch that writes
          the cache turns as well. See bench/fusions.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

import torchweave.ops.attention.op  # noqa: F401 (defines torchweave::attention)
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import boundary_op, normalize_call
from torchweave.compiler.passes.base import GraphPass, NearMiss, PassResult
from torchweave.compiler.passes.matcher import Match, PartialMatch, Pattern
from torchweave.compiler.passes.rewrite import erase

ATTENTION = "torchweave::attention"
_ROTARY = 10
"""Position of `cos` among the op's arguments."""


def _rotate(x: Any, cos: Any, sin: Any, half: Any) -> Any:
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def full_rope(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Any:
    return _rotate(x, cos, sin, half).squeeze(0).transpose(0, 1)


def partial_rope(x: Tensor, cos: Tensor, sin: Tensor, half: int, width: int) -> Any:
    rotated = _rotate(x[..., :width], cos, sin, half)
    return torch.cat([rotated, x[..., width:]], dim=-1).squeeze(0).transpose(0, 1)


def full_rope_float32(x: Tensor, cos: Tensor, sin: Tensor, half: int, dtype: torch.dtype) -> Any:
    return _rotate(x, cos, sin, half).to(dtype).squeeze(0).transpose(0, 1)


def rounded_first(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
    y = x.to(torch.float32)
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)


def rounded_last(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
    y = x.to(torch.float32)
    return (weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps))).to(dtype)


def one_plus_weight(x: Tensor, weight: Tensor, eps: float, one: float) -> Any:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * (one + weight.float())).type_as(x)


_ROPE_PATTERNS = tuple(Pattern(each, torch_ir=True) for each in (full_rope, partial_rope, full_rope_float32))
_NORM_PATTERNS = tuple(
    (Pattern(each, torch_ir=True), each is not rounded_first) for each in (rounded_first, rounded_last, one_plus_weight)
)


@dataclass(frozen=True)
class _Heads:
    """Queries or keys before they are normed or turned.

    Attributes:
        node: `[1, T, H, D]`, or `[1, H, T, D]` when `transposed`.
        norm: (weight, eps, offset, wide) or None.
        covered: the calls between it and its turning.
    """

    node: fx.Node
    transposed: bool
    norm: tuple[fx.Node, float, float, bool] | None = None
    covered: tuple[fx.Node, ...] = ()


class RotaryAttention(GraphPass):
    __doc__ = __doc__
    name = "rotary_attention"

    def __init__(self, devices: Iterable[str] = ("cuda",)) -> None:
        """`devices`: types of devices on which attention's kernels turn queries and keys themselves."""
        self.devices = frozenset(devices)

    def run(self, graph: CapturedGraph) -> PassResult:
        """See `Pass.run`."""
        matches, before = 0, graph.num_calls()
        rejected: dict[str, list[str]] = {}
        for node in list(graph.graph.nodes):
            op = boundary_op(node.target, frozenset({ATTENTION})) if node.op == "call_function" else None
            if op is None or value(node.args[0]).device.type not in self.devices:
                continue
            arguments, _ = normalize_call(op, node.args, node.kwargs)
            if arguments[_ROTARY] is not None:
                continue
            why = _rewrite(graph, node, list(arguments))
            if why is None:
                matches += 1
            elif why:
                rejected.setdefault(why, []).append(node.name)
        misses = tuple(NearMiss(", ".join(names), why) for why, names in rejected.items())
        return PassResult(matches, before - graph.num_calls(), misses)


def _rewrite(graph: CapturedGraph, node: fx.Node, arguments: list[Any]) -> str | None:
    """Let one attention turn its queries and keys; else why not, empty where nothing turns them."""
    rope_matches = []
    for argument in arguments[:2]:
        found = [pattern.match_at(argument) for pattern in _ROPE_PATTERNS]
        match = next((each for each in found if isinstance(each, Match)), None)
        if match is None:
            return next((each.why for each in found if isinstance(each, PartialMatch)), "")
        rope_matches.append(match)
    why = _reject_reason(rope_matches)
    if why is not None:
        return why
    cos, sin = (rope_matches[0][name].args[0] for name in ("cos", "sin"))
    heads = [_heads(match["x"]) for match in rope_matches]
    q_norm, k_norm = (each.norm for each in heads)
    if q_norm is not None and k_norm is not None and q_norm[1:] == k_norm[1:]:
        rotary = (cos, sin, q_norm[0], k_norm[0], *q_norm[1:])
    else:
        heads, rotary = [_Heads(match["x"], True) for match in rope_matches], (cos, sin)
    with graph.graph.inserting_before(node):
        q, k = (_tokens_first(graph, each) for each in heads)
    node.args, node.kwargs = (q, k, *arguments[2:_ROTARY], *rotary), {}
    for match, each in zip(rope_matches, heads, strict=True):
        erase(graph, match.nodes)
        erase(graph, each.covered)
    return None


def _reject_reason(rope_matches: list[Match]) -> str | None:
    q, k = rope_matches
    if q["cos"] is not k["cos"] or q["sin"] is not k["sin"]:
        return "queries and keys turn by different angles"
    for name in ("cos", "sin"):
        angle = q[name]
        if angle.op != "call_method" or angle.target != "unsqueeze" or angle.args[1:] != (1,):
            return f"{name} is no [1, T, R] with a dimension for heads put in"
    x, cos = q.value("x"), q.value("cos")
    width = cos.shape[-1]
    if any(2 * each["half"] != width or each.bindings.get("width", x.shape[-1]) != width for each in rope_matches):
        return f"the halves are {q['half']} and {k['half']} of {width} numbers that cos has"
    wide = torch.float32 if "dtype" in q.bindings else x.dtype
    if {cos.dtype, q.value("sin").dtype} != {wide} or k.value("x").dtype != x.dtype:
        return f"q is {x.dtype} and cos {cos.dtype}"
    return None


def _heads(x: fx.Node) -> _Heads:
    """What is behind x `[1, H, T, D]`: a norm over heads, before the transposition or after it, or nothing of the kind."""
    source, transposed = x, True
    if x.op == "call_method" and x.target == "transpose" and x.args[1:] == (1, 2):
        source, transposed = x.args[0], False
    assert isinstance(source, fx.Node)
    for pattern, wide in _NORM_PATTERNS:
        match = pattern.match_at(source)
        if isinstance(match, Match) and _over_heads(match):
            norm = (match["weight"], match["eps"], match.bindings.get("one", 0.0), wide)
            return _Heads(match["x"], transposed, norm, (*match.nodes, *([] if transposed else [x])))
    return _Heads(x, True)


def _over_heads(match: Match) -> bool:
    x, weight = match.value("x"), match.value("weight")
    return weight.dtype == x.dtype and x.dim() == 4 and list(weight.shape) == [x.shape[-1]]


def _tokens_first(graph: CapturedGraph, heads: _Heads) -> fx.Node:
    """`[T, H, D]`, a view."""
    node = _method(graph, "squeeze", heads.node, 0)
    return _method(graph, "transpose", node, 0, 1) if heads.transposed else node


def _method(graph: CapturedGraph, name: str, source: fx.Node, *arguments: int) -> fx.Node:
    node = graph.graph.call_method(name, (source, *arguments))
    node.meta["example_value"] = graph.fake_ops.run(name, (value(source), *arguments), {})
    return node
