"""Collectives over symmetric memory between GPUs, in CUDA graphs, against exact sums; what happens when a rank does not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.fusion_cases import DIALECTS
from tests.ranks import run_ranks
from torchweave.distributed.communicator import sum_of_ranks
from torchweave.distributed.process_groups import World
from torchweave.distributed.symmetric_memory import Ranges, SymmetricCommunicator, connect, open_symmetric
from torchweave.ops.collectives.all_reduce_norm import Norm, Quant, norm_of, quantized
from torchweave.ops.collectives.op import all_reduce, communicator, register_communicator
from torchweave.report import Report

pytestmark = pytest.mark.gpu
EVERYTHING = Ranges(slots=4 << 20, gather=64 << 20, one_shot=4 << 20, norm=4 << 20, two_shot=64 << 20)
TWO_SHOT_ONLY = replace(EVERYTHING, slots=0, one_shot=0, norm=0)
LARGE_ONLY = replace(EVERYTHING, slots=0, one_shot=64 << 20, norm=64 << 20, two_shot=0)
REPLAYS = 1000


def needs(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")


def opened(world: World, ranges: Ranges, wait_seconds: float = 60.0) -> SymmetricCommunicator:
    return open_symmetric(world.groups["tp"], torch.device(world.device), ranges, wait_seconds)


def graph_of(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def gathered(world: World, x: Tensor) -> Tensor:
    parts = x.new_empty(world.size, *x.shape)
    dist.all_gather_into_tensor(parts, x.contiguous(), group=world.groups["tp"])
    return parts


def everywhere_the_same(world: World, x: Tensor) -> None:
    parts = gathered(world, x.contiguous().view(torch.uint8))
    assert all(torch.equal(parts[0], part) for part in parts[1:]), "every rank must have the same bits"


def check_sums(world: World) -> None:
    kinds = [opened(world, ranges) for ranges in (EVERYTHING, TWO_SHOT_ONLY, LARGE_ONLY)]
    shapes = [(1, 8), (3, 4096), (8, 4096), (65, 8192), (128, 2880), (1, 129, 5120)]
    for dtype, shape, ranks in product((torch.bfloat16, torch.float16, torch.float32), shapes, kinds):
        x = torch.empty(shape, device=world.device, dtype=dtype)
        outs: list[Tensor] = []

        def run(ranks: SymmetricCommunicator = ranks, x: Tensor = x, outs: list[Tensor] = outs) -> None:
            outs[:] = [ranks.all_reduce(x), ranks.all_reduce(x + 1)]
            room = ranks.buffer(x.shape, x.dtype, 1)
            assert room is not None
            outs.append(ranks.all_reduce(room.copy_(x)))

        x.normal_()
        graph = graph_of(run)
        for _ in range(3):
            x.normal_()
            graph.replay()
            for out, given in zip(outs, (x, x + 1, x), strict=True):
                assert torch.equal(out, sum_of_ranks(gathered(world, given))), (dtype, shape)
                everywhere_the_same(world, out)


def check_gathers(world: World) -> None:
    ranks = opened(world, EVERYTHING)
    for shape, dim, dtype in (
        ((1, 64128), 1, torch.bfloat16),
        ((5, 1024), 0, torch.float32),
        ((3, 7, 96), 1, torch.uint8),
        ((300, 64128), 1, torch.bfloat16),  # more than a slot
    ):
        x = torch.empty(shape, device=world.device).to(dtype)
        found: list[Tensor] = []

        def run(x: Tensor = x, dim: int = dim, found: list[Tensor] = found) -> None:
            found[:] = [ranks.all_gather(x, dim)]

        graph = graph_of(run)
        for turn in range(3):
            x.copy_(torch.randint(0, 200, shape, device=world.device) + turn)
            graph.replay()
            assert torch.equal(found[0], torch.cat(list(gathered(world, x)), dim)), (shape, dim)


def check_norms(world: World) -> None:
    slots, large = opened(world, EVERYTHING), opened(world, LARGE_ONLY)
    scale = torch.tensor([0.02], device=world.device)
    quants = (None, Quant("fp8", 0), Quant("fp8", 128), Quant("fp8", 0, scale), Quant("fp4", scale=scale / 50))
    sizes = (
        *product((slots, large), ((1, 2048), (8, 4096), (100, 2880), (3, 8192))), (large, (1500, 4096))
    )  # fmt: skip
    for (ranks, (tokens, width)), quant, (_, options) in product(sizes, quants, DIALECTS):
        x, residual = (torch.randn(1, tokens, width, device=world.device).bfloat16() for _ in range(2))
        dist.broadcast(residual, 0, group=world.groups["tp"])
        weight = torch.rand(width, device=world.device, dtype=torch.bfloat16)
        dist.broadcast(weight, 0, group=world.groups["tp"])
        norm = Norm(residual, weight, 1e-5, options.get("offset", 0.0), options.get("wide", False), quant)
        found: list = []

        def run(ranks: SymmetricCommunicator = ranks, x: Tensor = x, norm: Norm = norm, found: list = found) -> None:
            found[:] = [ranks.reduced_norm(x, norm)]

        graph_of(run).replay()
        got, right = found[0], norm_of(sum_of_ranks(gathered(world, x)), replace(norm, quant=None))
        assert torch.equal(got.total, right.total)
        torch.testing.assert_close(got.y.float(), right.y.float(), rtol=2**-7, atol=1e-5)
        assert (got.y == right.y).float().mean() > 0.99
        if quant is not None:
            q, s = quantized(got.y, quant)
            assert torch.equal(got.s.float(), s.float()) and torch.equal(got.q.view(torch.uint8), q.view(torch.uint8))
        for each in got:
            if each is not None:
                everywhere_the_same(world, each)


def check_replays(world: World) -> None:
    """Two graphs in turn, of collectives of many sizes; each replay has operands of its own and counts what is wrong itself."""
    ranks = opened(world, replace(EVERYTHING, slots=1 << 18, one_shot=1 << 20))
    device = torch.device(world.device)
    step, wrong = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)

    def operand(rank: int, shape: tuple[int, int], salt: int) -> Tensor:
        element = torch.arange(shape[0] * shape[1], device=device)
        return ((element * 7 + step * 13 + rank * 5 + salt) % 31 - 15).to(torch.bfloat16).view(shape)

    def run(shapes: list[tuple[int, int]], slots: list[int | None]) -> None:
        step.add_(1)
        for salt, (shape, slot) in enumerate(zip(shapes, slots, strict=True)):
            x = operand(world.rank, shape, salt)
            room = None if slot is None else ranks.buffer(shape, x.dtype, slot)
            if room is not None:
                x = room.copy_(x)
            if (salt + world.rank) % 3 == 0:
                torch.cuda._sleep(20_000)  # ranks come at different times
            expected = sum(operand(rank, shape, salt) for rank in range(world.size))
            wrong.add_((ranks.all_reduce(x) != expected).sum())

    some = [(1, 4096), (8, 4096), (256, 4096), (3, 2048), (64, 8192)]
    first, second = graph_of(lambda: run(some, [0, None, 2, None, 1])), graph_of(lambda: run(some[:3], [0, 2, 1]))
    for turn in range(REPLAYS):
        (second if turn % 3 == 0 else first).replay()
    torch.cuda.synchronize()
    assert int(wrong) == 0 and int(step) >= REPLAYS and ranks.fault() is None


def check_waits_end(world: World) -> None:
    x = torch.ones(8, 4096, device=world.device, dtype=torch.bfloat16)
    ranks, impatient = opened(world, EVERYTHING, 600.0), opened(world, EVERYTHING, 0.5)
    if world.rank == 0:  # nobody else comes
        begin = time.monotonic()
        ranks.all_reduce(x)
        time.sleep(0.5)
        ranks.abort()
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 10 and ranks.fault() == "a rank died"
        impatient.all_reduce(x)
        torch.cuda.synchronize()
        assert "gave up" in (impatient.fault() or "")
    world.barrier()


def check_world(world: World) -> None:
    """What an engine does: the op by the group's name."""
    report = Report(show=False)
    connect(world, report)
    assert report.select("symmetric_memory")[0]["used"], report.select("symmetric_memory")
    assert isinstance(communicator("tp"), SymmetricCommunicator)
    for rows in (1, 100, 3000):  # by one shot, two shots and NCCL
        x = torch.full((rows, 8192), world.rank + 1.0, device=world.device, dtype=torch.bfloat16)
        assert bool((all_reduce(x, "tp") == world.size * (world.size + 1) / 2).all())
    register_communicator("tp", None)


def all_checks(world: World, checks: list[Callable[[World], None]]) -> None:
    torch.manual_seed(world.rank)
    for check in checks:
        check(world)


CHECKS = {
    "sums": [check_sums, check_gathers],
    "norms": [check_norms],
    "replays": [check_replays, check_world, check_waits_end],
}


@pytest.mark.parametrize("checks", CHECKS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_T7_collectives_over_symmetric_memory(size: int, checks: str) -> None:
    needs(size)
    run_ranks(all_checks, size, CHECKS[checks], device="cuda")
