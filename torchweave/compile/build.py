"""From pieces to code: each distinct piece is lowered where a pass of the ATen stage wants that, rewritten, built, and kept.

Most pieces are built once, for every token count. A piece is built again for a range of token counts where a pass pays only
there, and for every size of `compile_sizes` with that size fixed; the call then chooses by its token count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from torchweave.compile.cache import CompileCache
from torchweave.compile.dump import graph_text
from torchweave.compile.graph import CapturedGraph
from torchweave.compile.lower import NotLowered, lower
from torchweave.compile.passes.aten.reinplace import Reinplace
from torchweave.compile.passes.base import Pass
from torchweave.compile.passes.identity import stage_factors
from torchweave.compile.passes.manager import PassManager
from torchweave.compile.persist import code_folder
from torchweave.compile.pieces import BuiltPiece, Variant, build_fx, build_inductor
from torchweave.compile.split import Piece, structure
from torchweave.compile.stored import StoredPiece
from torchweave.compile.streams.build import StreamBuilder
from torchweave.compile.streams.lanes import lanes_for
from torchweave.compile.symbols import shapes_mode, token_count
from torchweave.compile.tuning.table import COMPILE_SIZES, STREAMS, Table, device_kind
from torchweave.config import TorchCompileConfig
from torchweave.log import Report

Facts = list[dict[str, Any]]


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
    folder = cache.folder if cache is not None else None
    with code_folder(folder, device), report.progress("building pieces", len(distinct)) as advance:
        for digest, same in distinct.items():
            built[digest] = builder.build(same[0])
            _tell(same, built[digest], report)
            advance(1, digest)
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
        self.tokens = token_count(graph.symbols)
        self.table = manager.table or Table(device_kind(device))
        self.streams = _stream_builder(self.config, device, report, self.table)

    def build(self, piece: Piece) -> BuiltPiece:
        """The piece for every token count, and its variants."""
        *narrow, whole = self._ranges(piece)
        built = replace(whole.built, variants=tuple(narrow))
        if self.config.enable_inductor and self.tokens is not None:
            sizes = [size for size in sorted(set(self.config.compile_sizes)) if self._pays(piece, size)]
            fixed = [Variant(size, size, self._fixed(piece, size)) for size in sizes]
            built = replace(built, variants=(*fixed, *built.variants))
        return built

    def _ranges(self, piece: Piece) -> list[Variant]:
        """The piece by ranges of the token count, lowest first, the last one open; one when no pass divides them."""
        ranges = token_ranges(self.passes)
        if len(ranges) == 1 or self.tokens is None:
            return [Variant(1, None, self._build(piece, self.passes))]
        found: list[tuple[int, int | None, Piece, Facts]] = []
        for low, high in ranges:
            rewritten, facts = self._rewrite(piece, within(self.passes, low, high))
            if found and _same(found[-1][2], rewritten):
                found[-1] = (found[-1][0], high, *found[-1][2:])
            else:
                found.append((low, high, rewritten, facts))
        return [
            Variant(low, high, self._compile(rewritten, _at(facts, low, high) if len(found) > 1 else facts))
            for low, high, rewritten, facts in found
        ]

    def _build(self, piece: Piece, passes: Sequence[Pass]) -> BuiltPiece:
        """The piece, rewritten by passes; from the cache without lowering it again, unless it may be spread over streams."""
        if self.streams is not None:
            return self._compile(*self._rewrite(piece, passes))

        def rewritten() -> BuiltPiece:
            return self._make(*self._rewrite(piece, passes))

        if not self._kept():
            return rewritten()
        assert self.cache is not None
        return StoredPiece(
            self.cache, piece, self.config, self.device, rewritten, stage_factors(passes)
        ).load_or_build()

    def _pays(self, piece: Piece, size: int) -> bool:
        """Whether building for this size is worth it, as far as it was measured."""
        entry = next((each for each in self.table.answers(COMPILE_SIZES, piece.digest) if each.tokens == size), None)
        if entry is None or entry.choice:
            return True
        why = f"{entry.baseline:.1f} us as it is; building it for {size} tokens did not win by more than the noise"
        self.report.event("fallback", what=f"piece {piece.digest[:12]} for {size} tokens", why=why)
        return False

    def _fixed(self, piece: Piece, size: int) -> BuiltPiece:
        """The piece for one token count, which Inductor may tune for."""
        assert self.tokens is not None
        passes, symbol = within(self.passes, size, size), self.tokens

        def rewritten() -> BuiltPiece:
            fixed, facts = self._rewrite(piece, passes, {symbol: size})
            return self._make(fixed, _at(facts, size, size), tune=True)

        if self.streams is not None:
            fixed, facts = self._rewrite(piece, passes, {symbol: size})
            return self._compile(fixed, _at(facts, size, size), tune=True)
        if not self._kept():
            return rewritten()
        assert self.cache is not None
        factors = {**stage_factors(passes), "token_count": size, "tuned_by_inductor": True}
        return StoredPiece(self.cache, piece, self.config, self.device, rewritten, factors).load_or_build()

    def _compile(self, piece: Piece, facts: Facts, tune: bool = False) -> BuiltPiece:
        """A piece that was rewritten already, over several streams where there may be and it gains by it."""
        if self.streams is None:
            return self._whole(piece, facts, tune)
        built = self.streams.build(piece, lambda part: self._whole(part, [], tune))
        return replace(built, passes=tuple(facts))

    def _whole(self, piece: Piece, facts: Facts, tune: bool = False) -> BuiltPiece:
        """A piece that was rewritten already, from the cache by what it has become."""
        if not self._kept():
            return self._make(piece, facts, tune)
        assert self.cache is not None
        factors = {"tuned_by_inductor": True} if tune else {}
        make = lambda: self._make(piece, facts, tune)  # noqa: E731
        return StoredPiece(self.cache, piece, self.config, self.device, make, factors).load_or_build()

    def _kept(self) -> bool:
        return self.cache is not None and self.config.enable_inductor

    def _rewrite(
        self, piece: Piece, passes: Sequence[Pass], sizes: Mapping[str, int] | None = None
    ) -> tuple[Piece, Facts]:
        """The ATen stage: the piece lowered and rewritten, or as it is where no pass matches or it cannot be lowered."""
        # A piece that nothing rewrites runs as it was traced, and writes in place as it is.
        last = [each for each in passes if isinstance(each, Reinplace)]
        passes = [each for each in passes if each not in last]
        if not passes and not sizes:
            return piece, []
        with shapes_mode(self.config.dynamic_shapes):
            try:
                lowered = lower(piece, sizes)
            except NotLowered as error:
                self.report.event("lowering", piece=piece.digest, lowered=False, why=str(error))
                return piece, []
            facts = self.manager.rewrite(lowered, passes, self.report)
            if not sizes and not any(each["matches"] for each in facts):
                return piece, facts
            facts += self.manager.rewrite(lowered, last, self.report)
        name = "lowered" + "".join(f"-T{size}" for size in (sizes or {}).values())
        self.report.artifact(f"pieces/{piece.digest}/{name}.py", lambda: graph_text(lowered.module))
        return lowered, facts

    def _make(self, piece: Piece, facts: Facts, tune: bool = False) -> BuiltPiece:
        built = build_inductor(piece, self.config, tune) if self.config.enable_inductor else build_fx(piece)
        return replace(built, passes=tuple(facts))


def _stream_builder(
    config: TorchCompileConfig, device: torch.device, report: Report, table: Table
) -> StreamBuilder | None:
    if config.max_num_streams < 2:
        return None
    lanes = lanes_for(config.max_num_streams, device)
    built_by = "inductor" if config.enable_inductor else "fx"
    return StreamBuilder(
        lanes, config.max_num_streams, report, built_by, saved=lambda piece: table.saves(STREAMS, piece.digest)
    )


def token_ranges(passes: Sequence[Pass]) -> list[tuple[int, int | None]]:
    """Ranges of the token count, lowest first, in each of which the same passes pay."""
    starts = {1}
    for each in passes:
        low, high = each.token_range
        starts |= {low} if low is not None else set()
        starts |= {high + 1} if high is not None else set()
    ordered = sorted(starts)
    return [*((low, high - 1) for low, high in pairwise(ordered)), (ordered[-1], None)]


def within(passes: Sequence[Pass], low: int, high: int | None) -> tuple[Pass, ...]:
    """The passes that pay at every token count from `low` to `high`."""
    return tuple(
        each
        for each in passes
        if (each.token_range[0] or 1) <= low
        and (each.token_range[1] is None or (high is not None and high <= each.token_range[1]))
    )


def _same(one: Piece, other: Piece) -> bool:
    return structure(one.module, len(one.inputs)) == structure(other.module, len(other.inputs))


def _at(facts: Facts, low: int, high: int | None) -> Facts:
    return [{**each, "tokens": [low, high]} for each in facts]


def _tell(same: Sequence[Piece], built: BuiltPiece, report: Report) -> None:
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
