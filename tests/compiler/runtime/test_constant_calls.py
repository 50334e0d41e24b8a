"""Calls on constant tensors: computed once, skipped in later runs, and refused where a later run would give other numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchweave.compiler.runtime.constant_calls import ConstantCalls


class Counted(TorchFunctionMode):
    """Names of the functions that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def in_two_runs(fn: Callable[[Tensor, Tensor], Tensor], grid: Tensor, opaque: tuple[nn.Module, ...] = ()) -> list[str]:
    """Compare two runs with the function itself; returns the functions that ran in the second."""
    calls, x = ConstantCalls([grid], opaque), torch.zeros(6, 4)
    for _ in range(2):
        x.normal_()
        with Counted() as counted:
            got = calls.run(lambda: fn(x, grid))
        torch.testing.assert_close(got, fn(x, grid.clone()))
    return counted.names


def test_reads_of_constants_are_made_once() -> None:
    def fn(x: Tensor, grid: Tensor) -> Tensor:
        parts = []
        for height, width in grid.tolist():
            rows = torch.arange(height).repeat_interleave(width) + torch.tensor([1])
            if rows.sum() > 1:
                parts.append(x[: height * width] * rows[:, None])
        return torch.cat(parts)

    names = in_two_runs(fn, torch.tensor([[2, 3], [1, 4]]))
    assert set(names) <= {"__getitem__", "mul", "cat", "__get__"}


def test_containers_and_iterators_are_new_in_each_run() -> None:
    def fn(x: Tensor, grid: Tensor) -> Tensor:
        sizes = grid.tolist()
        sizes.append(int(sum(int(each) for each in grid)))
        return x * len(sizes) + sum(sizes)

    in_two_runs(fn, torch.tensor([2, 1]))


def test_sizes_and_bounds_of_slices_may_be_constant_tensors() -> None:
    def fn(x: Tensor, grid: Tensor) -> Tensor:
        height, width = grid[0]
        return torch.cat([part.view(1, height, width) for part in x[: height * 2, :width].split(height)])

    names = in_two_runs(fn, torch.tensor([[3, 4]]))
    assert "__index__" not in names and "__int__" not in names


def test_writes_of_constants_to_constants() -> None:
    def fn(x: Tensor, grid: Tensor) -> Tensor:
        mask = torch.zeros(6)
        mask[grid] += 1
        mask.mul_(3)
        return x * mask[:, None]

    in_two_runs(fn, torch.tensor([1, 4]))


def test_writes_that_a_later_run_would_not_repeat_are_refused() -> None:
    x, grid = torch.ones(3), torch.tensor([2])

    def writes_input() -> Tensor:
        table = torch.zeros(3)
        table += x
        return table * 2

    def writes_after_read() -> Tensor:
        table = torch.zeros(3)
        read = x + table
        table.add_(grid)
        return read + table

    for fn in (writes_input, writes_after_read):
        with pytest.raises(RuntimeError, match="it writes to a tensor that is read before"):
            ConstantCalls([grid]).run(fn)


def test_other_calls_in_a_later_run_are_refused() -> None:
    grid, x, runs = torch.tensor([2, 3]), torch.ones(3), []

    def fn(first: Callable[[Tensor], Tensor], later: Callable[[Tensor], Tensor]) -> Tensor:
        runs.append(1)
        return x * (first if len(runs) == 1 else later)(grid).sum()

    for later in (torch.Tensor.neg, lambda grid: grid, lambda grid: grid.abs().abs()):
        runs.clear()
        calls = ConstantCalls([grid])
        calls.run(lambda: fn(torch.Tensor.abs, later))  # noqa: B023
        with pytest.raises(RuntimeError, match="its calls differ from run to run"):
            calls.run(lambda: fn(torch.Tensor.abs, later))  # noqa: B023


def test_random_and_uninitialized_tensors_are_no_constants() -> None:
    grid, x = torch.ones(8), torch.zeros(8)
    calls = ConstantCalls([grid])
    first, second = (calls.run(lambda: x + torch.rand_like(grid)) for _ in range(2))
    assert not torch.equal(first, second)
    values = iter((1.0, 2.0))

    def fn() -> Tensor:
        buffer = torch.empty_like(grid)
        buffer.detach().numpy()[...] = next(values)  # as a kernel that torch does not see
        return x + (buffer + 1)

    calls = ConstantCalls([grid])
    assert [calls.run(fn)[0].item() for _ in range(2)] == [2.0, 3.0]


class Workspace(nn.Module):
    """Writes to a tensor that seems constant, as kernels do that torch does not see."""

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        space = torch.zeros(6, 4)
        space.detach().numpy()[...] = x.detach().numpy()
        return space * 2 + grid.sum()


def test_calls_in_opaque_modules_are_made_in_each_run() -> None:
    module = Workspace()
    names = in_two_runs(lambda x, grid: module(x, grid) + grid.sum(), torch.tensor([2, 3]), (module,))
    assert names.count("sum") == 1  # the module's, not the function's
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_tensors_of_modules_are_read_by_address_and_kept() -> None:
    grid, x = torch.tensor([2]), torch.ones(3)
    holder = SimpleNamespace(table=torch.full((3,), 5.0))
    calls = ConstantCalls([grid])
    assert calls.run(lambda: x * holder.table + grid)[0] == 7
    holder.table.fill_(6)
    assert calls.run(lambda: x * holder.table + grid)[0] == 8
    table = holder.table
    del holder.table
    kept = {id(tensor) for tensor in calls.tensors()}
    assert {id(table), id(grid), id(x)} <= kept and calls.num_bytes() == grid.nbytes


def test_a_tensor_in_an_object_is_no_constant() -> None:
    grid, x = torch.tensor([2.0]), torch.ones(1)

    class Shift:
        def __init__(self, by: Tensor) -> None:
            self.by = by

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            return func(*(each.by if isinstance(each, Shift) else each for each in args), **(kwargs or {}))

    calls = ConstantCalls([grid])
    for value in (3.0, 4.0):
        x.fill_(value)
        assert calls.run(lambda: torch.add(grid, Shift(x)) + x).item() == 2 + 2 * value  # type: ignore[call-overload]
