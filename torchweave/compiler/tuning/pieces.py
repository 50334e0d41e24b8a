"""Tuning tasks for built pieces: two builds of one piece, run on the weights of each layer in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweave.compiler.codegen.pieces import Boxed, BuiltPiece
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import Piece
from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.tuning.measure import Call, copies_for
from torchweave.compiler.tuning.table import COMPILE_SIZES, STREAMS
from torchweave.compiler.tuning.tuner import TuningTask


def tuning_tasks(
    subject: str, baseline: CompiledGraph, candidate: CompiledGraph, tokens: Sequence[int]
) -> Iterator[TuningTask]:
    """Tasks that compare `candidate`'s build of each piece with `baseline`'s, at each token count; equal builds are left out.

    Both graphs come from one module and differ by `subject` only: an ATen pass, streams, or builds for fixed sizes. The name of
    the candidate is `on`.
    """
    first = {piece.digest: piece for piece in reversed(baseline.pieces)}
    for digest, piece in first.items():
        if digest not in candidate.built:
            continue
        layers = [baseline.constants[each.index] for each in baseline.pieces if each.digest == digest]
        for count in tokens:
            before, after = variant_for(baseline.built[digest], count), variant_for(candidate.built[digest], count)
            if _differ(subject, before, after):
                inputs = operands(piece, count)
                calls = [_call(each.call, inputs, layers) for each in (before, after)]
                size = sum(tensor.numel() * tensor.element_size() for tensor in layers[0])
                copies = max(len(layers), copies_for(max(size, 1)))
                yield TuningTask(subject, digest, count, calls[0], {"on": calls[1]}, copies)


def _differ(subject: str, before: BuiltPiece, after: BuiltPiece) -> bool:
    """Whether two builds may run differently; for a pass, whether it matched."""
    if subject not in (STREAMS, COMPILE_SIZES) and not any(
        facts["name"] == subject and facts["matches"] for facts in after.passes
    ):
        return False
    facts = [(each.digest, each.code, each.passes) for each in (before, after)]
    return facts[0] != facts[1] or not before.code


def variant_for(built: BuiltPiece, tokens: int) -> BuiltPiece:
    """The variant of a built piece that a call with this token count runs."""
    for variant in built.variants:
        if variant.low <= tokens and (variant.high is None or tokens <= variant.high):
            return variant.built
    return built


def operands(piece: Piece, tokens: int) -> list[Any]:
    """Example inputs of a piece at a token count: random floats, zeros for other dtypes."""
    placeholders = [node for node in piece.module.graph.nodes if node.op == "placeholder"][: len(piece.inputs)]
    return [_operand(value(node), tokens) for node in placeholders]


def _operand(fake: Any, tokens: int) -> Any:
    if not isinstance(fake, Tensor):
        return _size(fake, tokens)
    shape, stride = ([_size(each, tokens) for each in sizes] for sizes in (fake.shape, fake.stride()))
    tensor = torch.empty_strided(shape, stride, dtype=fake.dtype, device=fake.device)
    return tensor.normal_() if fake.dtype.is_floating_point else tensor.zero_()


def _size(size: Any, tokens: int) -> int:
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, tokens)))


def _call(call: Boxed, inputs: list[Any], layers: list[tuple[Tensor, ...]]) -> Call:
    return lambda i: call([*inputs, *layers[i % len(layers)]])
