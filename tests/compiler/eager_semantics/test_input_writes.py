"""The order of reads of inputs and writes to them: stock torch.compile is wrong in most of these; see `input_writes`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiler.eager_semantics.as_eager import check


def _pair() -> dict[str, Tensor]:
    return {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}


def _swap(self: Any, a: Tensor, b: Tensor) -> None:
    t = a.clone()
    a.copy_(b)
    b.copy_(t)


def _swap_transposed(self: Any, a: Tensor, b: Tensor) -> Tensor:
    t = a.t().contiguous()
    a.copy_(b)
    b.copy_(t.t())
    return t


def _momentum(self: Any, a: Tensor, b: Tensor) -> Tensor:
    change = a - b
    b.copy_(a)
    a.mul_(2)
    return change


def _copy_a_view(self: Any, a: Tensor, b: Tensor) -> Tensor:
    b.copy_(a.view(4, 3).view(3, 4))
    a.mul_(2)
    return b + a


def _copy_columns(self: Any, a: Tensor, b: Tensor) -> Tensor:
    b[:, 1:] = a[:, 1:]
    a.add_(1)
    return b * 2


def _rotate(self: Any, a: Tensor, b: Tensor) -> Tensor:
    t, u = a + 0, torch.cat([b])
    a.copy_(u)
    b.zero_()
    b.add_(t)
    return u


@pytest.mark.parametrize("forward", [_swap, _swap_transposed, _momentum, _copy_a_view, _copy_columns, _rotate])
def test_an_input_is_read_before_it_is_written(forward: Any) -> None:
    check(forward, _pair)


def _put(self: Any, a: Tensor, b: Tensor) -> Tensor:
    y = a.clone()
    y[torch.tensor([0, 2])] = b[:2]
    a.zero_()
    return y


def _put_slices(self: Any, a: Tensor, b: Tensor) -> Tensor:
    y = a.clone()
    y[1:, ::2] = b[1:, ::2]
    a.copy_(b)
    return y


def _select_scatter(self: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.select_scatter(a, b[1], 0, 2)
    a.fill_(9)
    return y + 0, y


def _two_puts(self: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = a.index_put((torch.tensor([0]),), b[:1])
    z = y.index_put((torch.tensor([2]),), b[:1])
    a.copy_(z)
    return y, z


def _put_and_keep(self: Any, a: Tensor, b: Tensor) -> Tensor:
    a[torch.tensor([2, 0])] = b[:2]
    y = a.clone()
    a[1:] = 0
    return y


@pytest.mark.parametrize("forward", [_put, _put_slices, _select_scatter, _two_puts, _put_and_keep])
def test_a_scatter_is_not_written_into_an_input_that_gets_another_value(forward: Any) -> None:
    check(forward, _pair)


def test_writes_of_dynamic_sizes_keep_their_order() -> None:
    def forward(self: Any, a: Tensor, b: Tensor) -> Tensor:
        b[0:, :] = a[0:, :]
        a.add_(1)
        return a

    def rows(number: int) -> Any:
        return lambda: {"a": torch.randn(number, 4), "b": torch.randn(number, 4)}

    check(forward, rows(5), rows(3), rows(1), dynamic={"a": {0: "T"}, "b": {0: "T"}})


@torch.library.custom_op("torchweave_test::add_into", mutates_args=("out",))
def _add_into(out: Tensor, x: Tensor) -> None:
    out.mul_(2).add_(x)
    out.add_(x)


@torch.library.custom_op("torchweave_test::add_both", mutates_args=("one", "other"))
def _add_both(one: Tensor, other: Tensor) -> None:
    one.add_(1)
    other.add_(one)


def _write_a_copy(self: Any, a: Tensor, b: Tensor) -> Tensor:
    y = a.clone()
    _add_into(y, a)
    return y


def _write_a_copy_of_a_written_input(self: Any, a: Tensor, b: Tensor) -> Tensor:
    y = a.clone()
    _add_into(y, a)
    a.copy_(b)
    return y


def _write_copy_and_input(self: Any, a: Tensor, b: Tensor) -> Tensor:
    y = a.clone()
    _add_both(y, a)
    return y


def _write_input_then_overwrite(self: Any, a: Tensor, b: Tensor) -> Tensor:
    _add_into(a, b)
    y = a.clone()
    _add_into(a, y)
    return y


@pytest.mark.parametrize(
    "forward",
    [_write_a_copy, _write_a_copy_of_a_written_input, _write_copy_and_input, _write_input_then_overwrite],
)
def test_a_custom_op_writes_to_the_tensor_that_it_is_given(forward: Any) -> None:
    check(forward, _pair)


def _add_zeros(self: Any, a: Tensor, b: Tensor) -> Tensor:
    return a + torch.zeros(3, 4)


def _times_ones(self: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * torch.ones(3, 4), a / torch.ones(3, 4)


def _equal_results(self: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a + torch.zeros(3, 4, dtype=torch.int64), a - torch.zeros(3, 4), b * 1


@pytest.mark.parametrize("forward", [_add_zeros, _times_ones, _equal_results])
def test_a_result_is_not_the_input_that_it_equals(forward: Any) -> None:
    check(forward, _pair)
