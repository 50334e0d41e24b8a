"""Let Inductor write in place only where the views of a tensor share no element, whatever the sizes.

Inductor asks torch whether two views overlap before it lets a functional write, such as `m[1:, 2:].index_put((i,), x)`, overwrite
its target. torch's answer (2.13) is wrong for views of different rows: `m[:, :6]` and `m[2:, :6]` are disjoint by it. With dynamic
sizes it answers for the example, by guards that exclude other sizes. Here views are disjoint if one ends before the other begins,
or if they are ranges of columns of equally long rows, one beside the other; if that is not known for all sizes, they overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def exact_overlaps() -> Iterator[None]:
    """Answer Inductor's question in the body by `overlapping`."""
    from torch._inductor.fx_passes import reinplace

    inductor: Any = reinplace
    of_torch = inductor.compute_overlapping_tensors
    inductor.compute_overlapping_tensors = overlapping
    try:
        yield
    finally:
        inductor.compute_overlapping_tensors = of_torch


def overlapping(views: Sequence[Tensor]) -> set[int]:
    """Positions of the views of one storage that may share an element with another one, by fake tensors."""
    pairs = itertools.combinations(range(len(views)), 2)
    return {position for pair in pairs if not _are_disjoint(*(views[each] for each in pair)) for position in pair}


def _are_disjoint(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    ranges = [(view.storage_offset(), view.storage_offset() + _extent(view)) for view in (one, other)]
    return _is_beside(*ranges) or any(
        _is_beside(*(_columns(view, row) for view in (one, other)), below=row)
        for row in one.stride()
        if isinstance(row, int) and row > 1 and row in other.stride()
    )


def _columns(view: Tensor, row: int) -> tuple[Any, Any]:
    """The first and the last column of a view that is a part of a matrix with rows of this length."""
    first = view.storage_offset() % row
    return first, first + _extent(view, without_multiples_of=row)


def _extent(view: Tensor, without_multiples_of: int = 0) -> Any:
    """The distance from the first to the last element, along dimensions whose stride is no multiple of a number."""
    row = without_multiples_of
    return sum(
        (size - 1) * stride
        for size, stride in zip(view.shape, view.stride(), strict=True)
        if not (row and isinstance(stride, int) and stride % row == 0)
    )


def _is_beside(one: tuple[Any, Any], other: tuple[Any, Any], below: int | None = None) -> bool:
    """Whether one range ends before the other begins, and both end below a number."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true as is_known

    if below is not None and not (is_known(one[1] < below) and is_known(other[1] < below)):
        return False
    return is_known(one[1] < other[0]) or is_known(other[1] < one[0])
