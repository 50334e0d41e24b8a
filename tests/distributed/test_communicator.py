"""Collectives over gloo, 2 ranks: exact sums in the order of ranks, the same bits everywhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from torchweave.distributed.communicator import ProcessGroupCommunicator, sum_of_ranks
from torchweave.ops.collectives import all_gather, all_reduce, reduce_scatter, register_communicator

SIZE = 2


def operand(rank: int, tokens: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank + tokens)
    return torch.randn(1, tokens, 24, generator=generator).to(dtype)


def check(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    assert dist.group.WORLD is not None
    register_communicator("tp", ProcessGroupCommunicator(dist.group.WORLD))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32):
        for tokens in (1, 5):
            mine = operand(rank, tokens, dtype)
            parts = torch.stack([operand(each, tokens, dtype) for each in range(SIZE)])
            total = all_reduce(mine, "tp")
            assert total.dtype == dtype and torch.equal(total, sum_of_ranks(parts))
            for dim in (0, 1, -1):
                assert torch.equal(all_gather(mine, dim, "tp"), torch.cat(list(parts), dim))
            own = reduce_scatter(mine, "tp")
            assert torch.equal(all_gather(own, -2, "tp")[:, :tokens], total)
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_collectives_over_gloo(tmp_path: Path) -> None:
    mp.spawn(check, (os.fspath(tmp_path / "store"),), nprocs=SIZE)


def test_sums_are_rounded_once() -> None:
    parts = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    assert (parts[0] + parts[1] + parts[2]).item() == 1.0, "rounding twice must show"
    assert sum_of_ranks(parts).item() == 1 + 2**-7
