"""Faster import of transformers: defer unused packages, and list the models once.

transformers imports scikit-learn, SciPy, pandas and torchvision, where installed, for three functions of assisted generation and
object detection, and reads the file list of every installed package to locate `torch`: 2.6 s of 7.2 s of imports with 180
packages. It also parses the source of its 500 models (1500 files) twice to list their names: 0.25 s of 3 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from torchweave.utils.lazy_import import lazy_modules

DEFERRED_FUNCTIONS = {
    "scipy.optimize": ("linear_sum_assignment",),
    "sklearn.metrics": ("roc_curve",),
    "torch.distributed.checkpoint.hf_storage": ("HuggingFaceStorageReader", "HuggingFaceStorageWriter"),
    "transformers.image_transforms": ("center_to_corners_format",),
}
"""Names that transformers imports from a module at import time and calls later, if ever."""
_QUERIED_PACKAGES = ("accelerate", "torch")
"""Packages whose distribution, of the same name, transformers queries at import time."""
_PREFIX = "models."


@contextmanager
def postponed() -> Iterator[None]:
    """Defer the modules of `DEFERRED_FUNCTIONS`; access to any other name of them imports the module."""
    read = metadata.packages_distributions
    metadata.packages_distributions = lambda: _Distributions(read)  # type: ignore[assignment, return-value]
    try:
        with lazy_modules(DEFERRED_FUNCTIONS):
            yield
    finally:
        metadata.packages_distributions = read


class _Distributions(Mapping[str, list[str]]):
    """The result of `importlib.metadata.packages_distributions`, computed on a query beyond `_QUERIED_PACKAGES`.

    Args:
        read: that function.
    """

    def __init__(self, read: Callable[[], Mapping[str, list[str]]]) -> None:
        self._read = read

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return self._read()

    def __getitem__(self, package: str) -> list[str]:
        if package in _QUERIED_PACKAGES and _is_distribution(package):
            return [package]
        return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def _is_distribution(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def import_models() -> None:
    """Import `transformers.models` with the cached list of models."""
    with _cached_model_list():
        import_module("transformers.models")


@contextmanager
def _cached_model_list() -> Iterator[None]:
    """Derive the list of `transformers.models` from that of `transformers`, if the latter is cached."""
    tools = import_module("transformers.utils.import_utils")
    read = getattr(tools, "define_import_structure", None)
    folder = Path(str(tools.__file__)).parents[1] / "models"
    if read is None or not hasattr(read, "cache_info"):
        yield
        return

    def define_import_structure(module_path: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(module_path) != folder / "__init__.py":
            return read(module_path, prefix)
        return models_of(read(folder, prefix="models"))  # the arguments of transformers' own call, hence a cache hit

    tools.define_import_structure = define_import_structure  # type: ignore[attr-defined]
    try:
        yield
    finally:
        tools.define_import_structure = read  # type: ignore[attr-defined]


def models_of(structure: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The part of an import structure (requirements -> module -> names) below `models`, with relative module names."""
    return {
        needs: {name.removeprefix(_PREFIX): names for name, names in modules.items() if name.startswith(_PREFIX)}
        for needs, modules in structure.items()
    }
