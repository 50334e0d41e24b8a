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
from unittest import mock

from torch import Tensor


@contextmanager
def exact_overlap() -> Iterator[None]:
    """Answer Inductor's question in the body by `find_overlap`."""
    from torch._inductor.fx_passes import reinplace

    with mock.patch.object(reinplace, "compute_overlapping_tensors", find_overlap):
        yield


def find_overlap(views: Sequence[Tensor]) -> set[int]:
    """Positions of the views of one storage that may share an element with another one, by fake tensors."""
    pairs = itertools.combinations(range(len(views)), 2)
    return {position for pair in pairs if not _are_disjoint(*(views[each] for each in pair)) for position in pair}


def _are_disjoint(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    first, other_first = one.storage_offset(), other.storage_offset()
    if _is_separate((first, first + _extent(one)), (other_first, other_first + _extent(other))):
        return True
    return any(
        _is_separate(_columns(one, row), _columns(other, row), below=row)
        for row in one.stride()
        if isinstance(row, int) and row > 1 and row in other.stride()
    )


def _columns(view: Tensor, row: int) -> tuple[Any, Any]:
    """The first and the last column of a view that is a part of a matrix with rows of this length."""
    first = view.storage_offset() % row
    return first, first + _extent(view, row=row)


def _extent(view: Tensor, row: int = 0) -> Any:
    """The distance from the first to the last element, along dimensions whose stride is no multiple of the length of rows."""
    return sum(
        (size - 1) * stride
        for size, stride in zip(view.shape, view.stride(), strict=True)
        if not (row and isinstance(stride, int) and stride % row == 0)
    )


def _is_separate(one: tuple[Any, Any], other: tuple[Any, Any], below: int | None = None) -> bool:
    """Whether one range ends before the other begins, and both end below a number."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true as is_known

    if below is not None and not (is_known(one[1] < below) and is_known(other[1] < below)):
        return False
    return is_known(one[1] < other[0]) or is_known(other[1] < one[0])
