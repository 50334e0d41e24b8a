"""Autotune a module on its device: kernel configurations of small linears, gated passes, stream splits, fixed-size builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchweave.compiler.codegen.pieces import Boxed, BuiltPiece
from torchweave.compiler.ir.symbols import size_at, value
from torchweave.compiler.partition.split import Piece
from torchweave.compiler.passes.manager import default_passes
from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.tuning import linears
from torchweave.compiler.tuning.measure import Call, GraphClock, TuningTask, copies_for, tune
from torchweave.compiler.tuning.table import COMPILE_SIZES, STREAMS, Table
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report


@dataclass(frozen=True)
class Module:
    """A module to tune.

    Attributes:
        compile_graph: compiles the module with a config.
        step: runs one step of the compiled graph on a number of tokens.
        device: device of the module.
    """

    compile_graph: Callable[[TorchCompileConfig], CompiledGraph]
    step: Callable[[CompiledGraph, int], object]
    device: torch.device


def tune_module(
    module: Module,
    config: TorchCompileConfig,
    clock: GraphClock,
    known: Table,
    report: Report,
    tokens: Sequence[int] = linears.TOKENS,
) -> Table:
    """Measure the entries that `known` lacks, with an event `tuned` for each.

    Args:
        config: config of the deployment; streams and fixed sizes are measured if it enables them.
        tokens: token counts to measure.
    """
    plain = replace(config, max_num_streams=1, compile_sizes=())
    compiled_graph = module.compile_graph(plain)
    token_counts: dict[tuple[linears.LinearShape, torch.dtype], list[int]] = {}
    for count in tokens:
        with linears.LinearRecorder() as recorder:
            module.step(compiled_graph, count)
        for shape, dtype in recorder.shapes:
            if not known.matching_entries(shape.subject, shape.key):
                token_counts.setdefault((shape, dtype), []).append(count)
    piece_tasks = list(_piece_tasks(module, compiled_graph, plain, config, known, tokens))
    linear_tasks = linears.tuning_tasks(token_counts, module.device)
    total = sum(map(len, token_counts.values())) + len(piece_tasks)
    return tune(chain(linear_tasks, piece_tasks), clock, known.device, report, total)


def _piece_tasks(
    module: Module,
    compiled_graph: CompiledGraph,
    plain: TorchCompileConfig,
    config: TorchCompileConfig,
    known: Table,
    tokens: Sequence[int],
) -> Iterator[TuningTask]:
    others = {
        each.name: (replace(plain, enabled_passes=(*plain.enabled_passes, each.name)), tokens)
        for each in default_passes()
        if each.gated and each.stage == "aten" and each.name not in (*plain.enabled_passes, *plain.disabled_passes)
    }
    if config.max_num_streams > 1:
        others[STREAMS] = (replace(plain, max_num_streams=config.max_num_streams), tokens)
    if config.compile_sizes:
        others[COMPILE_SIZES] = (replace(plain, compile_sizes=config.compile_sizes), config.compile_sizes)
    for subject, (other, counts) in others.items():
        tasks = tuning_tasks(subject, compiled_graph, module.compile_graph(other), counts)
        yield from (each for each in tasks if not known.matching_entries(each.subject, each.shape))


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
        return size_at(fake, tokens)
    shape, stride = ([size_at(each, tokens) for each in sizes] for sizes in (fake.shape, fake.stride()))
    tensor = torch.empty_strided(shape, stride, dtype=fake.dtype, device=fake.device)
    return tensor.normal_() if fake.dtype.is_floating_point else tensor.zero_()


def _call(call: Boxed, inputs: list[Any], layers: list[tuple[Tensor, ...]]) -> Call:
    return lambda i: call([*inputs, *layers[i % len(layers)]])
