"""Bytecode of an installation without it, in a folder of this project.

Where Python cannot store bytecode (`PYTHONDONTWRITEBYTECODE`, or a read-only installation, as in many containers), it compiles
every module at every start, which doubles the time of imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

_LARGEST_PACKAGE = "torch"
"""Decides for the whole installation: 1,000 of an engine's 2,100 modules."""


@contextmanager
def bytecode_in(folder: Path) -> Iterator[None]:
    """In this context, Python stores and reads the bytecode of all modules in `folder`, and so do child processes."""
    before = sys.pycache_prefix, sys.dont_write_bytecode
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


def is_bytecode_missing() -> bool:
    """Whether modules are installed without bytecode, and Python cannot store it beside them."""
    spec = find_spec(_LARGEST_PACKAGE)
    if spec is None or spec.origin is None or spec.cached is None or os.path.exists(spec.cached):
        return False
    if sys.dont_write_bytecode:
        return True
    return sys.pycache_prefix is None and not os.access(os.path.dirname(spec.origin), os.W_OK)
