"""Which views of a tensor share elements, against the elements themselves; and what Inductor may overwrite."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweave
from torchweave.compiler.eager_semantics.overlaps import find_overlap
from torchweave.config.options import TorchCompileConfig


def test_views_that_share_an_element_overlap() -> None:
    draw = random.Random(0)
    disjoint = 0
    for _ in range(500):
        base = torch.arange(120)
        one, other = (
            base.as_strided(
                (draw.randint(1, 3), draw.randint(1, 4)),
                draw.choice(((8, 1), (8, 2), (4, 1), (1, 8))),
                draw.randint(0, 60),
            )
            for _ in range(2)
        )
        found = find_overlap([one, other])
        shared = set(one.flatten().tolist()) & set(other.flatten().tolist())
        assert found == {0, 1} if shared else found in ({0, 1}, set())
        disjoint += not found
    assert disjoint > 100


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (lambda m: m[:, :6], lambda m: m[2:, :6], True),  # torch 2.13: disjoint
        (lambda m: m, lambda m: m[2:, 2:], True),
        (lambda m: m[:, :4], lambda m: m[2:, 4:], False),
        (lambda m: m[:2], lambda m: m[2:], False),
        (lambda m: m.view(6, 2, 4)[:, 0], lambda m: m.view(6, 2, 4)[:, 1], False),
        (lambda m: m[:, :4].unflatten(1, (2, 2)), lambda m: m[:, 4:], False),
    ],
)
def test_rows_and_columns_of_a_matrix(one: Any, other: Any, overlap: bool) -> None:
    matrix = torch.zeros(6, 8)
    assert find_overlap([one(matrix), other(matrix)]) == ({0, 1} if overlap else set())


@pytest.mark.parametrize("dynamic", [{"x": {0: "T"}}, {}])
def test_a_functional_write_to_later_rows_keeps_its_target(dynamic: Any) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            m = x @ x.t() @ x
            rows = torch.arange(x.shape[0] - 1, device=x.device)
            return m[1:, 2:].index_put((rows,), x[1:, :6]), m.cumsum(0)

    x = torch.randn(5, 8)
    compiled = torchweave.compile(Module(), {"x": x}, dynamic, TorchCompileConfig(compile_cache=False))
    for one, other in itertools.zip_longest(compiled(x), Module()(x)):
        torch.testing.assert_close(one, other)
