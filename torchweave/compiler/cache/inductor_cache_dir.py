"""Inductor's folder for compiled CPU code, beside the entries of the compile cache."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

import torch

from torchweave.compiler.cache.store import CODE_FOLDER, CompileCache

Result = TypeVar("Result")

_UNSAFE_IN_PATH = re.compile(r"[\s'\"\\]")
"""Inductor writes the command of its compiler as one line without quotes, and splits it again."""


class InductorCacheDir:
    """Redirect Inductor to a folder beside the entries; a context manager.

    A CPU artifact holds C++ source, which is compiled again on every load unless its shared object still exists; a GPU artifact
    holds its kernels and needs no folder. When the folder cannot be used (read-only, disk full, a name that Inductor cannot
    handle), Inductor uses its own folder, with one warning.
    """

    def __init__(self, cache: CompileCache | None, device: torch.device) -> None:
        self._cache = cache if device.type == "cpu" else None
        self._redirect = ExitStack()

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
        except OSError as error:
            self._fall_back(error)
        else:
            self._redirect.enter_context(temporary_cache_dir(str(folder)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._redirect.close()

    def run(self, build: Callable[[], Result]) -> Result:
        """Run `build`; if it fails, run it again in Inductor's own folder: the disk may be full, which compilers report in ways
        of their own."""
        try:
            return build()
        except Exception as error:
            from torch._inductor.exc import InductorError  # imports hundreds of modules, needed after an error only

            if self._cache is None or not isinstance(error, (InductorError, OSError)):
                raise
            self._fall_back(error)
        return build()

    def _fall_back(self, error: Exception) -> None:
        assert self._cache is not None
        message = " ".join(str(error).split())[:300]
        self._cache.warn_not_stored(f"compiled CPU code is not stored in {self._cache.folder / CODE_FOLDER}: {message}")
        self._redirect.close()
        self._cache = None
