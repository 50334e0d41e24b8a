"""Compile a loaded model as its plan says, or prepare it to run eagerly if it cannot be captured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from torchweave.compiler.autotune import Module, tune_module
from torchweave.compiler.backend import compile_graph
from torchweave.compiler.cache.store import CompileCache, open_cache
from torchweave.compiler.codegen.inductor import stop_inductor_workers
from torchweave.compiler.errors import TraceError
from torchweave.compiler.passes.torch_ir.low_rank import LowRankAdapters
from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.runtime.forward import Forward, call_op, eager_forward
from torchweave.compiler.tuning.measure import GraphClock
from torchweave.compiler.tuning.table import Table, device_kind, load_tables, store_tuned
from torchweave.config import Plan
from torchweave.config.options import TorchCompileConfig
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.engine.runner.pipeline_stage import StageForward
from torchweave.models.decoder import DecoderStep
from torchweave.models.parallel import PipelineStage
from torchweave.ops.low_rank import AdapterSlots
from torchweave.ops.registry import boundary_ops
from torchweave.report import Report

_POLL_SECONDS = 0.01  # between checks for a cache entry that another rank writes


def effective_compile_config(plan: Plan) -> TorchCompileConfig:
    """The plan's compile config with the options in effect instead of those configured."""
    return replace(
        plan.config.torch_compile_config,
        enable_inductor=plan.inductor,
        compile_sizes=plan.compile_sizes,
        max_num_streams=plan.max_num_streams,
        enable_userbuffers=plan.userbuffers,
        tune=False,  # the results are in the table by now
    )


def compile_model(
    module: DecoderStep,
    config: TorchCompileConfig,
    device: torch.device,
    cache: CompileCache | None,
    report: Report,
    lock_cache: Callable[[], AbstractContextManager[None]] = nullcontext,
    adapter_slots: AdapterSlots | None = None,
) -> CompiledGraph:
    """Compile a decoder's forward over flattened tokens, split at boundary ops.

    Args:
        lock_cache: as in `compile_graph`.
        adapter_slots: receives a place for each linear that low-rank adapters may change; None: without adapters.

    Raises:
        TraceError: the forward cannot be captured.
    """
    example = {
        "input_ids": torch.zeros(23, dtype=torch.int64, device=device),
        "positions": torch.arange(23, device=device),
        "logits_index": torch.tensor([4, 9, 22], device=device),
    }
    dynamic = {"input_ids": {0: "T"}, "positions": {0: "T"}, "logits_index": {0: "N"}}
    if module.rope_axes:
        example["rope_offsets"] = torch.zeros(module.rope_axes, 23, dtype=torch.int64, device=device)
        dynamic["rope_offsets"] = {1: "T"}
    if module.input_hidden_size:
        example["hidden"] = torch.zeros(
            23, module.input_hidden_size, dtype=next(module.parameters()).dtype, device=device
        )
        dynamic["hidden"] = {0: "T"}
    first = () if adapter_slots is None else (LowRankAdapters(adapter_slots),)
    return compile_graph(
        module, example, dynamic, boundary_ops=boundary_ops(), config=config, cache=cache, report=report,
        first_passes=first, lock_cache=lock_cache,
    )  # fmt: skip


def tune_model(
    module: DecoderStep,
    config: TorchCompileConfig,
    device: torch.device,
    cache: CompileCache,
    report: Report,
    *,
    remeasure: bool = False,
) -> Table:
    """Time the candidates without stored results (`remeasure`: all), store the results in the cache, and return them."""
    known = Table(device_kind(device)) if remeasure else load_tables(device, cache, report)

    def compile_candidate(candidate: TorchCompileConfig) -> CompiledGraph:
        return compile_model(module, candidate, device, cache, Report(show=False))

    def step(compiled_graph: CompiledGraph, tokens: int) -> object:
        ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        rope_offsets = [ids.expand(module.rope_axes, -1).contiguous()] if module.rope_axes else []
        return compiled_graph(call_op, ids, torch.arange(tokens, device=device), ids[:1], *rope_offsets)

    target, measured = Module(compile_candidate, step, device), Table(device_kind(device))
    # Streams last: splits are planned with the stored costs of linears.
    for candidate in (replace(config, max_num_streams=1), config)[config.max_num_streams < 2 :]:
        found = tune_module(target, candidate, GraphClock(), measured.merged_over(known), report)
        if found.entries:
            store_tuned(cache, found)
        measured = found.merged_over(measured)
    return measured


class CacheLock:
    """Lets one rank of a stage write the compile cache and the others load each entry as soon as it exists.

    Args:
        is_first: this rank writes.
        barrier: waits for all ranks.
    """

    def __init__(self, is_first: bool, barrier: Callable[[], None]) -> None:
        self._is_first, self._barrier = is_first, barrier
        self._first_rank_done = threading.Event()
        self._first_rank_done.set()

    @contextmanager
    def lock_cache(self) -> Iterator[None]:
        """Context that every rank enters: the first writes entries, the others load them and stay until the first has left."""
        if self._is_first:
            try:
                yield
            finally:
                self._barrier()
            return
        self._first_rank_done.clear()
        with ThreadPoolExecutor(1, "torchweave-cache-lock") as pool:
            arrived = pool.submit(self._barrier)
            arrived.add_done_callback(lambda _: self._first_rank_done.set())
            try:
                yield
            finally:
                arrived.result()

    def wait(self, path: Path) -> None:
        """Wait until the entry at `path` exists or the first rank has left without it."""
        while not path.exists() and not self._first_rank_done.wait(_POLL_SECONDS):
            pass


def build_forward(
    module: DecoderStep,
    plan: Plan,
    report: Report,
    process_groups: ProcessGroups,
    stage: PipelineStage | None = None,
    adapter_slots: AdapterSlots | None = None,
) -> tuple[Forward, Plan]:
    """Compile the model; if it cannot be captured, return an eager forward that is recorded between boundary ops.

    The ranks of a stage have the same graph: with a compile cache the first of them captures it and builds its pieces, and the
    others load them (`CacheLock`); passes run on all ranks in parallel, as do the stages.

    Args:
        adapter_slots: see `compile_model`.

    Raises:
        ValueError: a model divided into stages, or with adapters, cannot be captured.
    """
    if not plan.fullgraph:
        return eager_forward(module, boundary_ops()), plan
    config, device = effective_compile_config(plan), torch.device(plan.device)
    cache_lock = CacheLock(process_groups.tensor_rank == 0, process_groups.barrier)
    cache = open_cache(config, report, cache_lock.wait)
    lock_cache = cache_lock.lock_cache if cache is not None and process_groups.size > 1 else nullcontext
    try:
        if plan.tune and cache is not None:
            with report.stage("tuning"):
                tune_model(module, config, device, cache, report)
        with report.stage("compilation"), stop_inductor_workers():
            compiled_graph = compile_model(module, config, device, cache, report, lock_cache, adapter_slots)
        return (compiled_graph if stage is None else StageForward(compiled_graph, stage, process_groups)), plan
    except TraceError as error:
        if stage is not None:
            raise ValueError(
                f"The model cannot be divided into stages: {error}; use pipeline_parallel_size=1"
            ) from error
        if adapter_slots is not None:
            raise ValueError(
                f"enable_lora=True needs a model that compiles, and this one does not: {error}; remove the option"
            ) from error
        report.event("fallback", what="the model runs without the compiler", why=str(error))
        plan = plan.with_effective(
            "torch_compile_config.enable_fullgraph", False, f"will not trace: {error}", fullgraph=False
        )
        return eager_forward(module, boundary_ops()), plan
