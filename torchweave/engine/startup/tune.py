"""`torchweave tune`: measure a model's candidates on this machine and store the results in the compile cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from torchweave.compiler.cache.store import open_cache
from torchweave.compiler.tuning.table import Table
from torchweave.config.options import EngineConfig
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.engine.startup.build import load_model, resolve_plan
from torchweave.engine.startup.compile_model import effective_compile_config, tune_model
from torchweave.report import Report


def tune(config: EngineConfig, report: Report, *, remeasure: bool = False) -> Table:
    """Time the candidates of a model on this GPU, store the results in the compile cache, and return the new ones.

    Args:
        remeasure: also time candidates with stored results.

    Raises:
        ValueError: the model or an option is not supported, there is no GPU, or the compile cache cannot be written.
    """
    config = replace(config, torch_compile_config=replace(config.torch_compile_config, tune=True))
    plan = resolve_plan(config)
    if not plan.tune:
        why = next(entry.why for entry in plan.entries if entry.name == "torch_compile_config.tune")
        raise ValueError(f"nothing can be tuned here: {why}")
    loaded, plan = load_model(config, report, None, ProcessGroups.single_rank())
    compile_config = effective_compile_config(plan)
    cache = open_cache(compile_config, report)
    if cache is None:
        raise ValueError("results cannot be stored: the compile cache's folder cannot be created; name another one")
    return tune_model(loaded.module, compile_config, torch.device(plan.device), cache, report, remeasure=remeasure)
