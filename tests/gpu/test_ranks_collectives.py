"""Collectives over symmetric memory between GPUs in CUDA graphs against exact sums; timeout of a missing rank."""

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
from torchweave.distributed.process_groups import ProcessGroups, sum_of_ranks
from torchweave.distributed.symmetric_memory import (
    KernelSizeLimits,
    SymmetricCommunicator,
    enable_symmetric_memory,
    open_symmetric,
)
from torchweave.ops.collectives.all_reduce_norm import NormSpec, QuantSpec, apply_norm, quantize_norm
from torchweave.ops.collectives.op import all_reduce, communicator, register_communicator
from torchweave.report import Report

pytestmark = pytest.mark.gpu
EVERYTHING = KernelSizeLimits(slots=4 << 20, gather=64 << 20, one_shot=4 << 20, norm=4 << 20, two_shot=64 << 20)
TWO_SHOT_ONLY = replace(EVERYTHING, slots=0, one_shot=0, norm=0)
LARGE_ONLY = replace(EVERYTHING, slots=0, one_shot=64 << 20, norm=64 << 20, two_shot=0)
REPLAYS = 1000


def needs(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")


def opened(
    process_groups: ProcessGroups, size_limits: KernelSizeLimits, wait_seconds: float = 60.0
) -> SymmetricCommunicator:
    return open_symmetric(process_groups.groups["tp"], torch.device(process_groups.device), size_limits, wait_seconds)


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


def gathered(process_groups: ProcessGroups, x: Tensor) -> Tensor:
    parts = x.new_empty(process_groups.size, *x.shape)
    dist.all_gather_into_tensor(parts, x.contiguous(), group=process_groups.groups["tp"])
    return parts


def everywhere_the_same(process_groups: ProcessGroups, x: Tensor) -> None:
    parts = gathered(process_groups, x.contiguous().view(torch.uint8))
    assert all(torch.equal(parts[0], part) for part in parts[1:]), "every rank must have the same bits"


def check_sums(process_groups: ProcessGroups) -> None:
    kinds = [opened(process_groups, size_limits) for size_limits in (EVERYTHING, TWO_SHOT_ONLY, LARGE_ONLY)]
    shapes = [(1, 8), (3, 4096), (8, 4096), (65, 8192), (128, 2880), (1, 129, 5120)]
    for dtype, shape, ranks in product((torch.bfloat16, torch.float16, torch.float32), shapes, kinds):
        x = torch.empty(shape, device=process_groups.device, dtype=dtype)
        outs: list[Tensor] = []

        def run(ranks: SymmetricCommunicator = ranks, x: Tensor = x, outs: list[Tensor] = outs) -> None:
            outs[:] = [ranks.all_reduce(x), ranks.all_reduce(x + 1)]
            buffer = ranks.buffer(x.shape, x.dtype, 1)
            assert buffer is not None
            outs.append(ranks.all_reduce(buffer.copy_(x)))

        x.normal_()
        graph = graph_of(run)
        for _ in range(3):
            x.normal_()
            graph.replay()
            for out, given in zip(outs, (x, x + 1, x), strict=True):
                assert torch.equal(out, sum_of_ranks(gathered(process_groups, given))), (dtype, shape)
                everywhere_the_same(process_groups, out)


def check_gathers(process_groups: ProcessGroups) -> None:
    ranks = opened(process_groups, EVERYTHING)
    for shape, dim, dtype in (
        ((1, 64128), 1, torch.bfloat16),
        ((5, 1024), 0, torch.float32),
        ((3, 7, 96), 1, torch.uint8),
        ((300, 64128), 1, torch.bfloat16),  # more than a slot
    ):
        x = torch.empty(shape, device=process_groups.device).to(dtype)
        found: list[Tensor] = []

        def run(x: Tensor = x, dim: int = dim, found: list[Tensor] = found) -> None:
            found[:] = [ranks.all_gather(x, dim)]

        graph = graph_of(run)
        for turn in range(3):
            x.copy_(torch.randint(0, 200, shape, device=process_groups.device) + turn)
            graph.replay()
            assert torch.equal(found[0], torch.cat(list(gathered(process_groups, x)), dim)), (shape, dim)


def check_norms(process_groups: ProcessGroups) -> None:
    slots, large = opened(process_groups, EVERYTHING), opened(process_groups, LARGE_ONLY)
    scale = torch.tensor([0.02], device=process_groups.device)
    quants = (
        None,
        QuantSpec("fp8", 0),
        QuantSpec("fp8", 128),
        QuantSpec("fp8", 0, scale),
        QuantSpec("fp4", scale=scale / 50),
    )
    sizes = (
        *product((slots, large), ((1, 2048), (8, 4096), (100, 2880), (3, 8192))), (large, (1500, 4096))
    )  # fmt: skip
    for (ranks, (tokens, width)), quant, (_, options) in product(sizes, quants, DIALECTS):
        x, residual = (torch.randn(1, tokens, width, device=process_groups.device).bfloat16() for _ in range(2))
        dist.broadcast(residual, 0, group=process_groups.groups["tp"])
        weight = torch.rand(width, device=process_groups.device, dtype=torch.bfloat16)
        dist.broadcast(weight, 0, group=process_groups.groups["tp"])
        norm = NormSpec(residual, weight, 1e-5, options.get("offset", 0.0), options.get("wide", False), quant)
        found: list = []

        def run(
            ranks: SymmetricCommunicator = ranks, x: Tensor = x, norm: NormSpec = norm, found: list = found
        ) -> None:
            found[:] = [ranks.fused_all_reduce_norm(x, norm)]

        graph_of(run).replay()
        got, right = found[0], apply_norm(sum_of_ranks(gathered(process_groups, x)), replace(norm, quant=None))
        assert torch.equal(got.total, right.total)
        # A root mean square that differs in its last bit changes a normalized value by one bfloat16 step and its product by two.
        torch.testing.assert_close(got.y.float(), right.y.float(), rtol=2**-6, atol=1e-5)
        assert (got.y == right.y).float().mean() > 0.99
        if quant is not None:
            q, s = quantize_norm(got.y, quant)
            assert torch.equal(got.s.float(), s.float()) and torch.equal(got.q.view(torch.uint8), q.view(torch.uint8))
        for each in got:
            if each is not None:
                everywhere_the_same(process_groups, each)


def check_replays(process_groups: ProcessGroups) -> None:
    """Two alternating graphs of collectives of many sizes; each replay has its own operands and counts errors on the device."""
    ranks = opened(process_groups, replace(EVERYTHING, slots=1 << 18, one_shot=1 << 20))
    device = torch.device(process_groups.device)
    step, wrong = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)

    def operand(rank: int, shape: tuple[int, int], salt: int) -> Tensor:
        element = torch.arange(shape[0] * shape[1], device=device)
        return ((element * 7 + step * 13 + rank * 5 + salt) % 31 - 15).to(torch.bfloat16).view(shape)

    def run(shapes: list[tuple[int, int]], slots: list[int | None]) -> None:
        step.add_(1)
        for salt, (shape, slot) in enumerate(zip(shapes, slots, strict=True)):
            x = operand(process_groups.rank, shape, salt)
            buffer = None if slot is None else ranks.buffer(shape, x.dtype, slot)
            if buffer is not None:
                x = buffer.copy_(x)
            if (salt + process_groups.rank) % 3 == 0:
                torch.cuda._sleep(20_000)  # ranks come at different times
            expected = sum(operand(rank, shape, salt) for rank in range(process_groups.size))
            wrong.add_((ranks.all_reduce(x) != expected).sum())

    some = [(1, 4096), (8, 4096), (256, 4096), (3, 2048), (64, 8192)]
    first, second = graph_of(lambda: run(some, [0, None, 2, None, 1])), graph_of(lambda: run(some[:3], [0, 2, 1]))
    for turn in range(REPLAYS):
        (second if turn % 3 == 0 else first).replay()
    torch.cuda.synchronize()
    assert int(wrong) == 0 and int(step) >= REPLAYS and ranks.fault() is None


