"""Autotune a module on its device: kernel configurations of small linears, gated passes, stream splits, fixed-size builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from torchweave.compiler.passes.manager import default_passes
from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.tuning import linears, pieces
from torchweave.compiler.tuning.measure import Clock
from torchweave.compiler.tuning.table import COMPILE_SIZES, STREAMS, Table
from torchweave.compiler.tuning.tuner import TuningTask, tune
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
    clock: Clock,
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
        tasks = pieces.tuning_tasks(subject, compiled_graph, module.compile_graph(other), counts)
        yield from (each for each in tasks if not known.matching_entries(each.subject, each.shape))
