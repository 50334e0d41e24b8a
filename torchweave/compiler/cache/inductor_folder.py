"""The folder of the compile cache in which Inductor keeps compiled CPU code."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from typing import TypeVar

from torchweave.compiler.cache.libraries import DamagedLibraryError, whole_libraries
from torchweave.compiler.cache.store import CODE_FOLDER, CompileCache

Result = TypeVar("Result")

_UNSAFE_IN_PATH = re.compile(r"[\s'\"\\]")
"""Inductor writes the command of its compiler as one line without quotes, and splits it again."""
_DISK_FULL = os.strerror(errno.ENOSPC)
_MIN_FREE_BYTES = 16 << 20
"""Disk space below which Inductor's code of a model does not fit."""


def _is_of_damaged_library(error: BaseException) -> bool:
    """Whether an error of Inductor, which has another as its cause, is of a library that was damaged."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return isinstance(error, DamagedLibraryError) or (inner is not None and _is_of_damaged_library(inner))


class InductorCacheDir:
    """Redirect Inductor's compiled CPU code to a folder beside the entries; a context manager. No effect without a cache.

    A CPU artifact holds C++ source, which is compiled again on every load unless its shared object still exists; a GPU artifact
    holds its kernels and needs no folder. When the folder cannot be used (read-only, disk full, a name that Inductor cannot
    handle), Inductor uses its own folder, with one warning.
    """

    def __init__(self, cache: CompileCache | None) -> None:
        self._cache = cache
        self._redirect = contextlib.ExitStack()

    def __enter__(self) -> InductorCacheDir:
        if self._cache is None:
            return self
        from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

        folder = self._cache.folder / CODE_FOLDER
        try:
            if match := _UNSAFE_IN_PATH.search(str(folder)):
                raise OSError(f"Inductor cannot use a folder with {match[0]!r} in its name")
            folder.mkdir(exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                file.write(b"test")
            # Inductor keeps the result of a trial compilation that a full disk ended: that this CPU has no vector instructions.
            if shutil.disk_usage(folder).free < _MIN_FREE_BYTES:
                raise OSError(errno.ENOSPC, _DISK_FULL)
        except OSError as error:
            self._fall_back(error)
        else:
            self._redirect.enter_context(temporary_cache_dir(str(folder)))
            self._redirect.enter_context(whole_libraries(folder, self._report_repair))
        return self

    def __exit__(self, *_: object) -> None:
        self._redirect.close()

    def run(self, build: Callable[[], Result]) -> Result:
        """Run `build`; if it fails, run it again in Inductor's own folder: the disk may be full, which compilers report in ways
        of their own.

        Raises:
            ValueError: the disk of Inductor's own folder is full.
        """
        if self._cache is not None:
            try:
                return build()
            except Exception as error:
                if _is_of_damaged_library(error):  # which has been removed
                    return self.run(build)
                from torch._inductor.exc import InductorError  # imports hundreds of modules, needed after an error only

                if not isinstance(error, (InductorError, OSError)):
                    raise
                self._fall_back(error)
        try:
            return build()
        except Exception as error:
            if _DISK_FULL not in str(error):
                raise
            from torch._inductor.runtime.cache_dir_utils import cache_dir

            raise ValueError(
                f"Inductor cannot write to {cache_dir()}: {_DISK_FULL}; free space there, or set TORCHINDUCTOR_CACHE_DIR to a "
                "folder on another disk"
            ) from error

    def _report_repair(self, sentence: str) -> None:
        assert self._cache is not None
        self._cache.report.event("warning", what="compile cache", why=sentence)

    def _fall_back(self, error: Exception) -> None:
        assert self._cache is not None
        message = " ".join(str(error).split())
        if _DISK_FULL in message:  # after a C++ compiler's command and its first errors
            message = _DISK_FULL
        self._cache.warn_not_stored(
            f"compiled CPU code is not stored in {self._cache.folder / CODE_FOLDER}: {message[:300]}"
        )
        self._redirect.close()
        self._cache = None
