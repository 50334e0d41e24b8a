"""Build each distinct piece in stages: token-count variants, cache, ATen passes, streams, code.

variants      a build for each range of the token count in which other passes pay, and for each of `compile_sizes`
cache         load the build, or run the later stages and store their result
aten_passes   lower the piece to ATen ops and rewrite it
streams       split the piece over several CUDA streams where that saves time
code          Inductor code, or the Python code of the FX graph

`PieceBuilder.stages` holds the order. Each stage is a function of a job and of the rest of the list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from torchweave.compiler.cache.entries import PieceEntry
from torchweave.compiler.cache.inductor_folder import InductorCacheDir
from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.codegen.lower import LoweringError, cached_lowering, lower
from torchweave.compiler.codegen.pieces import BuiltPiece, InductorUnsupportedError, Variant, build_fx, build_inductor
from torchweave.compiler.dump import graph_text
from torchweave.compiler.eager_semantics.size_answers import dynamic_shapes_mode
from torchweave.compiler.errors import name_sizes
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.mutation import has_mutations, mutated_aliased_inputs
from torchweave.compiler.ir.size_ranges import max_size, num_guards
from torchweave.compiler.ir.symbols import token_count
from torchweave.compiler.partition.split import Piece, structure
from torchweave.compiler.passes import inductor_graph
from torchweave.compiler.passes.aten.reinplace import Reinplace
from torchweave.compiler.passes.base import Pass
from torchweave.compiler.passes.manager import PassManager, aten_cache_keys, name_sizes_in_facts
from torchweave.compiler.precompile.precompile import KernelPrecompiler
from torchweave.compiler.streams.backends import make_streams
from torchweave.compiler.streams.build import StreamBuilder
from torchweave.compiler.tuning.table import COMPILE_SIZES, Table, device_kind
from torchweave.report import Report

TokenSpan = tuple[int, int | None]
"""Smallest and largest token count; None for an open end."""


@dataclass(frozen=True)
class RewrittenPiece:
    """A piece after the ATen stage.

    Attributes:
        facts: fields of each pass's event.
        ranges: all ranges of the token count in which the passes give different graphs, lowest first.
    """

    piece: Piece
    facts: list[dict[str, Any]] = field(default_factory=list)
    ranges: tuple[TokenSpan, ...] = ()

    def with_tokens(self, low: int, high: int | None) -> RewrittenPiece:
        """A copy whose facts carry the range of token counts."""
        return replace(self, facts=[{**each, "tokens": [low, high]} for each in self.facts])


@dataclass(frozen=True)
class PieceJob:
    """A piece on its way through the stages.

    Attributes:
        num_guards: number of the graph's guards before this piece was built.
        rewrite: runs the ATen passes; called on a cache miss only.
        cache_factors: factors of the cache key besides the piece and the config.
        tune: let Inductor time candidate kernels, which pays where sizes are fixed.
    """

    piece: Piece
    num_guards: int
    rewrite: Callable[[], RewrittenPiece] | None = None
    cache_factors: Mapping[str, Any] = field(default_factory=dict)
    tune: bool = False


Build = Callable[[PieceJob], BuiltPiece]
Stage = Callable[[PieceJob, Build], BuiltPiece]


def build_pieces(pieces: Sequence[Piece], builder: PieceBuilder) -> dict[str, BuiltPiece]:
    """Build each distinct piece once; returns the builds by digest."""
    layers: dict[str, list[Piece]] = {}
    for piece in pieces:
        layers.setdefault(piece.digest, []).append(piece)
    built: dict[str, BuiltPiece] = {}
    report = builder.report
    inductor_dir = InductorCacheDir(builder.compile_cache if builder.device.type == "cpu" else None)
    with inductor_dir, builder.kernel_precompiler, report.progress("building pieces", len(layers)) as advance:
        # Pieces of most layers first: the graph's first and last piece need most of the Inductor kernels, and the worker
        # processes that compile these take some seconds to start.
        for digest, same in sorted(layers.items(), key=lambda item: -len(item[1])):
            built[digest] = inductor_dir.run(functools.partial(builder.build, same[0]))
            advance(1, digest)
    for digest, same in layers.items():
        _report_piece(same, built[digest], builder.graph, report)
    return built


class PieceBuilder:
    """Builds pieces one at a time through `stages`.

    Args:
        graph: the captured graph that the pieces were cut from.
        manager: passes of the ATen stage, the config and the tuning table.
        cache: None to build every piece anew.
        as_eager: see `build_inductor`.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        manager: PassManager,
        cache: CompileCache | None,
        device: torch.device,
        report: Report,
        as_eager: bool = False,
    ) -> None:
        self.as_eager = as_eager
        self.graph, self.manager, self.compile_cache, self.device, self.report = graph, manager, cache, device, report
        self.config = manager.config
        # A pass for other devices would cost a lowering and never match.
        self.passes = tuple(
            each for each in manager.passes("aten") if device.type in getattr(each, "devices", (device.type,))
        )
        self.inductor_passes = manager.passes("inductor")
        self.tokens = token_count(graph.symbols)
        self.table = manager.table or Table(device_kind(device))
        self.kernel_precompiler = KernelPrecompiler(device)
        self.stream_builder = None
        if (num_streams := self.config.max_num_streams) > 1:
            built_by = "inductor" if self.config.enable_inductor else "fx"
            streams = make_streams(num_streams, device)
            self.stream_builder = StreamBuilder(streams, num_streams, report, built_by, self.table)
        self.stages: tuple[Stage, ...] = (self.variants, self.cache, self.aten_passes, self.code)
        if self.stream_builder is not None:  # each part of a split piece has its own cache entry
            self.stages = (self.variants, self.aten_passes, self.streams, self.cache, self.code)

    def build(self, piece: Piece) -> BuiltPiece:
        """Build a piece for every token count, with its variants."""
        return self._run_stages(0, PieceJob(piece, num_guards(self.graph)))

    def _run_stages(self, first: int, job: PieceJob) -> BuiltPiece:
        return self.stages[first](job, functools.partial(self._run_stages, first + 1))

    def variants(self, job: PieceJob, build: Build) -> BuiltPiece:
        """Stage: the build for the highest token counts, and as its variants those for lower ranges and fixed sizes."""
        rewrites = functools.cache(functools.partial(self._rewrite_ranges, job.piece))  # not called when all is cached
        factors = aten_cache_keys(self.passes)

        def build_range(index: int, factors: Mapping[str, Any]) -> BuiltPiece:
            return build(replace(job, rewrite=lambda: rewrites()[index], cache_factors=factors))

        whole = build_range(-1, factors)
        variants = [
            Variant(low, high, build_range(index, {**factors, "tokens": [low, high]}))
            for index, (low, high) in enumerate(whole.ranges[:-1])
        ]
        if self.config.enable_inductor and self.tokens is not None:
            sizes = (
                size for size in sorted(set(self.config.compile_sizes)) if self._should_compile_size(job.piece, size)
            )
            fixed = [each for size in sizes if (each := self._build_for_size(job, size, build)) is not None]
            variants = fixed + variants
        limit = min([whole.max_size, *(each.built.max_size for each in variants)])
        return replace(whole, variants=tuple(variants), max_size=limit)

    def cache(self, job: PieceJob, build: Build) -> BuiltPiece:
        """Stage: the build from the compile cache, else built and stored. FX builds are not cached, nor are
        builds by passes over Inductor's graph that have no digest."""
        if self.compile_cache is None or not self.config.enable_inductor:
            return build(job)
        passes_over_graphs = inductor_graph.cache_keys(self.inductor_passes)
        if passes_over_graphs is None:
            return build(job)
        make = functools.partial(build, job)
        factors = {**job.cache_factors, **passes_over_graphs, **({"as_eager": True} if self.as_eager else {})}
        return PieceEntry(self.compile_cache, job.piece, self.config, self.device, make, factors).load_or_build()

    def aten_passes(self, job: PieceJob, build: Build) -> BuiltPiece:
        """Stage: run the ATen passes that the variant asks for."""
        assert job.rewrite is not None
        rewritten = job.rewrite()
        factors = {"tuned_by_inductor": True} if job.tune else {}  # the rewritten piece is in the key itself
        built = build(replace(job, piece=rewritten.piece, cache_factors=factors))
        return replace(built, passes=tuple(rewritten.facts), ranges=rewritten.ranges)

    def streams(self, job: PieceJob, build: Build) -> BuiltPiece:
        """Stage: build the piece as parts on several streams where that saves time."""
        assert self.stream_builder is not None
        return self.stream_builder.build(job.piece, lambda part: build(replace(job, piece=part)))

    def code(self, job: PieceJob, _: Build) -> BuiltPiece:
        """Stage: Inductor code, or the graph's Python code where Inductor is off or fails."""
        self.kernel_precompiler.submit_piece(job.piece)
        built = (self._by_inductor(job) if self.config.enable_inductor else None) or build_fx(job.piece)
        # Read here, before the cache stores the piece: a load from the cache creates no guards.
        return replace(built, max_size=max_size(self.graph, job.num_guards))

    def _rewrite_ranges(self, piece: Piece) -> list[RewrittenPiece]:
        """The rewritten piece of each range of the token count; adjacent ranges with equal graphs are merged."""
        ranges = token_ranges(self.passes) if self.tokens is not None else [(1, None)]
        spans: list[TokenSpan] = []
        rewritten_pieces: list[RewrittenPiece] = []
        lowered = functools.cache(lambda: cached_lowering(piece))
        for low, high in ranges:
            passes = self.passes if len(ranges) == 1 else passes_for_range(self.passes, low, high)
            rewritten = self._rewrite(piece, passes, lambda: lowered()())
            if rewritten_pieces and _same(rewritten_pieces[-1].piece, rewritten.piece):
                spans[-1] = (spans[-1][0], high)
            else:
                spans.append((low, high))
                rewritten_pieces.append(rewritten)
        if len(spans) > 1:
            rewritten_pieces = [each.with_tokens(*span) for each, span in zip(rewritten_pieces, spans, strict=True)]
        return [replace(each, ranges=tuple(spans)) for each in rewritten_pieces]

    def _should_compile_size(self, piece: Piece, size: int) -> bool:
        """Whether a build for this token count is faster by the tuning table, or was never measured."""
        entries = self.table.matching_entries(COMPILE_SIZES, piece.digest)
        entry = next((each for each in entries if each.tokens == size), None)
        if entry is None or entry.choice:
            return True
        why = f"a build for {size} tokens was not measured to be faster than the general one ({entry.baseline:.1f} us)"
        self.report.event("fallback", what=f"piece {piece.digest[:12]} for {size} tokens", why=why)
        return False

    def _build_for_size(self, job: PieceJob, size: int, build: Build) -> Variant | None:
        """The piece for one token count, tuned by Inductor; None, and an event, where it cannot be lowered for it."""
        assert self.tokens is not None
        passes, sizes = passes_for_range(self.passes, size, size), {self.tokens: size}

        def rewrite() -> RewrittenPiece:
            lowered = functools.partial(lower, job.piece, sizes)
            return self._rewrite(job.piece, passes, lowered, sizes).with_tokens(size, size)

        factors = {**aten_cache_keys(passes), "token_count": size, "tuned_by_inductor": True}
        try:
            return Variant(size, size, build(replace(job, rewrite=rewrite, cache_factors=factors, tune=True)))
        except LoweringError:
            return None

    def _rewrite(
        self,
        piece: Piece,
        passes: Sequence[Pass],
        lowered: Callable[[], Piece],
        sizes: Mapping[str, int] | None = None,
    ) -> RewrittenPiece:
        """Lower a piece and run the passes; the captured piece where no pass matches or lowering fails.

        Args:
            lowered: returns the lowered piece, a new graph at each call.
            sizes: fixed values of symbols in `lowered`.

        Raises:
            LoweringError: lowering failed with fixed sizes.
            SizeError: functionalization fixed a dynamic size to a number.
        """
        last = [each for each in passes if isinstance(each, Reinplace)]  # pays after a rewrite only
        passes = [each for each in passes if each not in last]
        if not passes and not sizes and not (self.config.enable_inductor and has_mutations(piece.graph)):
            return RewrittenPiece(piece)
        # Inductor functionalizes mutations itself, which may fix a dynamic size. Its own cache does not record that; lowering
        # finds it, so a piece with mutations is lowered even without passes.
        with dynamic_shapes_mode(self.config.dynamic_shapes):
            try:
                rewritten = lowered()
            except LoweringError as error:
                why = name_sizes(str(error), self.graph.size_names)
                self.report.event("lowering", piece=piece.digest, lowered=False, why=why)
                if sizes:
                    raise
                return RewrittenPiece(piece)
            facts = self.manager.rewrite(rewritten, passes, self.report)
            if not sizes and not any(each["matches"] for each in facts):
                return RewrittenPiece(piece, facts)
            facts += self.manager.rewrite(rewritten, last, self.report)
        name = "lowered" + "".join(f"-T{size}" for size in (sizes or {}).values())
        self.report.artifact(f"pieces/{piece.digest}/{name}.py", lambda: graph_text(rewritten.module))
        return RewrittenPiece(rewritten, facts)

    def _by_inductor(self, job: PieceJob) -> BuiltPiece | None:
        """The piece as Inductor code; None, and an event, where Inductor cannot build it."""
        piece = job.piece
        shared = next(iter(mutated_aliased_inputs(piece.graph).values()), None)
        try:
            if shared is None:
                finish = functools.partial(inductor_graph.with_passes, passes=self.inductor_passes, report=self.report)
                return build_inductor(piece, self.config, job.tune, self.as_eager, finish)
            # AOTAutograd joins aliased inputs into one whose shape follows from the views at compile time. Other views at run
            # time would make the code read wrong sizes.
            why = f"it writes to {shared.name}, which shares its memory with another input"
        except InductorUnsupportedError as error:
            why = name_sizes(str(error), self.graph.size_names)
        self.report.event("fallback", what=f"piece {piece.digest} by Inductor", why=why)
        return None


