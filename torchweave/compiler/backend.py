"""The compiler backend in six stages: capture, pipeline stage, passes, split, build, assemble."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from torchweave.compiler.cache.entries import GraphEntry
from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.capture.capture import capture, reject_written_constants
from torchweave.compiler.codegen.inductor import start_inductor_workers
from torchweave.compiler.codegen.pieces import restore_autocast
from torchweave.compiler.eager_semantics.registry import correct
from torchweave.compiler.ir.collectives import num_ranks
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.size_ranges import size_range
from torchweave.compiler.ir.symbols import DynamicDims
from torchweave.compiler.partition.pipeline_stages import extract_pipeline_stage
from torchweave.compiler.partition.result_views import separate_result_views
from torchweave.compiler.partition.split import Piece, parts_text, report_parts, select_splitting_ops, split
from torchweave.compiler.passes.base import Pass
from torchweave.compiler.passes.manager import PassManager
from torchweave.compiler.piece_builder import PieceBuilder, build_pieces
from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.tuning.table import load_tables, report_table
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report
from torchweave.utils.gc import gc_paused

_LOCK = threading.RLock()
"""Held while torch traces and builds, which sets modes of the whole process: threads compile one after another."""


def compile_graph(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    dynamic: DynamicDims | None = None,
    *,
    boundary_ops: Iterable[str] = (),
    config: TorchCompileConfig | None = None,
    cache: CompileCache | None = None,
    report: Report | None = None,
    passes: Sequence[Pass] | None = None,
    first_passes: Sequence[Pass] = (),
    lock_cache: Callable[[], AbstractContextManager[None]] = nullcontext,
    as_eager: bool = False,
) -> CompiledGraph:
    """Compile a module's forward: one captured graph, split at boundary ops, each distinct piece built once.

    Args:
        module: must not change afterwards; its parameters and buffers are bound here, and passes may move their storage.
        inputs: example tensors by forward's parameter names, in forward's order; values are not read.
        dynamic: names of the dimensions that vary: `{"input_ids": {0: "T"}}`. All others are fixed to the examples.
        boundary_ops: ops that the caller executes at each call, such as `torchweave::attention`.
        cache: stores captured graphs and built pieces between processes; None builds everything.
        passes: replaces the default passes and those that the config adds.
        first_passes: run before them.
        lock_cache: entered around each use of the cache, so that of ranks with one cache one builds and the others load.
        as_eager: exclude a size of 1 where eager code would drop the dimension, and return views with eager code's strides and
            shared memory, and correct Inductor where it computes otherwise than eager code (`eager_semantics`). An engine's forward
            needs none of these: its results have a dimension of tokens, and its pieces write to no input that they read.

    Raises:
        TraceError: the forward cannot be captured, with the line and the cause.
        InvariantError: the graph breaks a rule of pieces and graphs.
    """
    dynamic, config, report = dynamic or {}, config or TorchCompileConfig(), report or Report(show=False)
    if report.select("ready"):
        report.event("compile_after_ready", what=type(module).__name__)
    device = next(iter(inputs.values())).device
    table = load_tables(device, cache, report)
    with _LOCK, gc_paused(), restore_autocast():
        # 1. Capture: Dynamo traces forward into one graph of Torch IR, or the cache holds it.
        with lock_cache():
            graph = _load_or_capture(module, inputs, dynamic, config, cache, report)
        graph.boundary_ops = frozenset(boundary_ops)
        if as_eager:
            correct(graph)
        else:
            reject_written_constants(graph)
        # 2. Pipeline stage: cut the graph to the layers of this rank.
        extract_pipeline_stage(graph)
        # 3. Passes on Torch IR.
        manager = PassManager(passes, config, table, num_ranks(graph), first_passes)
        manager.run(graph, report)
        report_table(table, graph, report)
        if as_eager:
            separate_result_views(graph)
        # 4. Split at the boundary ops and splitting ops.
        graph.splitting_ops = select_splitting_ops(graph, config.splitting_ops)
        parts = split(graph)
    pieces = [part for part in parts if isinstance(part, Piece)]
    report_parts(parts, graph.symbols, report)
    # 5. Build each distinct piece: lowering, passes on ATen, Inductor or FX, or the cache.
    with _LOCK, lock_cache(), restore_autocast():
        built = build_pieces(pieces, PieceBuilder(graph, manager, cache, device, report, as_eager))
    # 6. Assemble: generate the forward that calls the pieces and boundary ops in order.
    sizes = size_range(graph, config.dynamic_shapes, report, as_eager)
    sizes = sizes._replace(high=min([sizes.high, *(each.max_size for each in built.values())]))
    compiled = CompiledGraph(graph, parts, built, sizes, report)
    report.artifact("computation_graph.py", lambda: parts_text(parts))
    report.artifact("transformed_code.py", compiled.code)
    return compiled


def _load_or_capture(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    dynamic: DynamicDims,
    config: TorchCompileConfig,
    cache: CompileCache | None,
    report: Report,
) -> CapturedGraph:
    """The module's graph, from the cache when an equal module was captured before."""
    begin = time.monotonic()
    entry = GraphEntry(cache, module, inputs, dynamic, config) if cache is not None else None
    graph = entry.load() if entry is not None else None
    source = "dynamo" if graph is None else "cache"
    if graph is None:
        device = next(iter(inputs.values())).device
        with start_inductor_workers(device) if config.enable_inductor else nullcontext():
            graph = capture(module, inputs, dynamic, config.dynamic_shapes, report)
        if entry is not None:
            entry.store(graph)
    report.event("capture", seconds=time.monotonic() - begin, operations=graph.num_calls(), source=source)
    return graph
