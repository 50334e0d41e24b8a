"""Run by test_experts with TRITON_INTERPRET=1: every GPU strategy against float64, and its workspace."""

from __future__ import annotations

import itertools
import sys
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.moe.experts_cases import FORMS, call_of, cases, expected
from torchweave.ops.moe.experts import ExpertsCall
from torchweave.ops.moe.fused_experts import GemmConfig, Grouped, Rows, Strategy, Tiles, bytes_per_pair, run

ROWS = (Rows(GemmConfig(4, 32, 4, 2), GemmConfig(2, 16, 4, 1)), Rows(GemmConfig(8, 16, 4, 1), GemmConfig(16, 8, 4, 1)))
TILES = (
    Tiles(GemmConfig(8, 16, 4, 2), GemmConfig(16, 16, 4, 2)),
    Tiles(GemmConfig(16, 32, 4, 2), GemmConfig(32, 32, 4, 2), block_m=32),
)

GROUPED = Grouped(GemmConfig(32, 32, 4, 2), GemmConfig(32, 32, 4, 2), block_m=16)


def strategies(call: ExpertsCall) -> tuple[Strategy, ...]:
    """The strategies that can run a call."""
    few = ROWS if call.num_tokens <= 2 and not call.form.transposed else ()
    early = (replace(ROWS[0], early=True),) if few and call.shared else ()
    return (*few, *early, *TILES, GROUPED)


def check(call: ExpertsCall, strategy: Strategy) -> torch.Tensor:
    out = torch.full_like(call.out, torch.nan)
    run(replace(call, out=out), strategy)
    torch.testing.assert_close(
        out.double(), expected(call), rtol=1e-4, atol=1e-4, msg=lambda text: f"{strategy} {call.form}: {text}"
    )
    return out


def agree() -> None:
    for form, tokens in itertools.product(FORMS.values(), (1, 2, 19)):
        call = call_of(cases(tokens, **form))
        for strategy in strategies(call):
            left_out = {1: (GROUPED,), 2: (TILES[0], GROUPED)}.get(tokens, ())
            if strategy not in (TILES[1], *left_out):
                check(call, strategy)  # the others run in the other checks


def follow_skewed_and_foreign_routing() -> None:
    """All tokens at one expert (more than a tile holds), and experts of another rank."""
    crowded = cases(40)
    crowded["index"][:, 0] = 3
    foreign = cases(9)
    foreign["index"][::2, 1] = foreign["up"].shape[0] + 3
    alone = cases(2)
    alone["index"][0] = alone["up"].shape[0]
    for case in (crowded, foreign, alone):
        for strategy in strategies(call_of(case)):
            check(call_of(case), strategy)


class _Live(TorchDispatchMode):
    """Bytes of the tensors that are made while it is active, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and not func.is_view and func._schema.returns[0].alias_info is None:
                size = tensor.untyped_storage().nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor, self._freed, size)
        return result

    def _freed(self, size: int) -> None:
        self.now -= size


def stay_within_the_workspace() -> None:
    """Chunking does not change the result, and the workspace is that of the largest chunk."""
    call = call_of(cases(64))
    for strategy in (TILES[1], GROUPED):
        whole = check(call, strategy)
        needed = []
        for chunk in (64, 24, 8):
            workspace = chunk * call.top_k * bytes_per_pair(call, strategy)
            out = torch.full_like(call.out, torch.nan)
            with _Live() as live:
                run(replace(call, out=out), strategy, workspace=workspace)
            # Not to the bit: where a row stands in a tile is one more thing that the last bit of NumPy's product
            # depends on, on CPUs without AVX-512.
            torch.testing.assert_close(out, whole)
            fixed = 4 * (3 * call.num_experts + 2)
            assert 0.8 * workspace < live.peak <= workspace + fixed, (strategy, chunk, live.peak, workspace)
            needed.append(live.peak)
        assert needed[0] > needed[1] > needed[2], needed


def sort_many_pairs() -> None:
    """Blocks of pairs keep their order; tiles are as many as each expert's rows fill; experts of other ranks have none."""
    from torchweave.ops.kernels.moe.sort_pairs import BLOCK_PAIRS, launch_sort_pairs, launch_sort_tiles

    index = torch.randint(0, 7, (BLOCK_PAIRS, 3))
    index[:400] = 2
    index[index == 4] = 3
    index[index == 6] = 1000
    got = launch_sort_tiles(index, 6, 32)
    counts = index.flatten().bincount(minlength=1001)[:6]
    assert got.ends.equal(counts.cumsum(0).int()) and got.rows.equal(index.flatten().argsort(stable=True).int())
    for single, several in zip(launch_sort_pairs(index, 6), got[:2], strict=True):
        assert single.equal(several)
    numbers = (counts + 31) // 32
    tiles = [(e, int(numbers[:e].sum())) for e in range(6) for _ in range(int(numbers[e]))]
    assert int(got.tiles[0, 0]) == len(tiles) <= got.tiles.shape[1] - 1
    assert list(zip(*got.tiles[:, 1 : 1 + len(tiles)].tolist(), strict=True)) == tiles


CHECKS = {
    check.__name__: check
    for check in (agree, follow_skewed_and_foreign_routing, sort_many_pairs, stay_within_the_workspace)
}

if __name__ == "__main__":
    torch.manual_seed(0)
    CHECKS[sys.argv[1]]()
