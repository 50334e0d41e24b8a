"""Parameters of tests of which `make test` runs a few, and `make test-all` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The values, those that are not `kept` marked `whole`."""
    return [pytest.param(value, marks=() if value in kept else pytest.mark.whole) for value in values]
