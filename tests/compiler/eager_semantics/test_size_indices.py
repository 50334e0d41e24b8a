"""Sizes as indices of tensors, beside others and in lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweave
from torchweave import TorchCompileConfig

FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)
INDUCTOR = TorchCompileConfig(compile_cache=False)


def module_of(forward: Any) -> nn.Module:
    return type("Module", (nn.Module,), {"forward": forward})()


def _write_a_row(self: nn.Module, x: Tensor) -> Tensor:
    m, n = x * 2, x.shape[0]
    m[n // 2, 1:3] = x[n // 2, 2:4]
    m[n - 1, None, 1:3] += 1
    m[..., n // 3, 2], m[n // 2, 7] = 0.5, x[n - 1, 0]
    return m


def _write_elements_and_columns(self: nn.Module, x: Tensor) -> Tensor:
    m, n = x @ x.t(), x.shape[0]
    m[1:, n // 2] = 3.0
    m[n // 2, n // 3 :] = m[n // 3, n // 3 :] * 2
    m[-(n // 2) - 1, 0], m[n // 2, n // 3] = 7.0, 8.0
    return m


def _write_by_tensors_and_a_size(self: nn.Module, x: Tensor) -> Tensor:
    m, n = x * 2, x.shape[0]
    i = torch.arange(3)
    m[n // 2, i * 2] = x[n // 3, i]
    m.view(-1, 2, 4)[n // 2, :, i[:2]] = 0.25
    m.view(-1, 2, 4)[n // 3, torch.tensor([False, True])] *= 3
    return m


def _write_slices(self: nn.Module, x: Tensor) -> Tensor:
    m = x * 2
    m[1:] = x[1:]
    m[:-1, 2:4], m[..., 0] = x[1:, :2], x[:, 5]
    m[None, 1:] = m[:-1].clone()
    m[:, 1:3] = x[:1, :2]
    return m.sub_(m[:, :1] * 2)


def _read_rows(self: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    n = x.shape[0]
    x[n // 2, ::2] = 0
    return x[n // 2, 1:3] * 2, x[n // 3, ..., 2], (x @ x.t())[n // 2, n // 3 :].sum(), x[n // 2, None]


def _read_lists(self: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    n = x.shape[0]
    x[0, 0] = 3.0
    return (
        x[[0, n // 2]] * 2,
        x[:, [1, 3]][[n // 3, -1], 1:],
        (x @ x.t())[[n // 2, -(n // 2) - 1], [0, n - 1]],
        x[n // 2, [2, 1]],
    )


def _write_lists(self: nn.Module, x: Tensor) -> Tensor:
    m, n = x * 2, x.shape[0]
    m[[n // 2, n - 1]] = 0.5
    m[[0, n // 3], 1:3] = x[[n // 2, 0], 2:4] * 3
    m[n // 2, [1, 4]] = m[[n // 3], 5]
    return m


@pytest.mark.parametrize("config", [FX, INDUCTOR], ids=["fx", "inductor"])
@pytest.mark.parametrize(
    "forward",
    [
        _write_a_row,
        _write_elements_and_columns,
        _write_by_tensors_and_a_size,
        _write_slices,
        _read_rows,
        _read_lists,
        _write_lists,
    ],
)
def test_sizes_are_indices(forward: Any, config: TorchCompileConfig) -> None:
    """torch reads an integer in a tuple or a list of indices as a number."""
    compiled = torchweave.compile(module_of(forward), {"x": torch.randn(5, 8)}, {"x": {0: "T"}}, config)
    for rows in (1, 2, 3, 4, 5, 8, 17):
        x = torch.randn(rows, 8)
        written = x.clone()
        torch.testing.assert_close(compiled(written), forward(None, x))
        assert torch.equal(written, x)
