"""Tuning tables: measured choices for one kind of device.

    {"format": 1, "device": "nvidia-h100-80gb-hbm3", "measured": "...", "entries": [
        {"subject": "linear", "shape": "3072x2048/n", "tokens": 1, "choice": "row,4,1024,4,4,1,4096,0",
         "microseconds": 5.1, "baseline": 9.2, "noise": 0.05}, ...]}

An entry holds the fastest choice for `subject` (an op, or a pass by its name) on `shape` at `tokens` tokens. `choice` is empty if
no candidate beat the baseline by more than the noise; the entry then avoids a second measurement, and a pass without any winner
among its `steps/` entries is off. The package ships tables for
the GPUs that it was measured on (`tables/*.json`); results of the tuner on a user's machine are in the compile cache and take
precedence. Tables of another kind of device are ignored, damaged ones too, with a warning.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from importlib.resources import files
from typing import Any

import torch

from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.report import Report

FORMAT = 1

STREAMS, COMPILE_SIZES = "streams", "compile_sizes"
"""Subjects besides passes: a piece over several streams, and a piece built for one size. Their shape is the piece's digest."""

STEPS = "steps"
"""Shapes that begin so, such as `steps/llama-1b`: whole steps of a model with (`on`) and without a pass
(bench/compiler/passes.py)."""


class DamagedTable(ValueError):
    """A text is not a table of this format."""


@dataclass(frozen=True)
class Entry:
    """One measured choice.

    Attributes:
        subject: an op or a pass.
        shape: the measured shape, in the subject's format.
        tokens: measured token count.
        choice: the winner, in the subject's format; empty for the baseline.
        microseconds: duration of one call of the choice.
        baseline: duration of one call without the choice in microseconds, measured in the same run.
        noise: combined noise of the two in microseconds.
    """

    subject: str
    shape: str
    tokens: int
    choice: str
    microseconds: float
    baseline: float
    noise: float

    @property
    def saved(self) -> float:
        """Microseconds that the choice saves per call; 0 for the baseline."""
        return self.baseline - self.microseconds if self.choice else 0.0


