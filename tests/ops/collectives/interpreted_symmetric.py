"""Run by test_symmetric with TRITON_INTERPRET=1: what the kernels of all ranks compute together, against sums in their order.

Each phase of a kernel is run for every rank before the next one, as if the ranks had met in between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from tests.ops.collectives.symmetric_cases import workspaces
from torchweave.distributed.process_groups import sum_of_ranks
from torchweave.ops.collectives.all_reduce_norm import NormOutput, NormSpec, QuantSpec, apply_norm, empty_norm_output
from torchweave.ops.kernels.collectives import all_reduce, all_reduce_norm
from torchweave.ops.kernels.collectives.all_reduce import launch_gather, launch_one_shot, launch_two_shot
from torchweave.ops.kernels.collectives.all_reduce_norm import launch_one_shot_norm
from torchweave.ops.kernels.collectives.workspace import Programs, SymmetricLayout, SymmetricWorkspace
from torchweave.ops.quant.fp8 import FP8, quantize
from torchweave.ops.quant.nvfp4 import fp4_scale_from_amax, quantize_fp4

LAYOUT_BYTES = 1 << 16
PROGRAMS = 3
"""Few programs, so that each loops several times and the interpreter has little work."""


def operands(size: int, *shape: int, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return [torch.randn(*shape).to(dtype) for _ in range(size)]


def one_shot() -> None:
    for size, shape in ((2, (3, 8)), (4, (5, 1000)), (8, (33, 264))):
        spaces = workspaces(SymmetricLayout(size, LAYOUT_BYTES, 0))
        for turn in range(4):
            x = operands(size, *shape, dtype=torch.float32 if turn == 1 else torch.float16)
            given, outs = list(x), [torch.empty_like(each) for each in x]
            if turn == 3:  # written by whoever made it
                given = [
                    space.buffer(shape, each.dtype, space.slot(1)).copy_(each)
                    for space, each in zip(spaces, x, strict=True)
                ]
            for phase, (space, mine, out) in product((1, 4), list(zip(spaces, given, outs, strict=True))):
                launch_one_shot(space, mine, out, space.locate_operand(mine), phase)
            assert all(torch.equal(out, sum_of_ranks(torch.stack(x))) for out in outs), (size, shape, turn)
        assert all(space.counters[0][:PROGRAMS].eq(4).all() and space.counters[1].eq(0).all() for space in spaces)


def over_data(launch: Callable[..., None], phases: tuple[int, ...]) -> None:
    """A collective with two barriers over the slot of large operands."""
    for size, shape in ((2, (3, 8)), (4, (5, 1000)), (8, (33, 264))):
        spaces = workspaces(SymmetricLayout(size, 0, LAYOUT_BYTES))
        for turn in range(3):
            x = operands(size, *shape)
            given, outs = list(x), [torch.full_like(each, torch.nan) for each in x]
            if turn == 2:
                rooms = [space.buffer(shape, x[0].dtype, space.layout.data) for space in spaces]
                given = [buffer.copy_(each) for buffer, each in zip(rooms, x, strict=True)]
            for phase, (space, mine, out) in product(phases, list(zip(spaces, given, outs, strict=True))):
                launch(space, mine, out, space.locate_operand(mine), phase)
            assert all(torch.equal(out, sum_of_ranks(torch.stack(x))) for out in outs), (size, shape, turn)
        assert all(space.counters[1][:PROGRAMS].eq(6).all() and space.counters[0].eq(0).all() for space in spaces)


def gather() -> None:
    for size, shape, dim, large in ((2, (3, 8), 0, 0), (4, (5, 264), 1, 0), (8, (3, 2, 16), 1, 0), (2, (5, 264), 1, 1)):
        spaces = workspaces(SymmetricLayout(size, *((0, LAYOUT_BYTES) if large else (LAYOUT_BYTES, 0))))
        for _ in range(2):
            x = operands(size, *shape)
            right = torch.cat(x, dim)
            outs, inner = [torch.empty_like(right) for _ in x], x[0][(0,) * dim].numel() // 2
            for phase, (space, mine, out) in product((1, 4), list(zip(spaces, x, outs, strict=True))):
                launch_gather(space, mine.view(-1).view(torch.int32), out.view(-1).view(torch.int32), inner, phase)
            assert all(torch.equal(out, right) for out in outs), (size, shape, dim)


def norm() -> None:
    given, tensor_scale = torch.tensor([0.02]), fp4_scale_from_amax(torch.tensor(6.0))
    quants = (
        None, QuantSpec("fp8", 0, given), QuantSpec("fp8", 0), QuantSpec("fp8", 128), QuantSpec("fp4", scale=tensor_scale)
    )  # fmt: skip
    cases = [(2, 4, 208, quant) for quant in quants] + [(4, 2, 64, None), (8, 2, 64, quants[2])]
    for index, (size, tokens, width, quant) in enumerate(cases):
        spaces = workspaces(SymmetricLayout(size, *((0, LAYOUT_BYTES) if index % 2 else (LAYOUT_BYTES, 0))))
        for offset, wide, add in ((0.0, False, True), (1.0, True, False)):
            x, residual, weight = operands(size, 1, tokens, width), *operands(2, 1, tokens, width)
            norms = NormSpec(residual if add else None, weight[0, 0], 1e-5, offset, wide, quant)
            right = apply_norm(sum_of_ranks(torch.stack(x)), replace(norms, quant=None))
            least = replace(norms, keep_norm=quant is None, keep_sum=False)
            for out, less in zip(launched(spaces, x, norms), launched(spaces, x, least), strict=True):
                compare(out, right, quant)
                assert less.total is None and (less.y is None) == (quant is not None)
                kept = [name for name in ("y", "q", "s") if getattr(less, name) is not None]
                assert all(torch.equal(getattr(less, name), getattr(out, name)) for name in kept), kept


def launched(spaces: list[SymmetricWorkspace], x: list[Tensor], norms: NormSpec) -> list[NormOutput]:
    """Results of the kernel on every rank."""
    outs = [empty_norm_output(each, norms) for each in x]
    outs = [out if out.q is None else out._replace(q=_wide(out.q), s=_wide(out.s)) for out in outs]
    for phase, (space, mine, out) in product((1, 4), list(zip(spaces, x, outs, strict=True))):
        launch_one_shot_norm(space, mine, norms, out, space.locate_operand(mine), phase)
    return outs


def _wide(tensor: Tensor | None) -> Tensor | None:
    """The interpreter does not round to e4m3 as GPUs do: kernels leave that cast to torch."""
    return tensor.float() if tensor is not None and tensor.dtype == FP8 else tensor


def compare(out: NormOutput, right: NormOutput, quant: QuantSpec | None) -> None:
    """The sum is bitwise equal, its norm up to the order of the sum of squares, and that norm is what is quantized."""
    assert torch.equal(out.total, right.total)
    torch.testing.assert_close(out.y.float(), right.y.float(), rtol=2**-10, atol=1e-6)
    assert (out.y == right.y).float().mean() > 0.99
    if quant is not None:
        q, s = quantize(out.y, quant.group, quant.scale) if quant.to == "fp8" else quantize_fp4(out.y, quant.scale)
        assert torch.equal(out.s.float(), s.float())
        assert torch.equal(out.q.to(q.dtype).view(torch.uint8), q.view(torch.uint8))


CHECKS = {
    "one_shot": one_shot,
    "large one_shot": partial(over_data, launch_one_shot, (1, 4)),
    "two_shot": partial(over_data, launch_two_shot, (1, 4, 8)),
    "gather": gather,
    "norm": norm,
}

if __name__ == "__main__":
    all_reduce_norm.PROGRAMS = all_reduce.PROGRAMS = Programs(PROGRAMS, PROGRAMS)
    for wanted in sys.argv[1:] or tuple(CHECKS):
        torch.manual_seed(0)
        CHECKS[wanted]()
