"""Measure, on this machine, what runs a model best, and keep it where the next start finds it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchweave.compiler.autotune import Module, tune_module
from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.runtime.forward import call_op
from torchweave.compiler.tuning import table_store
from torchweave.compiler.tuning.measure import Clock, GraphClock
from torchweave.compiler.tuning.table import Table, device_kind
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report


def tune_model(
    compile_graph: Callable[[TorchCompileConfig], CompiledGraph],
    config: TorchCompileConfig,
    device: torch.device,
    cache: CompileCache,
    report: Report,
    *,
    remeasure: bool = False,
    clock: Clock | None = None,
) -> Table:
    """Ask what was not measured yet (`remeasure`: everything), keep it in the cache, and return the new answers.

    Args:
        compile_graph: compiles the model by a config.
    """
    known = Table(device_kind(device)) if remeasure else table_store.load_tables(device, cache, report)

    def step(compiled_graph: CompiledGraph, tokens: int) -> object:
        ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        return compiled_graph(call_op, ids, torch.arange(tokens, device=device), ids[:1])

    measured = tune_module(Module(compile_graph, step, device), config, clock or GraphClock(), known, report)
    if measured.entries:
        table_store.store(cache, measured)
    return measured