def check_waits_end(process_groups: ProcessGroups) -> None:
    x = torch.ones(8, 4096, device=process_groups.device, dtype=torch.bfloat16)
    ranks, impatient = opened(process_groups, EVERYTHING, 600.0), opened(process_groups, EVERYTHING, 0.5)
    if process_groups.rank == 0:  # the other rank does not take part
        begin = time.monotonic()
        ranks.all_reduce(x)
        time.sleep(0.5)
        ranks.abort()
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 10 and ranks.fault() == "a rank died"
        impatient.all_reduce(x)
        torch.cuda.synchronize()
        assert "gave up" in (impatient.fault() or "")
    process_groups.barrier()


def check_world(process_groups: ProcessGroups) -> None:
    """As an engine calls it: the op by the group's name."""
    report = Report(show=False)
    enable_symmetric_memory(process_groups, report)
    assert report.select("symmetric_memory")[0]["used"], report.select("symmetric_memory")
    assert isinstance(communicator("tp"), SymmetricCommunicator)
    for rows in (1, 100, 3000):  # by one shot, two shots and NCCL
        x = torch.full((rows, 8192), process_groups.rank + 1.0, device=process_groups.device, dtype=torch.bfloat16)
        assert bool((all_reduce(x, "tp") == process_groups.size * (process_groups.size + 1) / 2).all())
    register_communicator("tp", None)


def all_checks(process_groups: ProcessGroups, checks: list[Callable[[ProcessGroups], None]]) -> None:
    torch.manual_seed(process_groups.rank)
    for check in checks:
        check(process_groups)


CHECKS = {
    "sums": [check_sums, check_gathers],
    "norms": [check_norms],
    "replays": [check_replays, check_world, check_waits_end],
}


@pytest.mark.parametrize("checks", CHECKS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_collectives_over_symmetric_memory(size: int, checks: str) -> None:
    needs(size)
    run_ranks(all_checks, size, CHECKS[checks], device="cuda")
