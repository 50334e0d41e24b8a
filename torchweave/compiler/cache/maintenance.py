"""Looking after a folder of the compile cache: what is in it, whether it is whole, making it smaller, and taking it elsewhere."""

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
"""What reading raises where a file is something else or was cut off; somebody may have compressed it."""
_MAX_ENTRY_BYTES = 1 << 32  # bytes: what an archive claims beyond this is not read


@dataclass(frozen=True)
class Summary:
    """A file of the cache: its entry, or why it has none; bytes; and when it was last used, in seconds since the epoch."""

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
            if cache.path(entry) != path:
                entry, fault = None, "it is another entry than its name says"
        except (OSError, DamagedEntryError) as error:
            entry, fault = None, str(error)
        yield Summary(path, facts.st_size, facts.st_mtime, entry, fault)


def find(cache: CompileCache, keys: Sequence[str]) -> list[Summary]:
    """The files whose keys begin as given.

    Raises:
        ValueError: a beginning that fits none, or several.
    """
    every = list(summaries(cache))
    found = []
    for key in keys:
        fitting = [each for each in every if each.key.startswith(key)]
        if len(fitting) != 1:
            what = f"{len(fitting)} entries begin" if fitting else "no entry begins"
            raise ValueError(f"{what} with {key!r}; `torchweave cache list` shows their keys")
        found += fitting
    return found


def to_prune(
    every: Iterable[Summary],
    older_than: float | None,
    max_bytes: int | None,
    everything: bool,
    now: float | None = None,
) -> list[Summary]:
    """What to remove: damaged files always, then what was not used for `older_than` seconds, then the least recently used
    until at most `max_bytes` are left."""
    now = time.time() if now is None else now
    kept, gone = [], []
    for each in sorted(every, key=lambda each: each.used):
        old = older_than is not None and now - each.used > older_than
        (gone if everything or old or each.entry is None else kept).append(each)
    left = sum(each.num_bytes for each in kept)
    for each in kept if max_bytes is not None else ():
        if left <= (max_bytes or 0):
            break
        left -= each.num_bytes
        gone.append(each)
    return gone


def clear_unfinished(cache: CompileCache, older_than: float = 3600.0) -> int:
    """Remove what a process that was killed while it wrote has left; returns how many files."""
    count = 0
    for path in cache.folder.glob(f"*/{UNFINISHED}*"):
        with contextlib.suppress(FileNotFoundError):  # it was finished meanwhile
            if time.time() - path.stat().st_mtime > older_than:
                path.unlink()
                count += 1
    return count


def clear_side_files(cache: CompileCache) -> None:
    """Remove what stands beside the entries: shared objects that pieces for a CPU were compiled to, and readable copies."""
    for folder in (CODE_FOLDER, READABLE_FOLDER):
        shutil.rmtree(cache.folder / folder, ignore_errors=True)


def export(cache: CompileCache, file: Path, entries: Iterable[Summary]) -> int:
    """Write entries into one archive (tar); returns how many. The archive is there whole or not at all.

    Raises:
        OSError: it cannot be written.
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
    """Take the entries of an archive into the cache; returns how many were new, and what was wrong with others.

    Entries are code that is run when it is loaded: an archive is to be trusted like a program. Names in it are not used.

    Raises:
        ValueError: it is no archive.
    """
    added, faults = 0, []
    try:
        with tarfile.open(file) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() and member.size < _MAX_ENTRY_BYTES else None
                if content is None or not member.name.endswith(SUFFIX):
                    faults.append(f"{member.name}: it is no entry")
                    continue
                data = content.read()
                try:
                    path = cache.path(parse_entry(data))
                except DamagedEntryError as error:
                    faults.append(f"{member.name}: {error}")
                    continue
                if not path.exists():
                    path.parent.mkdir(exist_ok=True, mode=0o700)
                    write_atomic(path, data)
                    added += 1
    except _ARCHIVE_ERRORS as error:
        raise ValueError(f"{file} is no archive of a compile cache; give one that `cache export` wrote") from error
    return added, faults
