"""Write the result of attention in FP8 where only a quantization reads it.

Before                                        After
    out = empty(T, H, D)                          out = empty(T, H, D, dtype=e4m3); s = empty(H, T)
    attention(q, k, v, out, ...)                  attention_fp8(q, k, v, out, s, ...)
    a, s = fp8_quant(out.reshape(T, H * D), 128)  y = fp8_linear(out.reshape(T, H * D), s, W, S)
    y = fp8_linear(a, s, W, S)

When      only order-preserving views read `out`, and only fp8_quant reads those; the scales are one for each 128 channels with
          128 numbers a head, or one static constant. A scale per token needs all heads, which no program of attention computes.
Numerics  exact: the result is rounded to its dtype before quantization, as before.
Pays      in decode steps of the Triton kernel: one launch less. Other steps and backends quantize after attention.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import torchweave.ops.attention.op  # noqa: F401  (defines torchweave::attention)
from torchweave.compiler.ir.graph import CapturedGraph, update_fake_values
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import calls_of
from torchweave.compiler.passes.base import GraphPass, NearMiss, PassResult
from torchweave.compiler.passes.rewrite import single_reader
from torchweave.compiler.passes.torch_ir.merge_fp8_linears import QUANT
from torchweave.ops.quant.fp8 import FP8, GROUP

_ATTENTION = torch.ops.torchweave.attention.default
_ATTENTION_FP8 = torch.ops.torchweave.attention_fp8.default
_NAMES = [argument.name for argument in _ATTENTION._schema.arguments]


class Fp8Attention(GraphPass):
    """See the module's text."""

    name = "fp8_attention"

    def run(self, graph: CapturedGraph) -> PassResult:
        quants = dict(calls_of(graph, QUANT))
        near_misses: list[NearMiss] = []
        matches = 0
        for node, arguments in calls_of(graph, _ATTENTION):
            out = arguments[_NAMES.index("out")]
            quant = single_reader(out, node)
            if quant is None or quant not in quants:
                continue
            x, group, given = quants[quant]
            why = _reject_reason(graph, out, group, given)
            if why is None:
                _rewrite(graph, node, arguments, (quant, x), given)
                matches += 1
            else:
                near_misses.append(NearMiss(node.name, why))
        graph.drop_unused_constants()
        return PassResult(matches, matches, tuple(near_misses))


def _reject_reason(graph: CapturedGraph, out: fx.Node, group: int, given: Any) -> str | None:
    """Why attention cannot quantize its result, or None."""
    if out.target is not torch.empty:
        return f"its result is allocated by {out.target}, not by empty"
    if given is not None:
        return None if graph.constant(given) is not None else "its given scale is computed, not a constant"
    if group != GROUP:
        return "a scale for each token needs all of its heads, and a program of attention computes one"
    if value(out).shape[-1] != GROUP:
        return f"its scales are for {GROUP} channels, and a head has {value(out).shape[-1]}"
    return None


def _rewrite(
    graph: CapturedGraph, node: fx.Node, arguments: tuple[Any, ...], reader: tuple[fx.Node, fx.Node], given: Any
) -> None:
    """Replace attention by the FP8 form; `reader`: the quantization and its input."""
    quant, x = reader
    out = arguments[_NAMES.index("out")]
    sizes = tuple(out.args[0]) if isinstance(out.args[0], (tuple, list)) else out.args
    with graph.graph.inserting_before(out):
        q, scale = graph.call(torch.empty, *sizes, dtype=FP8, device=value(out).device), given
        if scale is None:
            scale = graph.call(torch.empty, sizes[1], sizes[0], dtype=torch.float32, device=value(out).device)
    named = {**dict(zip(_NAMES, arguments, strict=True)), "out": q, "given_scale": given, "out_scale": scale}
    op = _ATTENTION_FP8 if given is None else _ATTENTION
    with graph.graph.inserting_before(node):
        replaced = graph.graph.call_function(op, tuple(named[argument.name] for argument in op._schema.arguments))
    replaced.meta = dict(node.meta)
    graph.graph.erase_node(node)
    out.replace_all_uses_with(q)
    graph.graph.erase_node(out)
    for part in list(quant.users):
        assert part.target is operator.getitem, "only getitem reads a result of several tensors"
        part.replace_all_uses_with(x if part.args[1] == 0 else scale)
        graph.graph.erase_node(part)
    graph.graph.erase_node(quant)
    update_fake_values(graph, {q: value(q)})
