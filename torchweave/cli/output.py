"""Output of commands: files, validated before long work starts, and tables that wrap between words only."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from torchweave.config.options import expand_path

_GAP = 2  # blanks between columns


def terminal_width() -> int:
    """Columns of the terminal (or `COLUMNS`); 160 if standard output is not a terminal."""
    return shutil.get_terminal_size((160, 24)).columns


def print_advice(advice: Iterable[tuple[str, str]]) -> None:
    """Print what is said about options that were left out, on standard error."""
    for what, why in advice:
        print(f"torchweave: {what} {why}", file=sys.stderr)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = (), width: int = 0
) -> None:
    """Print rows of cells below a title and a header; print nothing if there are no rows.

    A table whose longest words do not fit side by side is printed as records: the first cell, then one line per further cell.

    Args:
        right: columns to align at the right.
        width: columns of the page; 0 takes the terminal's.
    """
    if rows:
        bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
        print(f"{bold}{title}{plain}\n" if title else "", end="")
        widths = _column_widths(list(zip(columns, *rows, strict=True)), width or terminal_width())
        lines = _records(columns, rows) if widths is None else _lines(columns, rows, right, widths)
        print("\n".join(lines), end="\n\n")


def _column_widths(columns: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Widths that give every column its longest word and share the rest; None if the longest words do not fit."""
    least = [max((len(word) for cell in cells for word in cell.split()), default=0) for cells in columns]
    missing = [max(map(len, cells)) - word for cells, word in zip(columns, least, strict=True)]
    remaining = width - sum(least) - _GAP * (len(columns) - 1)
    if remaining < 0:
        return None
    widths = list(least)
    order = sorted(range(len(columns)), key=lambda index: missing[index])
    for done, index in enumerate(order):
        extra = min(missing[index], remaining // (len(order) - done))
        widths[index] += extra
        remaining -= extra
    return widths


def _lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str], widths: Sequence[int]
) -> list[str]:
    lines: list[str] = []
    for row in (columns, *rows):
        parts = [
            textwrap.wrap(cell, max(size, 1), break_on_hyphens=False) for cell, size in zip(row, widths, strict=True)
        ]
        for number in range(max(map(len, parts))):
            cells = [part[number] if number < len(part) else "" for part in parts]
            padded = (
                cell.rjust(size) if name in right else cell.ljust(size)
                for cell, size, name in zip(cells, widths, columns, strict=True)
            )
            lines.append((" " * _GAP).join(padded).rstrip())
        if row is columns:
            lines.append((" " * _GAP).join("\N{BOX DRAWINGS LIGHT HORIZONTAL}" * size for size in widths))
    return lines


def _records(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    width = max(map(len, columns[1:]), default=0)
    lines: list[str] = []
    for first, *others in rows:
        lines.append(first)
        lines += [f"  {name.ljust(width)}  {cell}" for name, cell in zip(columns[1:], others, strict=True) if cell]
    return lines


def check_output_path(option: str, requested: str | Path) -> Path:
    """The absolute path of an output file; missing folders are not created.

    Raises:
        ValueError: the file cannot be written there.
    """
    path = expand_path(requested).absolute()
    try:
        if path.is_dir():
            raise ValueError(f"{option} {requested}: this is a folder; name a file in it")
        nearest = next(each for each in path.parents if each.exists())
    except OSError as error:  # e.g. the name is too long
        raise ValueError(f"{option} {requested}: {error.strerror}; name another file") from None
    if not nearest.is_dir():
        raise ValueError(f"{option} {requested}: {nearest} is not a folder; name another file")
    if not os.access(path if path.exists() else nearest, os.W_OK):
        raise ValueError(
            f"{option} {requested}: {path if path.exists() else nearest} cannot be written; name another file"
        )
    return path


def check_output_file(option: str, requested: str) -> Path | None:
    """`check_output_path` for a file in an existing folder; None for an empty option."""
    path = check_output_path(option, requested) if requested else None
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{option} {requested}: there is no such folder")
    return path


def write_output(option: str, path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}; name another file") from error
