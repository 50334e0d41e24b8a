"""The compile cache: captured graphs and built pieces, each in one file with a header and checksums.

A file is named by the hash of its key factors (everything that the entry depends on, without paths, ranks and device
indices), which its header lists. A damaged, foreign or unreadable entry is a miss with one warning. Entries hold code that
is executed when it is loaded, so a folder that other users can write to is refused.

    torchweave-cache\\n | length of the header, 8 bytes | its SHA-256, 32 bytes | header, JSON | payload
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from torchweave.config.options import TorchCompileConfig, cache_dir, expand_path
from torchweave.report import Report

MAGIC = b"torchweave-cache\n"
FORMAT = 3
SUFFIX = ".weave"
CODE_FOLDER = "inductor"
"""Folder beside the entries: Inductor's compiled CPU code."""
BYTECODE_FOLDER = "bytecode"
"""Folder beside the entries: bytecode of modules that are installed without it (`torchweave.utils.bytecode`)."""
READABLE_FOLDER = "unpacked"
"""Folder beside the entries: their contents as text, with `compile_cache_format: unpacked`."""

_MAX_CANDIDATES = 32
"""Most stored entries, the last used first, that a missing one is compared with."""
_MAX_HEADER_BYTES = 64 << 20
"""Most bytes that are read as a header, since a damaged length may be any number."""
_DIGEST_BYTES = hashlib.sha256().digest_size
UNFINISHED = ".writing-"

Kind = Literal["graph", "piece", "table"]
Factors = Mapping[str, Any]


class DamagedEntryError(Exception):
    """A file in the cache is not an entry, or not the entry of its name."""


@dataclass(frozen=True)
class Entry:
    """The content of a file: key factors, further facts, and the payload."""

    kind: str
    key: str
    factors: dict[str, Any]
    facts: dict[str, Any]
    payload: bytes


def key_of(kind: Kind, factors: Factors) -> str:
    """The name of an entry: 64 hex digits, a hash of its key factors."""
    return hashlib.sha256(_json({"kind": kind, "format": FORMAT, "factors": dict(factors)})).hexdigest()


class CompileCache:
    """A folder of entries, safe to share between processes of one user.

    Args:
        folder: created, readable by its owner only, when it does not exist.
        report: receives a `cache` event for every look-up and store, and a `warning` for every entry that cannot be used.
        wait: called with an entry's path before each look-up; blocks while another process builds that entry.

    Raises:
        ValueError: the folder or one in it belongs to another user, or other users can write to it.
        OSError: the folder cannot be created.
    """

    def __init__(self, folder: Path | str, report: Report, wait: Callable[[Path], None] = lambda _: None) -> None:
        self.folder = expand_path(folder).absolute()
        self.report = report
        self._wait = wait
        self._warned = False
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _refuse_shared(self.folder)
        for name in (*get_args(Kind), CODE_FOLDER, BYTECODE_FOLDER):  # later ones are made by the owner only
            if (self.folder / name).exists():
                _refuse_shared(self.folder / name)

    def load(self, kind: Kind, factors: Factors) -> Entry | None:
        """The entry with these factors, or None."""
        key = key_of(kind, factors)
        self.report.event("cache_key", entry=kind, key=key[:12], factors=dict(factors))
        path = self.path(kind, key)
        try:
            self._wait(path)
            entry = read_entry(path)
            if (entry.kind, entry.key) != (kind, key):
                raise DamagedEntryError("its content is another entry than its name")
        except FileNotFoundError:
            self.miss(kind, key, self._why_missing(kind, factors))
            return None
        except (OSError, DamagedEntryError) as error:
            self.reject(kind, key, str(error))
            return None
        return entry

    def store(self, kind: Kind, factors: Factors, payload: bytes, facts: Factors | None = None) -> str:
        """Write an entry atomically; returns its key. A folder that cannot be written causes one warning."""
        key = key_of(kind, factors)
        header = {
            "format": FORMAT,
            "kind": kind,
            "key": key,
            "factors": dict(factors),
            "facts": dict(facts or {}),
            "sha256": hashlib.sha256(payload).hexdigest(),
            "bytes": len(payload),
        }
        text = _json(header)
        try:
            path = self.path(kind, key)
            path.parent.mkdir(exist_ok=True, mode=0o700)
            write_atomic(path, MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text + payload)
        except OSError as error:
            self.warn_not_stored(f"cannot write {self.folder}: {error}")
            return key
        self.report.event("cache", outcome="stored", entry=kind, key=key[:12], bytes=len(payload))
        return key

    def unpack(self, kind: str, key: str, texts: Mapping[str, str]) -> None:
        """Write the content of an entry as text files in a folder beside it, for readers only."""
        folder = self.folder / READABLE_FOLDER / f"{kind}-{key[:12]}"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name, text in texts.items():
                write_atomic(folder / name, text.encode())
        except OSError as error:
            self.warn_not_stored(f"cannot write {folder}: {error}")

    def _why_missing(self, kind: Kind, factors: Factors) -> str:
        """That an entry is not found, with the factors in which the nearest stored entry of its kind differs."""
        stored = []
        for path in sorted(self.folder.glob(f"{kind}/*{SUFFIX}"), key=_last_use, reverse=True)[:_MAX_CANDIDATES]:
            with contextlib.suppress(OSError, DamagedEntryError):
                stored.append(_read_factors(path))
        own = json.loads(_json(dict(factors)))
        differences = ([name for name in own | other if own.get(name) != other.get(name)] for other in stored)
        # None differs where another process has stored the entry since.
        nearest = sorted(min(differences, key=len, default=[]))
        return f"not found (the nearest entry has another {', '.join(nearest)})" if nearest else "not found"

    def hit(self, entry: Entry) -> None:
        """Record the use of an entry, in the report and as the file's time for pruning."""
        with contextlib.suppress(OSError):
            os.utime(self.path(entry.kind, entry.key))
        self.report.event("cache", outcome="hit", entry=entry.kind, key=entry.key[:12])

    def miss(self, kind: str, key: str, why: str) -> None:
        """Record a miss."""
        self.report.event("cache", outcome="miss", entry=kind, key=key[:12], why=why)

    def reject(self, kind: str, key: str, why: str) -> None:
        """Record an entry that cannot be used, as a miss with a warning."""
        self.miss(kind, key, why)
        self.report.event("warning", what="compile cache", why=f"ignored the {kind} {key[:12]}: {why}")

    def warn_not_stored(self, why: str) -> None:
        """Warn once: a full or read-only disk fails for every entry."""
        if not self._warned:
            self._warned = True
            self.report.event("warning", what="compile cache", why=why)

    def entries(self) -> Iterator[Path]:
        """The files of the cache."""
        yield from sorted(self.folder.glob(f"*/*{SUFFIX}"))  # the other folders hold no such files

    def path(self, kind: str, key: str) -> Path:
        """The path of an entry, which need not exist."""
        return self.folder / kind / f"{key}{SUFFIX}"


