"""Maintenance of a compile-cache folder: list, verify, prune, export and import entries."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import shutil
import tarfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchweave.compiler.cache.store import (
    BYTECODE_FOLDER,
    CODE_FOLDER,
    READABLE_FOLDER,
    SUFFIX,
    UNFINISHED,
    CompileCache,
    DamagedEntryError,
    Entry,
    parse_entry,
    read_entry,
    write_atomic,
)

_ARCHIVE_ERRORS = (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""Errors of reading a file that is no archive, was cut off, or is compressed and damaged."""
_MAX_ENTRY_BYTES = 1 << 32  # larger members of an archive are not read


@dataclass(frozen=True)
class Summary:
    """A file of the cache.

    Attributes:
        used: time of the last use, in seconds since the epoch.
        entry: None when the file is damaged, for the reason in `fault`.
    """

    path: Path
    num_bytes: int
    used: float
    entry: Entry | None
    fault: str = ""

    @property
    def key(self) -> str:
        return self.path.stem


def summaries(cache: CompileCache) -> Iterator[Summary]:
    """Every file of the cache, read and checked."""
    for path in cache.entries():
        try:
            facts = path.stat()
        except FileNotFoundError:  # pruned by another process meanwhile
            continue
        try:
            entry, fault = read_entry(path), ""
            if cache.path(entry.kind, entry.key) != path:
                entry, fault = None, "its content is another entry than its name"
        except (OSError, DamagedEntryError) as error:
            entry, fault = None, str(error)
        yield Summary(path, facts.st_size, facts.st_mtime, entry, fault)


def find(cache: CompileCache, keys: Sequence[str]) -> list[Summary]:
    """The files with these prefixes of keys.

    Raises:
        ValueError: a prefix matches no file, or several.
    """
    files = list(summaries(cache))
    selected = []
    for key in keys:
        matches = [each for each in files if each.key.startswith(key)]
        if len(matches) != 1:
            count = f"{len(matches)} entries begin" if matches else "no entry begins"
            raise ValueError(f"{count} with {key!r}; `torchweave cache list` shows the keys")
        selected += matches
    return selected


def to_prune(
    entries: Iterable[Summary],
    older_than: float | None,
    max_bytes: int | None,
    everything: bool,
    now: float | None = None,
) -> list[Summary]:
    """The files to remove: damaged files always, then files not used for `older_than` seconds, then the least recently used
    until at most `max_bytes` remain."""
    now = time.time() if now is None else now
    rest, removed = [], []
    for each in sorted(entries, key=lambda each: each.used):
        old = older_than is not None and now - each.used > older_than
        (removed if everything or old or each.entry is None else rest).append(each)
    total = sum(each.num_bytes for each in rest)
    for each in rest if max_bytes is not None else ():
        if total <= (max_bytes or 0):
            break
        total -= each.num_bytes
        removed.append(each)
    return removed


def clear_unfinished(cache: CompileCache, older_than: float = 3600.0) -> int:
    """Remove unfinished files of processes that were killed while writing; returns their number."""
    count = 0
    for path in cache.folder.glob(f"*/{UNFINISHED}*"):
        with contextlib.suppress(FileNotFoundError):  # its writer has finished it meanwhile
            if time.time() - path.stat().st_mtime > older_than:
                path.unlink()
                count += 1
    return count


_SIDE_FOLDERS = (CODE_FOLDER, BYTECODE_FOLDER, READABLE_FOLDER)
"""Folders beside the entries: compiled CPU code, bytecode, and readable copies."""


def num_side_bytes(cache: CompileCache) -> int:
    """Size of the files in the folders beside the entries."""
    total = 0
    for folder in _SIDE_FOLDERS:
        for path in (cache.folder / folder).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # removed by another process meanwhile
                total += path.stat().st_size if path.is_file() else 0
    return total


def clear_side_files(cache: CompileCache) -> None:
    """Remove the folders beside the entries."""
    for folder in _SIDE_FOLDERS:
        shutil.rmtree(cache.folder / folder, ignore_errors=True)


def export(cache: CompileCache, file: Path, entries: Iterable[Summary]) -> int:
    """Write entries into one tar archive, atomically; returns their number.

    Raises:
        OSError: the archive cannot be written.
    """
    packed, count = io.BytesIO(), 0
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for each in entries:
            if each.entry is not None:
                archive.add(each.path, f"{each.entry.kind}/{each.path.name}", recursive=False)
                count += 1
    write_atomic(file, packed.getvalue())
    return count


def import_archive(cache: CompileCache, file: Path) -> tuple[int, list[str]]:
    """Import the entries of an archive; returns the number of new entries, and the faults of invalid members.

    Entries are code that is executed when it is loaded: import only trusted archives. Names in the archive are not used.

    Raises:
        ValueError: the file is not an archive.
    """
    added, faults = 0, []
    try:
        with tarfile.open(file) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() and member.size < _MAX_ENTRY_BYTES else None
                if content is None or not member.name.endswith(SUFFIX):
                    faults.append(f"{member.name}: it is not an entry")
                    continue
                data = content.read()
                try:
                    entry = parse_entry(data)
                except DamagedEntryError as error:
                    faults.append(f"{member.name}: {error}")
                    continue
                path = cache.path(entry.kind, entry.key)
                if not path.exists():
                    path.parent.mkdir(exist_ok=True, mode=0o700)
                    write_atomic(path, data)
                    added += 1
    except _ARCHIVE_ERRORS as error:
        raise ValueError(
            f"{file} is not an archive of a compile cache; pass a file that `cache export` wrote"
        ) from error
    return added, faults