@dataclass(frozen=True)
class Table:
    """Entries for one kind of device.

    Attributes:
        device: `device_kind` of the measured device.
        entries: at most one for each subject, shape and token count.
        measured: date or command of the measurement.
    """

    device: str
    entries: tuple[Entry, ...] = ()
    measured: str = ""

    @cached_property
    def _index(self) -> dict[tuple[str, str], tuple[Entry, ...]]:
        index: dict[tuple[str, str], tuple[Entry, ...]] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.tokens):
            index[entry.subject, entry.shape] = (*index.get((entry.subject, entry.shape), ()), entry)
        return index

    def matching_entries(self, subject: str, shape: str) -> tuple[Entry, ...]:
        """Entries of a subject on a shape, by increasing token count."""
        return self._index.get((subject, shape), ())

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    @cached_property
    def digest(self) -> str:
        """Hash of the entries; a cache-key factor of the pieces built with them."""
        return hashlib.sha256(repr(sorted(map(repr, self.entries))).encode()).hexdigest()[:16]

    def has_winner(self, subject: str, shape: str | None = None) -> bool:
        """Whether any entry of the subject (on `shape`, if given) has a winner other than the baseline."""
        return any(entry.subject == subject and shape in (None, entry.shape) and entry.choice for entry in self)

    def whole_steps(self, subject: str) -> tuple[Entry, ...]:
        """Comparisons of whole steps with and without a pass."""
        return tuple(entry for entry in self if entry.subject == subject and entry.shape.startswith(f"{STEPS}/"))

    def measured_saving_us(self, subject: str, shape: str) -> float | None:
        """Microseconds that the choices save, summed over all measured token counts; None without entries."""
        matching_entries = self.matching_entries(subject, shape)
        return sum(entry.saved for entry in matching_entries) if matching_entries else None

    def merged_over(self, other: Table) -> Table:
        """Merge two tables of one kind of device; this table's entries take precedence."""
        assert self.device == other.device, "tables of different kinds of device cannot be merged"
        own = {(entry.subject, entry.shape, entry.tokens) for entry in self}
        rest = (entry for entry in other if (entry.subject, entry.shape, entry.tokens) not in own)
        return Table(self.device, (*self.entries, *rest), self.measured or other.measured)

    def write(self) -> str:
        """The table as text for `read`."""
        rows = ",\n ".join(json.dumps(asdict(entry)) for entry in self.entries)
        head = {"format": FORMAT, "device": self.device, "measured": self.measured}
        return json.dumps(head)[:-1] + f', "entries": [\n {rows}\n]}}\n'

    @staticmethod
    def read(text: str | bytes) -> Table:
        """Parse the text of `write`.

        Raises:
            DamagedTable: the text is not a table of this format.
        """
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise DamagedTable(f"its format is {data['format']}, not {FORMAT}")
            entries = tuple(_entry(each) for each in data["entries"])
            table = Table(_text(data["device"]), entries, _text(data["measured"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise (
                error if isinstance(error, DamagedTable) else DamagedTable(f"it is not a tuning table: {error}")
            ) from error
        if len({(entry.subject, entry.shape, entry.tokens) for entry in entries}) < len(entries):
            raise DamagedTable("two entries have the same subject, shape and tokens")
        return table


def _entry(row: Mapping[str, Any]) -> Entry:
    names = [each.name for each in fields(Entry)]
    if set(row) != set(names):
        raise DamagedTable(f"an entry has the keys {', '.join(sorted(row))}, not {', '.join(sorted(names))}")
    entry = Entry(**row)
    for text in (entry.subject, entry.shape, entry.choice):
        _text(text)
    times = (entry.microseconds, entry.baseline, entry.noise)
    if type(entry.tokens) is not int or entry.tokens < 1 or not all(_is_time(time) for time in times):
        raise DamagedTable(f"an entry for {entry.subject} has tokens {entry.tokens!r} and times {times}")
    return entry


def _text(thing: Any) -> str:
    if not isinstance(thing, str):
        raise DamagedTable(f"{thing!r} is not a string")
    return thing


def _is_time(thing: Any) -> bool:
    return isinstance(thing, (int, float)) and math.isfinite(thing) and thing >= 0


def device_kind(device: torch.device) -> str:
    """Name of the device model that tables are keyed by, such as `nvidia-h100-80gb-hbm3`, or `cpu`."""
    if device.type != "cuda":
        return device.type
    return "-".join(torch.cuda.get_device_name(device).lower().split())


def shipped_table(kind: str) -> Table:
    """The package's table for a kind of device; empty if the package has none."""
    file = files("torchweave.compiler.tuning").joinpath("tables", f"{kind}.json")
    if not file.is_file():
        return Table(kind)
    table = Table.read(file.read_text())
    return table if table.device == kind else Table(kind)


def load_tables(device: torch.device, cache: CompileCache | None, report: Report) -> Table:
    """The merged table of a device: entries tuned on this machine, then entries of the package."""
    kind = device_kind(device)
    tuned_here = Table(kind) if cache is None else load_tuned(cache, kind)
    try:
        default = shipped_table(kind)
    except DamagedTable as error:
        report.event("warning", what="choice table", why=f"ignored the package's table for {kind}: {error}")
        default = Table(kind)
    return tuned_here.merged_over(default)


def report_table(table: Table, graph: CapturedGraph, report: Report) -> None:
    """Write an event `table`: the number of entries, and those for weight shapes of this graph."""
    weights = (binding.tensor for _, binding in graph.constants())
    shapes = {f"{each.shape[0]}x{each.shape[1]}" for each in weights if each.ndim == 2}
    entries = [asdict(entry) for entry in table if entry.shape.partition("/")[0] in shapes]
    report.event("table", device=table.device, answers=len(table.entries), entries=entries)


def load_tuned(cache: CompileCache, kind: str) -> Table:
    """The cached table of a kind of device; empty if absent, or, with a warning, if damaged."""
    if not (cache.folder / "table").is_dir():  # avoids a cache-miss event where no device was ever tuned
        return Table(kind)
    entry = cache.load("table", _cache_factors(kind))
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


def store_tuned(cache: CompileCache, table: Table) -> str:
    """Store a table merged over the cached one; returns the cache key."""
    whole = table.merged_over(load_tuned(cache, table.device))
    facts = {"answers": len(whole.entries)}
    return cache.store("table", _cache_factors(table.device), whole.write().encode(), facts)


def _cache_factors(kind: str) -> dict[str, str | int]:
    return {"device": kind, "table": FORMAT}
