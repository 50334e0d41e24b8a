"""Everything that can be asked about a module on this device, asked: which configuration each of its products of few tokens takes,
whether passes that wait for a measurement pay, whether pieces are faster over several streams or built for one size."""

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
    """A module that is tuned.

    Attributes:
        compile_graph: compiles it by a config.
        step: runs what was woven once, on a number of tokens.
        device: where it is.
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
    """The answers that are not in `known`, an event `tuned` for each.

    Args:
        config: what the module will be built by: streams and fixed sizes are asked about when it has them.
        tokens: numbers of tokens to ask for.
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
        found = pieces.tuning_tasks(subject, compiled_graph, module.compile_graph(other), counts)
        yield from (each for each in found if not known.matching_entries(each.subject, each.shape))
