"""Measure, on this machine, what runs a model best, and keep it where the next start finds it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.runtime.compiled_graph import Woven
from torchweave.compiler.runtime.forward import call_as_is
from torchweave.compiler.tuning import table_store
from torchweave.compiler.tuning.measure import Clock, GraphClock
from torchweave.compiler.tuning.table import Table, device_kind
from torchweave.compiler.tuning.tune import Module, tune_module
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report


def tune_model(
    weave: Callable[[TorchCompileConfig], Woven],
    config: TorchCompileConfig,
    device: torch.device,
    cache: CompileCache,
    report: Report,
    *,
    again: bool = False,
    clock: Clock | None = None,
) -> Table:
    """Ask what was not measured yet (`again`: everything), keep it in the cache, and return the new answers.

    Args:
        weave: compiles the model by a config.
    """
    known = Table(device_kind(device)) if again else table_store.table_for(device, cache, report)

    def step(woven: Woven, tokens: int) -> object:
        ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        return woven(call_as_is, ids, torch.arange(tokens, device=device), ids[:1])

    found = tune_module(Module(weave, step, device), config, clock or GraphClock(), known, report)
    if found.entries:
        table_store.store(cache, found)
    return found
