"""Collectives and their fusions over gloo, 2 ranks: exact sums in rank order, bitwise equal on all ranks."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from tests.ops.fusion_cases import DIALECTS, norm64
from tests.ranks import run_ranks
from torchweave.distributed import symmetric_memory
from torchweave.distributed.process_groups import ProcessGroupCommunicator, ProcessGroups, sum_of_ranks
from torchweave.ops.collectives.all_reduce_norm import (
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_fp4,
    all_reduce_add_rms_norm_fp8,
)
from torchweave.ops.collectives.op import (
    all_gather,
    all_reduce,
    group_size,
    own_rows,
    reduce_scatter,
    register_communicator,
)
from torchweave.ops.quant.fp8 import GROUP, fp8_quant
from torchweave.ops.quant.nvfp4 import dequantize_fp4, fp4_quant, fp4_scale_from_amax

SIZE, EPS = 2, 1e-5


def operand(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def exchange(process_groups: ProcessGroups) -> None:
    for dtype, tokens in product((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32), (1, 5)):
        parts = torch.stack([operand(each, 1, tokens, 24, dtype=dtype) for each in range(SIZE)])
        mine = parts[process_groups.rank]
        total = all_reduce(mine, "tp")
        assert total.dtype == dtype and torch.equal(total, sum_of_ranks(parts))
        for dim in (0, 1, -1):
            assert torch.equal(all_gather(mine, dim, "tp"), torch.cat(list(parts), dim))
        own = reduce_scatter(mine, "tp")
        assert torch.equal(own, own_rows(total, process_groups.rank, SIZE))
        assert torch.equal(all_gather(own, -2, "tp")[:, :tokens], total)


def fuse(process_groups: ProcessGroups, dtype: torch.dtype) -> None:
    """Each fused op is its parts to the bit, and near what float64 gives."""
    parts = torch.stack([operand(each, 1, 5, 256, dtype=dtype) for each in range(SIZE)])
    added, weight = operand(7, 1, 5, 256, dtype=dtype), operand(8, 256, dtype=dtype)
    mine, total = parts[process_groups.rank], sum_of_ranks(parts)
    unit = torch.finfo(dtype).eps
    for residual, (_, options) in product((added, None), DIALECTS):
        offset, wide = options.get("offset", 0.0), options.get("wide", False)
        dialect = (residual, weight, EPS, offset, wide)
        h = total if residual is None else total + residual
        y, kept = all_reduce_add_rms_norm(mine, *dialect, True, "tp")
        sum64 = parts.double().sum(0) + (0.0 if residual is None else residual.double())
        assert kept.equal(h)
        torch.testing.assert_close(y.double(), norm64(sum64, weight, EPS, offset), rtol=4 * unit, atol=8 * unit)
        alone, nothing = all_reduce_add_rms_norm(mine, *dialect, False, "tp")
        assert alone.equal(y) and nothing.shape == (0,)
        for group, scale in ((0, None), (GROUP, None), (0, torch.tensor([0.02]))):
            right = fp8_quant(y, group, scale)
            for keep in (True, False):
                q, s, also, kept = all_reduce_add_rms_norm_fp8(mine, *dialect, group, scale, keep, keep, "tp")
                assert q.float().equal(right[0].float()) and s.equal(right[1])
                assert also.equal(y) and kept.equal(h) if keep else also.shape == kept.shape == (0,)
        scale = fp4_scale_from_amax(y.abs().max())
        q, s, also, kept = all_reduce_add_rms_norm_fp4(mine, *dialect, scale, True, True, "tp")
        assert q.equal(fp4_quant(y, scale)[0]) and also.equal(y) and kept.equal(h)
        stands_for = dequantize_fp4(q, s, torch.float64) * scale
        assert bool(((stands_for - y.double()).abs() <= y.abs().double() / 4 + float(y.abs().max()) / 12).all())


def all_checks(process_groups: ProcessGroups) -> list[bytes]:
    register_communicator("tp", ProcessGroupCommunicator(process_groups.groups["tp"]))
    assert group_size("tp") == SIZE
    exchange(process_groups)
    fuse(process_groups, torch.float32)
    fuse(process_groups, torch.bfloat16)
    mine = operand(process_groups.rank, 3, 64, dtype=torch.bfloat16)
    return [all_reduce(mine, "tp").view(torch.uint8).numpy().tobytes()]


def test_collectives_and_fusions_over_gloo() -> None:
    first, second = run_ranks(all_checks, SIZE)
    assert first == second, "every rank must have the same bits: sampling is replicated"


def test_sums_are_rounded_once() -> None:
    parts = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    assert (parts[0] + parts[1] + parts[2]).item() == 1.0, "rounding twice must show"
    assert sum_of_ranks(parts).item() == 1 + 2**-7


def _again(process_groups: ProcessGroups) -> tuple[str, str]:
    group = process_groups.groups["tp"]
    first = symmetric_memory.agreed_refusal(group)
    if process_groups.rank == 1:  # its process had an engine before
        symmetric_memory._groups_with_symmetric_memory.add(group.group_name)
    return first, symmetric_memory.agreed_refusal(group)


def test_second_engine_of_a_process_uses_nccl_on_all_ranks():
    found = run_ranks(_again, 2)
    assert found[0] == found[1]
    assert found[0][0] == "" and "before" in found[0][1]
