"""Entries of the compile cache: the captured graph of a module, and each built piece."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchweave.compiler.cache.keys import MISSING, graph_factors, piece_factors, source_digests
from torchweave.compiler.cache.serialize import (
    NotSerializableError,
    deserialize_graph,
    deserialize_piece,
    serialize_graph,
    serialize_piece,
)
from torchweave.compiler.cache.store import CompileCache, key_of
from torchweave.compiler.codegen.pieces import BuiltPiece
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.symbols import DynamicDims
from torchweave.compiler.partition.split import Piece
from torchweave.config.options import TorchCompileConfig


class GraphEntry:
    """The entry of one module's captured graph.

    The traced files are known only after tracing: their hashes are stored with the graph and compared when it is loaded, so
    that an edited model file is a miss.
    """

    def __init__(
        self,
        cache: CompileCache,
        module: nn.Module,
        inputs: Mapping[str, Tensor],
        dynamic: DynamicDims,
        config: TorchCompileConfig,
    ) -> None:
        self.cache, self.module = cache, module
        self.device = next(iter(inputs.values())).device
        self.factors = graph_factors(module, inputs, dynamic, config)

    def load(self) -> CapturedGraph | None:
        entry = self.cache.load("graph", self.factors)
        if entry is None:
            return None
        traced = entry.facts["sources"]
        if changed := [name for name, digest in source_digests(traced).items() if digest != traced[name]]:
            self.cache.miss("graph", entry.key, f"the source of {', '.join(changed)} changed")
            return None
        try:
            graph = deserialize_graph(entry.payload, self.module, self.device)
        except Exception as error:  # unpickling may raise anything; a damaged entry must not stop a start
            self.cache.reject("graph", entry.key, f"cannot be loaded ({type(error).__name__}: {error})")
            return None
        self.cache.hit(entry)
        return graph

    def store(self, graph: CapturedGraph) -> None:
        sources = source_digests(graph.sources)
        try:
            if unreadable := [name for name, digest in sources.items() if digest == MISSING]:
                raise NotSerializableError(
                    f"the source of {unreadable[0]} was traced and cannot be read, so that a change of it would not be detected"
                )
            payload = serialize_graph(graph)
        except NotSerializableError as error:
            self.cache.miss("graph", key_of("graph", self.factors), f"not stored: {error}")
            return
        self.cache.store("graph", self.factors, payload, {"sources": sources})


class PieceEntry:
    """The entry of one distinct piece.

    The facts of passes that ran while the piece was built are stored with it, so that a warm start reports them too.

    Args:
        build: builds the piece.
        factors: key factors besides the piece and the config.
    """

    def __init__(
        self,
        cache: CompileCache,
        piece: Piece,
        config: TorchCompileConfig,
        device: torch.device,
        build: Callable[[], BuiltPiece],
        factors: Mapping[str, Any] | None = None,
    ) -> None:
        self.cache, self.piece, self.build = cache, piece, build
        self.write_readable = config.compile_cache_format == "unpacked"
        self.factors = {**piece_factors(piece, config, device), **(factors or {})}
        self.facts = {"device_index": device.index or 0}

    def load_or_build(self) -> BuiltPiece:
        """Load the piece, or build and store it."""
        return self._load() or self._build()

    def _load(self) -> BuiltPiece | None:
        begin = time.monotonic()
        entry = self.cache.load("piece", self.factors)
        if entry is None:
            return None
        try:
            built = deserialize_piece(
                entry.payload, self.piece, entry.facts["device_index"], self.facts["device_index"]
            )
        except Exception as error:  # Inductor may raise anything; a damaged entry must not stop a start
            self.cache.reject("piece", entry.key, f"cannot be loaded ({type(error).__name__}: {error})")
            return None
        self.cache.hit(entry)
        self._unpack(entry.key, built)
        passes, ranges = entry.facts.get("passes", ()), entry.facts.get("ranges", ())
        return replace(
            built,
            seconds=time.monotonic() - begin,
            passes=tuple(passes),
            ranges=tuple((low, high) for low, high in ranges),
            max_size=entry.facts["max_size"],
        )

    def _build(self) -> BuiltPiece:
        built = self.build()
        try:
            payload = serialize_piece(built)
        except NotSerializableError as error:
            self.cache.miss("piece", key_of("piece", self.factors), f"not stored: {error}")
            return built
        facts = {**self.facts, "passes": built.passes, "ranges": built.ranges, "max_size": built.max_size}
        key = self.cache.store("piece", self.factors, payload, facts)
        self._unpack(key, built)
        return built

    def _unpack(self, key: str, built: BuiltPiece) -> None:
        if self.write_readable:
            texts = {"fx.py": self.piece.module.code, "inductor.py": built.code}
            self.cache.unpack("piece", key, {**texts, "factors.json": json.dumps(self.factors, indent=1)})
