"""Inductor's compiled libraries in the cache: renamed once they are whole, with a checksum that is compared at each load.

A kill at the moment of linking, or a power loss, leaves an empty or cut library, which Inductor would load at every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torchweave.compiler.cache.store import UNFINISHED, write_atomic

_CHECKSUM = ".sha256"
_ELF = b"\x7fELF\x02"  # of 64 bits
_ELF_HEADER_BYTES = 64


class DamagedLibraryError(ImportError):
    """A library was damaged, and has been removed."""


@contextlib.contextmanager
def whole_libraries(folder: Path, on_repair: Callable[[str], None]) -> Iterator[None]:
    """Let Inductor write and load libraries of `folder` whole; at first, those that were cut are removed.

    Args:
        on_repair: called with a sentence once damaged libraries have been removed.
    """
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.cpp_builder import CppBuilder

    if removed := [path.name for path in sorted(folder.glob("**/*.so")) if _is_cut(path) and _remove(path)]:
        on_repair(f"removed {len(removed)} cut libraries, which are compiled again: {', '.join(removed[:3])}")
    build_in_place = CppBuilder.build
    load = CppCodeCache._load_library.__func__  # type: ignore[attr-defined]

    def build(builder: Any) -> None:
        target = Path(builder.get_target_file_path())
        if str(target) not in builder._output:  # relative to a folder of a remote build
            build_in_place(builder)
            return
        unfinished = target.with_name(f"{UNFINISHED}{os.getpid()}-{target.name}")
        given, builder._output = builder._output, builder._output.replace(str(target), str(unfinished))
        try:
            build_in_place(builder)
            _publish(unfinished, target)
        finally:
            builder._output = given
            unfinished.unlink(missing_ok=True)

    def load_library(cls: Any, path: str, key: str) -> Any:
        library = Path(path)
        if not _matches(library):
            _remove(library)
            sentence = f"removed a damaged library, which is compiled again: {library.name}"
            on_repair(sentence)
            raise DamagedLibraryError(sentence)
        return load(cls, path, key)

    with (
        mock.patch.object(CppBuilder, "build", build),
        mock.patch.object(CppCodeCache, "_load_library", classmethod(load_library)),
        _stored_probes(),
    ):
        yield


@contextlib.contextmanager
def _stored_probes() -> Iterator[None]:
    """Mark each of Inductor's trial libraries for vector instructions that loads, by a file beside it. Inductor keeps the
    libraries, whose names depend on the compiler and on torch, but loads them in other processes at each start: six for AVX-512."""
    from torch._inductor.cpu_vec_isa import VecISA

    probe = getattr(VecISA, "_probe_load", None)
    if probe is None:  # torch before 2.13
        yield
        return

    def probe_load(target: Any, library: str) -> bool:
        mark = Path(f"{library}.loads")
        if mark.exists():
            return True
        loads = probe(target, library)
        if loads:
            with contextlib.suppress(OSError):
                mark.touch()
        return loads

    with mock.patch.object(VecISA, "_probe_load", probe_load):
        yield


def _publish(unfinished: Path, target: Path) -> None:
    """Give a finished file its name, after its content and its checksum have reached the disk."""
    with unfinished.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    write_atomic(_checksum_path(target), checksum.encode())
    os.replace(unfinished, target)


def _matches(library: Path) -> bool:
    """Whether a library has its checksum. One without any, which another process has built, gets it if the file is whole."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    checksum = hashlib.sha256(content).hexdigest()
    with contextlib.suppress(FileNotFoundError):
        return _checksum_path(library).read_text() == checksum
    if _is_cut(library):
        return False
    with contextlib.suppress(OSError):  # a read-only cache
        write_atomic(_checksum_path(library), checksum.encode())
    return True


def _is_cut(library: Path) -> bool:
    """Whether a library is empty or shorter than its header says."""
    try:
        with library.open("rb") as file:
            header = file.read(_ELF_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if not header.startswith(_ELF):
        return not header.strip(b"\0")
    sections, section_bytes, num_sections = (
        int.from_bytes(header[begin:end], "little") for begin, end in ((40, 48), (58, 60), (60, 62))
    )
    return len(header) < _ELF_HEADER_BYTES or size < sections + section_bytes * num_sections


def _remove(library: Path) -> bool:
    """Remove a library with its checksum; False if it cannot be removed."""
    try:
        for path in (library, _checksum_path(library), Path(f"{library}.loads")):
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _checksum_path(library: Path) -> Path:
    return library.with_name(library.name + _CHECKSUM)
