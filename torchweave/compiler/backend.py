"""The backend on one page: capture, passes, split, build, stitch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from torchweave.compiler.cache.entries import GraphEntry
from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.codegen.inductor import start_inductor_workers
from torchweave.compiler.ir.collectives import num_ranks
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.size_ranges import size_range
from torchweave.compiler.ir.symbols import DynamicDims
from torchweave.compiler.partition.pipeline_stages import extract_pipeline_stage
from torchweave.compiler.partition.split import Piece, report_parts, split
from torchweave.compiler.passes.base import Pass
from torchweave.compiler.passes.manager import PassManager
from torchweave.compiler.piece_builder import BuildOptions, build_pieces
from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.tuning.table_store import load_tables, report_table
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report
from torchweave.utils.gc import gc_paused


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
    lock_cache: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> CompiledGraph:
    """Compile a module's forward: one captured graph, cut at boundary ops, each distinct piece built once.

    Args:
        module: must not change afterwards; its parameters and buffers are bound here, and passes may move their storage.
        inputs: example tensors by forward's parameter names, in forward's order; values are not read.
        dynamic: names of the dimensions that vary: `{"input_ids": {0: "T"}}`. All else is fixed to the examples.
        boundary_ops: ops that are handed to the caller at each call, such as `torchweave::attention`.
        cache: keeps captured graphs and built pieces between processes; None builds everything anew.
        passes: what to run instead of the stack's own passes and those that the config adds.
        lock_cache: entered around each thing that the cache keeps: ranks that share one take turns, so that one makes
        what others load.

    Raises:
        TraceError: the forward cannot be captured, with the line and the cause.
        InvariantError: the graph breaks a rule of pieces and graphs.
    """
    dynamic, config, report = dynamic or {}, config or TorchCompileConfig(), report or Report(show=False)
    if report.select("ready"):
        report.event("compile_after_ready", what=type(module).__name__)
    device = next(iter(inputs.values())).device
    table = load_tables(device, cache, report)
    with gc_paused():
        with lock_cache():
            graph = _load_or_capture(module, inputs, dynamic, config, cache, report)
        extract_pipeline_stage(graph)
        manager = PassManager(passes, config, table, num_ranks(graph))
        graph.boundary_ops = frozenset(boundary_ops)
        manager.run(graph, report)
        report_table(table, graph, report)
        parts = split(graph)
    pieces = [part for part in parts if isinstance(part, Piece)]
    report_parts(parts, graph.symbols, report)
    with lock_cache():
        built = build_pieces(pieces, BuildOptions(graph, manager, cache, device, report))
    low, high = size_range(graph, config.dynamic_shapes, report)
    return CompiledGraph(graph, parts, built, (low, min([high, *(each.max_size for each in built.values())])), report)


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
    graph_entry = GraphEntry(cache, module, inputs, dynamic, config) if cache is not None else None
    graph = graph_entry.load() if graph_entry is not None else None
    source = "dynamo" if graph is None else "cache"
    if graph is None:
        device = next(iter(inputs.values())).device
        with start_inductor_workers(device) if config.enable_inductor else nullcontext():
            graph = capture(module, inputs, dynamic, config.dynamic_shapes, report)
        if graph_entry is not None:
            graph_entry.store(graph)
    report.event("capture", seconds=time.monotonic() - begin, operations=graph.num_calls(), source=source)
    return graph
