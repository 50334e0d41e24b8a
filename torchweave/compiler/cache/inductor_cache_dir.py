"""Where Inductor keeps what it compiles for a CPU: beside the entries of the compile cache, if it can be there."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

import torch

from torchweave.compiler.cache.store import CODE_FOLDER, CompileCache

Made = TypeVar("Made")

_UNSAFE_IN_PATH = re.compile(r"[\s'\"\\]")
"""Inductor writes the command of its compiler as one line, with no quotes around names, and divides that again."""


class InductorCacheDir:
    """Within it, Inductor works beside the entries.

    A CPU artifact holds C++ source and is compiled again when it is loaded, unless the shared object is still there: it is
    kept beside the entries. A GPU artifact holds its kernels. Where nothing can be kept there (nobody may write, the disk is
    full, its name is nothing for Inductor), Inductor works in its own folder, with one warning.
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
            if found := _UNSAFE_IN_PATH.search(str(folder)):
                raise OSError(f"Inductor takes no folder with {found[0]!r} in its name")
            folder.mkdir(exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                file.write(b"room")
        except OSError as error:
            self._fall_back(error)
        else:
            self._redirect.enter_context(temporary_cache_dir(str(folder)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._redirect.close()

    def run(self, build: Callable[[], Made]) -> Made:
        """What `build` makes; once more in Inductor's own folder where it fails beside the entries, since the disk may have become
        full meanwhile, which compilers say in words of their own."""
        try:
            return build()
        except Exception as error:
            from torch._inductor.exc import InductorError  # hundreds of modules, for a fault alone

            if self._cache is None or not isinstance(error, (InductorError, OSError)):
                raise
            self._fall_back(error)
        return build()

    def _fall_back(self, error: Exception) -> None:
        assert self._cache is not None
        message = " ".join(str(error).split())[:300]
        self._cache.warn_not_stored(
            f"what is compiled for a CPU is not kept in {self._cache.folder / CODE_FOLDER}: {message}"
        )
        self._redirect.close()
        self._cache = None
