"""What transformers imports for code that no engine runs, postponed until somebody runs it.

Where scikit-learn, SciPy, pandas and torchvision are installed, it imports all of them for three functions: one of assisted
generation, and two of the losses of models that find objects in images. And it reads the file list of every installed package, to
know where `torch` is from. With 180 packages that is 2.6 s of 7.2 s of imports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib import metadata

from torchweave.utils.lazy_import import lazy_modules

DEFERRED_FUNCTIONS = {
    "scipy.optimize": ("linear_sum_assignment",),
    "sklearn.metrics": ("roc_curve",),
    "transformers.image_transforms": ("center_to_corners_format",),
}
"""By module, what is imported from it by name and called later, if ever."""
_QUERIED_PACKAGES = ("accelerate", "torch")
"""Packages whose distribution transformers asks for as it is imported; both have the same name."""


@contextmanager
def postponed() -> Iterator[None]:
    """In here transformers is imported without these modules. Whoever needs more of one than `DEFERRED_FUNCTIONS` gets
    it as ever."""
    read = metadata.packages_distributions
    metadata.packages_distributions = lambda: _Distributions(read)  # type: ignore[assignment, return-value]
    try:
        with lazy_modules(DEFERRED_FUNCTIONS):
            yield
    finally:
        metadata.packages_distributions = read


class _Distributions(Mapping[str, list[str]]):
    """What `importlib.metadata.packages_distributions` returns, read when more than `_QUERIED_PACKAGES` is asked for.

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