def open_cache(
    config: TorchCompileConfig, report: Report, wait: Callable[[Path], None] = lambda _: None
) -> CompileCache | None:
    """The compile cache of a config; None when it is off, or, with a warning, when its folder cannot be created.

    Args:
        wait: see `CompileCache`.

    Raises:
        ValueError: the folder belongs to another user, or other users can write to it.
    """
    if not config.compile_cache:
        return None
    try:
        return CompileCache(cache_dir(config.compile_cache_dir), report, wait)
    except OSError as error:
        why = f"{error.filename} is a file" if isinstance(error, FileExistsError) else error
        report.event("warning", what="compile cache", why=f"disabled, so that every start compiles again: {why}")
        return None


def read_entry(path: Path) -> Entry:
    """Read and verify a file.

    Raises:
        DamagedEntryError: the file is not an entry of this format, or is damaged.
        OSError: the file cannot be read.
    """
    return parse_entry(path.read_bytes())


def parse_entry(data: bytes) -> Entry:
    """Parse and verify the content of a file.

    Raises:
        DamagedEntryError: the content is not an entry of this format, or is damaged.
    """
    content = io.BytesIO(data)
    text = _read_header(content)
    try:
        header = json.loads(text)
        if header["format"] != FORMAT:
            raise DamagedEntryError(f"it has format {header['format']}, not {FORMAT}")
        payload = content.read()
        if len(payload) != header["bytes"] or hashlib.sha256(payload).hexdigest() != header["sha256"]:
            raise DamagedEntryError("its payload is damaged")
        if key_of(header["kind"], header["factors"]) != header["key"]:
            raise DamagedEntryError("its key does not match its factors")
        if header["kind"] not in get_args(Kind):  # the kind becomes the name of a folder
            raise DamagedEntryError(f"its kind {header['kind']!r} is unknown")
        if not (isinstance(header["factors"], dict) and isinstance(header["facts"], dict)):
            raise DamagedEntryError("its header is damaged (factors and facts must be tables)")
        return Entry(header["kind"], header["key"], header["factors"], header["facts"], payload)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedEntryError(f"its header is damaged ({type(error).__name__})") from error


def _read_header(file: BinaryIO) -> bytes:
    """The text of an entry's header, read from the beginning of its file; the payload follows.

    Raises:
        DamagedEntryError: the file is not an entry, or its header is damaged.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise DamagedEntryError("it is not a file of this cache")
    length, digest = int.from_bytes(file.read(8), "little"), file.read(_DIGEST_BYTES)
    text = file.read(min(length, _MAX_HEADER_BYTES))
    if hashlib.sha256(text).digest() != digest:
        raise DamagedEntryError("its header is damaged")
    return text


def _read_factors(path: Path) -> dict[str, Any]:
    """Key factors of a stored entry, whose payload is not read.

    Raises:
        DamagedEntryError, OSError: as `read_entry`.
    """
    with path.open("rb") as file:
        try:
            return dict(json.loads(_read_header(file))["factors"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedEntryError(f"its header is damaged ({type(error).__name__})") from error


def _last_use(path: Path) -> float:
    """When a file was written or last used; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically, also against other writers of the same file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _refuse_shared(folder: Path) -> None:
    facts = folder.stat()
    if not hasattr(os, "getuid"):
        return
    if facts.st_uid not in (os.getuid(), 0):
        raise ValueError(f"the compile cache {folder} belongs to another user; choose another folder")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"other users can write to the compile cache {folder}, and entries are executed when loaded; "
            f"`chmod go-w {folder}` or choose another folder"
        )


def _json(thing: Any) -> bytes:
    return json.dumps(thing, sort_keys=True, separators=(",", ":")).encode()
