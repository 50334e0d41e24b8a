"""What measurements said: a frozen table of choices for one kind of device.

    {"format": 1, "device": "nvidia-h100-80gb-hbm3", "measured": "...", "entries": [
        {"subject": "linear", "shape": "3072x2048/n", "tokens": 1, "choice": "row,4,1024,4,4,1,4096,0",
         "microseconds": 5.1, "baseline": 9.2, "noise": 0.05}, ...]}

An entry is the answer to one question: what runs `subject` (an op, or a pass by its name) on `shape` at `tokens` tokens best.
`choice` is empty when nothing beat the baseline by more than the noise; that is worth keeping, too: it was asked. The package ships
tables for the GPUs that it was measured on (`tables/*.json`); what the tuner measures on a user's machine is kept in the compile
cache and goes before them. A table of another kind of device is not used, and a damaged one is as good as none, with one warning.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from importlib.resources import files
from typing import Any

import torch

FORMAT = 1

STREAMS, COMPILE_SIZES = "streams", "compile_sizes"
"""Subjects that are no pass: a piece over several streams, and a piece built for one size. Their shapes are pieces' digests."""


class DamagedTable(ValueError):
    """A text is no table of this format."""


@dataclass(frozen=True)
class Entry:
    """One answer.

    Attributes:
        subject: an op or a pass.
        shape: what it was asked about, in the subject's own words.
        tokens: number of tokens at which it was measured.
        choice: what won, in the subject's own words; empty for the baseline.
        microseconds: of the choice, one call.
        baseline: microseconds of what runs without the choice, measured in the same run.
        noise: microseconds by which the two may be off together.
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
        """Microseconds that the choice saves in one call; 0 when the baseline stays."""
        return self.baseline - self.microseconds if self.choice else 0.0


@dataclass(frozen=True)
class Table:
    """Answers for one kind of device, by subject, shape and tokens.

    Attributes:
        device: `device_kind` of the device that they were measured on.
        entries: at most one for each subject, shape and tokens.
        measured: when, or by which command.
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
        """What is known of a subject on a shape, by increasing tokens."""
        return self._index.get((subject, shape), ())

    def entry_for(self, subject: str, shape: str, tokens: int) -> Entry | None:
        """The answer for a number of tokens: that of the smallest number measured that is not below it."""
        return next((entry for entry in self.matching_entries(subject, shape) if entry.tokens >= tokens), None)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    @cached_property
    def digest(self) -> str:
        """Of the answers; a factor of what is built by them."""
        return hashlib.sha256(repr(sorted(map(repr, self.entries))).encode()).hexdigest()[:16]

    def has_winner(self, subject: str, shape: str | None = None) -> bool:
        """Whether a choice won anywhere, or for a shape."""
        return any(entry.subject == subject and shape in (None, entry.shape) and entry.choice for entry in self)

    def measured_saving_us(self, subject: str, shape: str) -> float | None:
        """Microseconds that a choice saves, over all token counts that were asked; None when nobody asked."""
        matching_entries = self.matching_entries(subject, shape)
        return sum(entry.saved for entry in matching_entries) if matching_entries else None

    def merged_over(self, other: Table) -> Table:
        """This table's answers, and the other's where this one has none. Both are of one kind of device."""
        assert self.device == other.device, "tables of two kinds of device are not mixed"
        own = {(entry.subject, entry.shape, entry.tokens) for entry in self}
        rest = (entry for entry in other if (entry.subject, entry.shape, entry.tokens) not in own)
        return Table(self.device, (*self.entries, *rest), self.measured or other.measured)

    def write(self) -> str:
        """The table as text, which `read` reads."""
        rows = ",\n ".join(json.dumps(asdict(entry)) for entry in self.entries)
        head = {"format": FORMAT, "device": self.device, "measured": self.measured}
        return json.dumps(head)[:-1] + f', "entries": [\n {rows}\n]}}\n'

    @staticmethod
    def read(text: str | bytes) -> Table:
        """What `write` wrote.

        Raises:
            DamagedTable: it did not write that.
        """
        try:
            found = json.loads(text)
            if found["format"] != FORMAT:
                raise DamagedTable(f"it has format {found['format']}, not {FORMAT}")
            entries = tuple(_entry(each) for each in found["entries"])
            table = Table(_text(found["device"]), entries, _text(found["measured"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise (
                error if isinstance(error, DamagedTable) else DamagedTable(f"it is no table of choices: {error}")
            ) from error
        if len({(entry.subject, entry.shape, entry.tokens) for entry in entries}) < len(entries):
            raise DamagedTable("it answers one question twice")
        return table


def _entry(found: Mapping[str, Any]) -> Entry:
    names = [each.name for each in fields(Entry)]
    if set(found) != set(names):
        raise DamagedTable(f"an entry has {', '.join(sorted(found))}")
    entry = Entry(**found)
    for text in (entry.subject, entry.shape, entry.choice):
        _text(text)
    times = (entry.microseconds, entry.baseline, entry.noise)
    if type(entry.tokens) is not int or entry.tokens < 1 or not all(_is_time(time) for time in times):
        raise DamagedTable(f"an entry for {entry.subject} has {entry.tokens!r} tokens and takes {times}")
    return entry


def _text(thing: Any) -> str:
    if not isinstance(thing, str):
        raise DamagedTable(f"{thing!r} is no text")
    return thing


def _is_time(thing: Any) -> bool:
    return isinstance(thing, (int, float)) and math.isfinite(thing) and thing >= 0


def device_kind(device: torch.device) -> str:
    """What tables are kept by: the name of the device's model, such as `nvidia-h100-80gb-hbm3`, or `cpu`."""
    if device.type != "cuda":
        return device.type
    return "-".join(torch.cuda.get_device_name(device).lower().split())


def shipped_table(kind: str) -> Table:
    """The table that comes with the package for a kind of device; an empty one when there is none."""
    found = files("torchweave.compiler.tuning").joinpath("tables", f"{kind}.json")
    if not found.is_file():
        return Table(kind)
    table = Table.read(found.read_text())
    return table if table.device == kind else Table(kind)


def merge_tables(tables: Iterable[Table], kind: str) -> Table:
    """One table of those that are for this kind of device; earlier ones go before later ones."""
    result = Table(kind)
    for table in tables:
        if table.device == kind:
            result = result.merged_over(table)
    return result
