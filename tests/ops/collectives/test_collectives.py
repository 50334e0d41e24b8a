"""Collective ops in one process: shapes with symbolic T, opcheck, and the error for an unknown group."""

from __future__ import annotations

import pytest
import torch

from tests.ops.collectives.collective_cases import mirrored
from torchweave.ops.collectives.op import all_gather, all_reduce, reduce_scatter


def test_opcheck() -> None:
    x = torch.randn(1, 5, 16)
    with mirrored(size=2, rank=1) as group:
        torch.library.opcheck(all_reduce, (x, group))
        for dim in (0, -2, -1):
            torch.library.opcheck(all_gather, (x, dim, group))
        torch.library.opcheck(reduce_scatter, (x, group))


@pytest.mark.parametrize("size", [2, 4])
def test_scattered_rows_gather_to_the_reduced_ones(size: int) -> None:
    for tokens in (1, 5, 8):
        x = torch.randn(1, tokens, 6)
        own = -(-tokens // size)
        rows = []
        for rank in range(size):
            with mirrored(size=size, rank=rank) as group:
                rows.append(reduce_scatter(x, group))
                assert rows[-1].shape == (1, own, 6) and rows[-1].is_contiguous()
                assert all_gather(rows[-1], -2, group).shape == (1, own * size, 6)
                whole = all_reduce(x, group)
        joined = torch.cat(rows, -2)
        assert torch.equal(joined[:, :tokens], whole) and not joined[:, tokens:].any()


def test_one_graph_for_all_token_counts() -> None:
    def block(x: torch.Tensor, group: str) -> torch.Tensor:
        rows = x.shape[-2]
        return all_gather(reduce_scatter(x, group) + 1, -2, group).narrow(-2, 0, rows) + all_reduce(x, group)

    with mirrored() as group:
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for tokens in (6, 5, 9):
                x = torch.randn(1, tokens, 4)
                assert torch.equal(compiled(x, group), block(x, group))


def test_results_never_alias() -> None:
    x = torch.randn(4, 4)
    with mirrored(size=1) as group:
        for y in (all_reduce(x, group), all_gather(x, 0, group), reduce_scatter(x, group)):
            assert y.data_ptr() != x.data_ptr()


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(ValueError, match="no group of ranks 'tq'"):
        all_reduce(torch.randn(2), "tq")
