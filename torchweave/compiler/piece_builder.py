"""From pieces to code: each distinct piece is lowered where a pass of the ATen stage wants that, rewritten, built, and kept.

Most pieces are built once, for every token count. A piece is built again for a range of token counts where a pass pays only
there, and for every size of `compile_sizes` with that size fixed; the call then chooses by its token count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from torchweave.compiler.cache.entries import PieceEntry
from torchweave.compiler.cache.inductor_cache_dir import InductorCacheDir
from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.codegen.lower import LoweringError, cached_lowering, lower
from torchweave.compiler.codegen.pieces import BuiltPiece, InductorUnsupportedError, Variant, build_fx, build_inductor
from torchweave.compiler.dump import graph_text
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.mutation import has_mutations, mutated_aliased_inputs
from torchweave.compiler.ir.size_ranges import max_size, num_guards
from torchweave.compiler.ir.symbols import dynamic_shapes_mode, token_count
from torchweave.compiler.partition.split import Piece, structure
from torchweave.compiler.passes.aten.reinplace import Reinplace
from torchweave.compiler.passes.base import Pass
from torchweave.compiler.passes.cache_keys import aten_cache_keys
from torchweave.compiler.passes.manager import PassManager
from torchweave.compiler.precompile.precompile import KernelPrecompiler
from torchweave.compiler.streams.backends import make_streams
from torchweave.compiler.streams.build import StreamBuilder
from torchweave.compiler.tuning.table import COMPILE_SIZES, STREAMS, Table, device_kind
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

Facts = list[dict[str, Any]]
TokenSpan = tuple[int, int | None]


@dataclass(frozen=True)
class RewrittenPiece:
    """A piece after the ATen stage.

    Attributes:
        facts: of each pass's event.
        ranges: of the token count in which the piece becomes different things, all of them; empty when it was not divided.
    """

    piece: Piece
    facts: Facts = field(default_factory=list)
    ranges: tuple[TokenSpan, ...] = ()

    def at(self, low: int, high: int | None) -> RewrittenPiece:
        """The same, its facts marked with the token counts that it is for."""
        return replace(self, facts=[{**each, "tokens": [low, high]} for each in self.facts])


def build_pieces(
    graph: CapturedGraph,
    pieces: Sequence[Piece],
    manager: PassManager,
    cache: CompileCache | None,
    device: torch.device,
    report: Report,
) -> dict[str, BuiltPiece]:
    """Each distinct piece, built once."""
    distinct: dict[str, list[Piece]] = {}
    for piece in pieces:
        distinct.setdefault(piece.digest, []).append(piece)
    built: dict[str, BuiltPiece] = {}
    builder = PieceBuilder(graph, manager, cache, device, report)
    code = InductorCacheDir(cache, device)
    with code, builder.kernel_precompiler, report.progress("building pieces", len(distinct)) as advance:
        # Those of most layers first: the first and the last piece have most of the kernels that Inductor writes, and the processes
        # that build these need some seconds to be ready.
        for digest, same in sorted(distinct.items(), key=lambda item: -len(item[1])):
            built[digest] = code.run(functools.partial(builder.build, same[0]))
            advance(1, digest)
    for digest, same in distinct.items():
        _report_piece(same, built[digest], report)
    return built


class PieceBuilder:
    """Builds one piece after the other.

    Args:
        graph: what the pieces were cut from; knows which symbol is the token count.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        manager: PassManager,
        cache: CompileCache | None,
        device: torch.device,
        report: Report,
    ) -> None:
        self.manager, self.cache, self.device, self.report = manager, cache, device, report
        self.config: TorchCompileConfig = manager.config
        # A pass for other devices would only cost the lowering.
        self.passes = tuple(
            each for each in manager.passes("aten") if device.type in getattr(each, "devices", (device.type,))
        )
        self.graph, self.known_guards = graph, 0
        self.tokens = token_count(graph.symbols)
        self.table = manager.table or Table(device_kind(device))
        self.kernel_precompiler = KernelPrecompiler(device)
        self.streams = _stream_builder(self.config, device, report, self.table)

    def build(self, piece: Piece) -> BuiltPiece:
        """The piece for every token count, and its variants."""
        self.known_guards = num_guards(self.graph)
        *narrow, whole = self._build_ranges(piece)
        built = replace(whole.built, variants=tuple(narrow))
        if self.config.enable_inductor and self.tokens is not None:
            sizes = [size for size in sorted(set(self.config.compile_sizes)) if self._is_worthwhile(piece, size)]
            fixed = [self._build_for_size(piece, size) for size in sizes]
            built = replace(built, variants=(*(each for each in fixed if each is not None), *built.variants))
        return replace(built, max_size=min([built.max_size, *(each.built.max_size for each in built.variants)]))

    def _build_ranges(self, piece: Piece) -> list[Variant]:
        """The piece by ranges of the token count, lowest first, the last one open; one when no pass divides them."""
        ranges, factors = token_ranges(self.passes), aten_cache_keys(self.passes)
        if len(ranges) == 1 or self.tokens is None:
            return [
                Variant(
                    1,
                    None,
                    self._load_or_build(
                        piece, lambda: self._rewrite(piece, self.passes, lambda: lower(piece)), factors
                    ),
                )
            ]
        found = functools.cache(lambda: self._rewrite_ranges(piece, ranges))  # not at a start that only loads
        whole = self._load_or_build(piece, lambda: found()[-1], factors)
        narrow = [
            Variant(
                low, high, self._load_or_build(piece, lambda at=at: found()[at], {**factors, "tokens": [low, high]})
            )
            for at, (low, high) in enumerate(whole.ranges[:-1])
        ]
        return [*narrow, Variant(whole.ranges[-1][0], None, whole)]

    def _rewrite_ranges(self, piece: Piece, ranges: Sequence[TokenSpan]) -> list[RewrittenPiece]:
        """What the piece becomes in each range; ranges in which it becomes the same are one."""
        spans: list[TokenSpan] = []
        found: list[RewrittenPiece] = []
        lowered = functools.cache(lambda: cached_lowering(piece))
        for low, high in ranges:
            rewritten = self._rewrite(piece, passes_for_range(self.passes, low, high), lambda: lowered()())
            if found and _same(found[-1].piece, rewritten.piece):
                spans[-1] = (spans[-1][0], high)
            else:
                spans.append((low, high))
                found.append(rewritten)
        if len(found) > 1:
            found = [each.at(*span) for each, span in zip(found, spans, strict=True)]
        return [replace(each, ranges=tuple(spans)) for each in found]

    def _is_worthwhile(self, piece: Piece, size: int) -> bool:
        """Whether building for this size is worth it, as far as it was measured."""
        entry = next(
            (each for each in self.table.matching_entries(COMPILE_SIZES, piece.digest) if each.tokens == size), None
        )
        if entry is None or entry.choice:
            return True
        why = f"{entry.baseline:.1f} us as it is; building it for {size} tokens did not win by more than the noise"
        self.report.event("fallback", what=f"piece {piece.digest[:12]} for {size} tokens", why=why)
        return False

    def _build_for_size(self, piece: Piece, size: int) -> Variant | None:
        """The piece for one token count, which Inductor may tune for; None, and an event, when the size cannot be fixed."""
        assert self.tokens is not None
        passes, sizes = passes_for_range(self.passes, size, size), {self.tokens: size}
        factors = {**aten_cache_keys(passes), "token_count": size, "tuned_by_inductor": True}
        try:
            fixed = lambda: self._rewrite(piece, passes, lambda: lower(piece, sizes), sizes).at(size, size)  # noqa: E731
            made = self._load_or_build(piece, fixed, factors, tune=True)
        except LoweringError:
            return None
        return Variant(size, size, made)

    def _load_or_build(
        self, piece: Piece, rewritten: Callable[[], RewrittenPiece], factors: Mapping[str, Any], tune: bool = False
    ) -> BuiltPiece:
        """What a piece is rewritten to, built; from the cache without rewriting it again, unless it may be spread over streams."""
        if self.streams is not None:
            return self._build_on_streams(rewritten(), tune)
        if not self._uses_cache():
            return self._build_rewritten(rewritten(), tune)
        assert self.cache is not None
        make = lambda: self._build_rewritten(rewritten(), tune)  # noqa: E731
        return PieceEntry(self.cache, piece, self.config, self.device, make, factors).load_or_build()

    def _build_on_streams(self, rewritten: RewrittenPiece, tune: bool) -> BuiltPiece:
        """A piece over several streams, where it gains by it; each part from the cache by what it is."""
        assert self.streams is not None

        def part(piece: Piece) -> BuiltPiece:
            if not self._uses_cache():
                return self._build_rewritten(RewrittenPiece(piece), tune)
            assert self.cache is not None
            factors = {"tuned_by_inductor": True} if tune else {}
            make = lambda: self._build_rewritten(RewrittenPiece(piece), tune)  # noqa: E731
            return PieceEntry(self.cache, piece, self.config, self.device, make, factors).load_or_build()

        built = self.streams.build(rewritten.piece, part)
        return replace(built, passes=tuple(rewritten.facts), ranges=rewritten.ranges)

    def _uses_cache(self) -> bool:
        return self.cache is not None and self.config.enable_inductor

    def _rewrite(
        self,
        piece: Piece,
        passes: Sequence[Pass],
        lowered: Callable[[], Piece],
        sizes: Mapping[str, int] | None = None,
    ) -> RewrittenPiece:
        """The ATen stage: the piece lowered and rewritten, or as it is where no pass matches or it cannot be lowered.

        Args:
            lowered: the piece lowered, a graph of its own at each call.
            sizes: that it is lowered for.

        Raises:
            LoweringError: sizes are to be fixed, and the piece cannot be lowered.
            SizeError: to take a write apart made a number of a size.
        """
        # A piece that nothing rewrites runs as it was traced, and writes in place as it is.
        last = [each for each in passes if isinstance(each, Reinplace)]
        passes = [each for each in passes if each not in last]
        if not passes and not sizes and not (self.config.enable_inductor and has_mutations(piece.graph)):
            return RewrittenPiece(piece)
        # Without passes, too, where Inductor would take writes apart: what its own cache has of such a piece does not tell whether
        # that made a number of a size, and lowering does.
        with dynamic_shapes_mode(self.config.dynamic_shapes):
            try:
                rewritten = lowered()
            except LoweringError as error:
                self.report.event("lowering", piece=piece.digest, lowered=False, why=str(error))
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

    def _build_rewritten(self, rewritten: RewrittenPiece, tune: bool = False) -> BuiltPiece:
        piece = rewritten.piece
        self.kernel_precompiler.submit_piece(piece)
        built = (self._by_inductor(piece, tune) if self.config.enable_inductor else None) or build_fx(piece)
        # Asked before anything is kept: who loads the piece learns nothing of what was found while it was built.
        limit = max_size(self.graph, self.known_guards)
        return replace(built, passes=tuple(rewritten.facts), ranges=rewritten.ranges, max_size=limit)

    def _by_inductor(self, piece: Piece, tune: bool) -> BuiltPiece | None:
        """The piece by Inductor; None, and an event, where it cannot."""
        shared = next(iter(mutated_aliased_inputs(piece.graph).values()), None)
        try:
            if shared is None:
                return build_inductor(piece, self.config, tune)
            # AOTAutograd joins such inputs to one, whose shape it takes from how they are views while it compiles; when the code
            # runs they are views in another way, and it reads sizes that are not those.
            why = f"it writes to {shared.name}, which shares its memory with another input"
        except InductorUnsupportedError as error:
            why = str(error)
        self.report.event("fallback", what=f"piece {piece.digest} by Inductor", why=why)
        return None


def _stream_builder(
    config: TorchCompileConfig, device: torch.device, report: Report, table: Table
) -> StreamBuilder | None:
    if config.max_num_streams < 2:
        return None
    streams = make_streams(config.max_num_streams, device)
    built_by = "inductor" if config.enable_inductor else "fx"
    return StreamBuilder(
        streams,
        config.max_num_streams,
        report,
        built_by,
        measured_saving=lambda piece: table.measured_saving_us(STREAMS, piece.digest),
    )


def token_ranges(passes: Sequence[Pass]) -> list[TokenSpan]:
    """Ranges of the token count, lowest first, in each of which the same passes pay."""
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


def _report_piece(same: Sequence[Piece], built: BuiltPiece, report: Report) -> None:
    """Events of a distinct piece: what the passes did to each of its variants, and how it was built."""
    piece = same[0]
    for each in (built, *(variant.built for variant in built.variants)):
        for facts in each.passes:
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
