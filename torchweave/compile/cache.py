"""The compile cache: captured graphs and built pieces on disk. (First cut: nothing is kept yet.)"""

from __future__ import annotations

from torchweave.config import TorchCompileConfig
from torchweave.log import Report


class CompileCache:
    """A folder of entries."""


def open_cache(config: TorchCompileConfig, report: Report) -> CompileCache | None:
    """The cache that a config asks for, or None."""
    return None