def token_ranges(passes: Sequence[Pass]) -> list[TokenSpan]:
    """Ranges of the token count, lowest first, within each of which the same passes pay."""
    starts = {1}
    for each in passes:
        low, high = each.token_range
        starts |= {low} if low is not None else set()
        starts |= {high + 1} if high is not None else set()
    ordered = sorted(starts)
    return [*((low, high - 1) for low, high in pairwise(ordered)), (ordered[-1], None)]


def passes_for_range(passes: Sequence[Pass], low: int, high: int | None) -> tuple[Pass, ...]:
    """The passes that pay at every token count from `low` to `high`."""
    return tuple(
        each
        for each in passes
        if (each.token_range[0] or 1) <= low
        and (each.token_range[1] is None or (high is not None and high <= each.token_range[1]))
    )


def _same(one: Piece, other: Piece) -> bool:
    return structure(one.module, len(one.inputs)) == structure(other.module, len(other.inputs))


def _report_piece(same: Sequence[Piece], built: BuiltPiece, graph: CapturedGraph, report: Report) -> None:
    """Events of a distinct piece: what the passes did to each of its variants, and how it was built."""
    piece = same[0]
    for each in (built, *(variant.built for variant in built.variants)):
        for facts in each.passes:
            facts = name_sizes_in_facts(facts, graph)
            report.event("pass", **facts, piece=piece.digest, shared_by=len(same), cached=each.built == "cache")
    report.artifact(f"pieces/{piece.digest}/fx.py", lambda: graph_text(piece.module))
    if built.code:
        report.artifact(f"pieces/{piece.digest}/inductor.py", built.code)
    for variant in built.variants:
        name = f"{variant.low}-{'' if variant.high is None else variant.high}"
        if variant.built.code:
            report.artifact(f"pieces/{piece.digest}/inductor-T{name}.py", variant.built.code)
    report.event(
        "piece",
        hash=piece.digest,
        index=piece.index,
        operations=piece.num_calls(),
        shared_by=len(same),
        built=built.built,
        seconds=built.seconds + sum(variant.built.seconds for variant in built.variants),
        variants=[
            {"tokens": [variant.low, variant.high], "built": variant.built.built, "seconds": variant.built.seconds}
            for variant in built.variants
        ],
    )
