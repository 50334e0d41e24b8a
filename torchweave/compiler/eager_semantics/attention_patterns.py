"""Let Inductor replace attention by a fused kernel only where the graph computes that attention.

Inductor's stored patterns of attention (2.13) take the dimension of the softmax, every permutation and every shape as they are:
slot attention (softmax over the queries), co-attention or a key kept as [B, H, D, T] match, and the kernel computes something
else. Here a match is compared with the pattern's own function, traced for the tensors of the match: each operation, its
dimensions and the shape of its result. A pattern with a mask is not replaced at all: where a mask hides a whole row, eager code
gives NaN and the kernel 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from torchweave.compiler.ir.symbols import value

aten = torch.ops.aten

_PATTERN = "_sfdp_pattern"
"""Prefix of the functions that Inductor's patterns of attention are traced from."""
_DIMS = {aten.permute.default: 1, aten.amax.default: 1, aten.sum.dim_IntList: 1, aten._softmax.default: 1}
"""Position of the dimensions among an operation's arguments."""


@contextmanager
def compare_attention_patterns() -> Iterator[None]:
    """See the module's text; for the pieces that Inductor builds in the body."""
    from torch._inductor.fx_passes import joint_graph

    lazy_init: Any = joint_graph.lazy_init
    with ExitStack() as patches:

        def init_and_compare(*args: Any) -> None:
            lazy_init(*args)
            for entry in _attention_entries(joint_graph.pass_patterns):
                if not isinstance(entry.extra_check, _Compared):
                    compared = _Compared(entry.extra_check)
                    patches.enter_context(mock.patch.object(entry, "extra_check", compared))

        patches.enter_context(mock.patch.object(joint_graph, "lazy_init", init_and_compare))
        yield


def _attention_entries(passes: Sequence[Any]) -> list[Any]:
    entries = {id(entry): entry for each in passes for found in each.patterns.values() for entry in found}
    return [entry for entry in entries.values() if (getattr(entry, "pattern_name", None) or "").startswith(_PATTERN)]


class _Compared:
    """The check of a pattern's match, after the comparison of the match with the pattern's function."""

    def __init__(self, check: Any) -> None:
        self._check = check
        self._pattern = inspect.getclosurevars(check).nonlocals

    def __call__(self, match: Any) -> bool:
        names = self._pattern["argnames_static"]
        if any("mask" in name for name in names):
            return False
        try:
            same = _computes(match, self._pattern, names)
        except Exception:  # the pattern's function cannot run on these tensors
            return False
        return same and self._check(match)


def _computes(match: Any, pattern: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether the matched operations are those of the pattern's function, traced for the arguments of the match."""
    given = [match.kwargs[name] for name in names]
    examples = [value(each) if isinstance(each, fx.Node) else each for each in given]
    mode = next(each.fake_mode for each in examples if isinstance(each, FakeTensor))
    with mode, nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards():
        examples = [
            torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device=each.device)
            if isinstance(each, Tensor)
            else each
            for each in examples
        ]
        traced = pattern["trace_fn"](pattern["search_fn"], examples, get_decomp_fn=pattern["get_decomp_fn"])
    arguments = iter(given)
    pairs: dict[fx.Node, Any] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            pairs[node] = next(arguments)
    results = list(traced.graph.output_node().all_input_nodes)
    matched = [each for each in match.output_nodes() if each is not None]
    return len(results) == len(matched) and all(
        _same(one, other, pairs) for one, other in zip(results, matched, strict=True)
    )


def _same(traced: Any, matched: Any, pairs: dict[fx.Node, Any]) -> bool:
    if not isinstance(traced, fx.Node) or not isinstance(matched, fx.Node):
        return traced == matched
    if traced in pairs:
        return pairs[traced] is matched
    pairs[traced] = matched
    if traced.target is not matched.target or not _same_shape(value(traced), value(matched)):
        return False
    if (at := _DIMS.get(cast(Any, traced.target))) is not None and _dims(traced, at) != _dims(matched, at):
        return False
    sources, others = _tensors(traced), _tensors(matched)
    return len(sources) == len(others) and all(
        _same(one, other, pairs) for one, other in zip(sources, others, strict=True)
    )


def _same_shape(one: Any, other: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if one.dtype != other.dtype or one.dim() != other.dim():
        return False
    return all(statically_known_true(a == b) for a, b in zip(one.shape, other.shape, strict=True))


def _dims(node: fx.Node, at: int) -> list[int]:
    dims, rank = node.args[at], value(node.args[0]).dim()  # type: ignore[arg-type]
    return [each % rank for each in (dims if isinstance(dims, (list, tuple)) else [dims])]  # type: ignore[operator, union-attr]


def _tensors(node: fx.Node) -> list[Any]:
    """The tensors and numbers among an operation's arguments, without sizes and dimensions."""
    return [
        each
        for each in (*node.args, *node.kwargs.values())
        if (isinstance(each, fx.Node) and isinstance(value(each), Tensor)) or isinstance(each, float)
    ]
