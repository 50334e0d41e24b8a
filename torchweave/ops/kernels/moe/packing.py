"""Tensors of packed experts beside the weights and their scales."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Packing(NamedTuple):
    """What packed weights `[E, N, .]` have beside scales, as `torchweave::int_linear` takes it for one weight.

    Attributes:
        zero: `[E, N, groups]` or None.
        row_scale: `[E, N]` or None.
        group: inputs that share a scale; 0: all.
    """

    zero: Tensor | None = None
    row_scale: Tensor | None = None
    group: int = 0

    def of(self, e: int) -> tuple[Tensor | None, Tensor | None]:
        """Zero points and scales of rows of expert e."""
        return None if self.zero is None else self.zero[e], None if self.row_scale is None else self.row_scale[e]


PLAIN = Packing()
