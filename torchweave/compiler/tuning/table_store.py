"""Load and store tuning tables: entries of this machine's compile cache take precedence over the package's tables."""

from __future__ import annotations

from dataclasses import asdict

import torch

from torchweave.compiler.cache.store import CompileCache, key_of
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.tuning.table import FORMAT, DamagedTable, Table, device_kind, merge_tables, shipped_table
from torchweave.report import Report


def load_tables(device: torch.device, cache: CompileCache | None, report: Report) -> Table:
    """The merged table of a device: entries tuned on this machine, then entries of the package."""
    kind = device_kind(device)
    tuned_here = Table(kind) if cache is None else load(cache, kind)
    try:
        default = shipped_table(kind)
    except DamagedTable as error:
        why = f"ignored the package's table for {kind}: {error}"
        report.event("warning", what="choice table", why=why)
        default = Table(kind)
    return merge_tables((tuned_here, default), kind)


def report_table(table: Table, graph: CapturedGraph, report: Report) -> None:
    """Write an event `table`: the number of entries, and those for weight shapes of this graph."""
    weights = (binding.tensor for _, binding in graph.constants())
    shapes = {f"{each.shape[0]}x{each.shape[1]}" for each in weights if each.ndim == 2}
    entries = [asdict(entry) for entry in table if entry.shape.partition("/")[0] in shapes]
    report.event("table", device=table.device, answers=len(table.entries), entries=entries)


def load(cache: CompileCache, kind: str) -> Table:
    """The cached table of a kind of device; empty if absent, or, with a warning, if damaged."""
    if not (cache.folder / "table").is_dir():  # avoids a cache-miss event where no device was ever tuned
        return Table(kind)
    entry = cache.load("table", _factors(kind))
    if entry is None:
        return Table(kind)
    try:
        table = Table.read(entry.payload)
        if table.device != kind:
            raise DamagedTable(f"it is for {table.device}, not {kind}")
    except DamagedTable as error:
        cache.reject("table", entry.key, str(error))
        return Table(kind)
    cache.hit(entry)
    return table


def store(cache: CompileCache, table: Table) -> str:
    """Store a table merged over the cached one; returns the cache key."""
    whole = table.merged_over(load(cache, table.device))
    factors = _factors(table.device)
    cache.store("table", factors, whole.write().encode(), {"answers": len(whole.entries)})
    return key_of("table", factors)


def _factors(kind: str) -> dict[str, str | int]:
    return {"device": kind, "table": FORMAT}
