"""Modules whose forward writes to buffers, and modules that `torch.compile` has wrapped."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweave
from tests.compiler.eager_semantics.as_eager import FX, INDUCTOR
from torchweave.compiler import InvariantError

BOTH = pytest.mark.parametrize("config", [FX, INDUCTOR], ids=["fx", "inductor"])


class _Attention(nn.Module):
    """A KV cache in buffers, written by `index_copy_` at the positions of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("keys", torch.zeros(1, 2, 16, 4))
        self.register_buffer("values", torch.zeros(1, 2, 16, 4))
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (each.view(1, -1, 2, 4).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        keys, values = self.keys.index_copy_(2, positions, k), self.values.index_copy_(2, positions, v)
        mask = self.mask[None, None, positions]
        result = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.out(result.transpose(1, 2).reshape(1, -1, 8))


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Attention() for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, positions)
        return x


@BOTH
def test_a_kv_cache_in_buffers(config: Any) -> None:
    eager = _Decoder().eval().requires_grad_(False)
    module = copy.deepcopy(eager)
    inputs = {"x": torch.zeros(1, 3, 8), "positions": torch.arange(3)}
    compiled = torchweave.compile(module, inputs, {"x": {1: "T"}, "positions": {0: "T"}}, config)
    for positions in (torch.arange(3), torch.tensor([3]), torch.tensor([4]), torch.tensor([5, 6])):
        x = torch.randn(1, len(positions), 8)
        torch.testing.assert_close(compiled(x, positions), eager(x, positions))
        for one, other in zip(module.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(one, other)


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        before = self.mean.clone()
        self.count.add_(1)
        self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return self.norm(x) * self.count, before, self.mean


@BOTH
def test_counts_and_running_means(config: Any) -> None:
    eager = _Counts().train().requires_grad_(False)
    module = copy.deepcopy(eager)
    compiled = torchweave.compile(module, {"x": torch.randn(5, 4)}, {"x": {0: "T"}}, config)
    for rows in (5, 3, 7):
        x = torch.randn(rows, 4)
        for one, other in zip(compiled(x), eager(x), strict=True):
            torch.testing.assert_close(one, other)
    for one, other in zip(module.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    assert compiled(x)[2] is module.mean


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(2, 4)
        self.register_buffer("first", both[0])
        self.register_buffer("second", both[1])

    def forward(self, x: Tensor) -> Tensor:
        self.first.add_(x[0])
        return self.second + x


def test_written_buffers_in_one_memory_are_refused() -> None:
    with pytest.raises(InvariantError, match=r"writes to the memory that .*first shares with .*second"):
        torchweave.compile(_Shared(), {"x": torch.randn(3, 4)}, config=FX)


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.compile(nn.Linear(4, 4))
        self.double = torch.compile(lambda x: x * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.double(self.linear(x))


def _compiled_in_place() -> nn.Module:
    module = nn.Linear(4, 4)
    module.compile()
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.compile(nn.Linear(4, 4)),
        lambda: nn.Sequential(torch.compile(nn.Linear(4, 4)), nn.ReLU()),
        _Parts,
        _compiled_in_place,
    ],
)
def test_a_module_that_torch_compile_wrapped(make: Any) -> None:
    module = make().requires_grad_(False)
    plain = copy.deepcopy(getattr(module, "_orig_mod", module))
    (name,) = inspect.signature(plain.forward).parameters
    compiled = torchweave.compile(module, {name: torch.randn(5, 4)}, {name: {0: "T"}}, FX)
    for rows in (5, 3):
        x = torch.randn(rows, 4)
        with torch.compiler.set_stance("force_eager"):
            torch.testing.assert_close(compiled(x), plain(x))
