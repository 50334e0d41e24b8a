"""low_rank_adapters: each linear of tokens gets the products of adapters, whatever form its weight has; others are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.passes.torch_ir.test_fp8_linears import One as Fp8
from tests.compiler.passes.torch_ir.test_int_linears import W8A8
from tests.compiler.passes.torch_ir.test_int_linears import One as Int4
from torchweave.compiler import compile_graph
from torchweave.compiler.passes.torch_ir.low_rank import LowRankAdapters
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.ops.low_rank import AdapterSlots

FX = TorchCompileConfig(enable_inductor=False)
WIDTH, RANK = 192, 3


class Transposed(nn.Module):
    """A linear as GPT-2's."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, rows)), nn.Parameter(torch.randn(rows))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(*x.shape[:-1], -1)


class Pair(nn.Module):
    """Two linears over one tensor, which later passes merge, and a head over some of its rows."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.one, self.two, self.head = make(32), make(64), nn.Linear(WIDTH, 8)

    def forward(self, input_ids: Tensor, logits_index: Tensor) -> tuple[Tensor, ...]:
        x = input_ids.float()[None] / 7
        return self.one(x), self.two(x), self.head(x[0][logits_index])


def linear(rows: int) -> nn.Module:
    return nn.Linear(WIDTH, rows)


@pytest.mark.parametrize("make", [linear, Transposed, Int4, W8A8, Fp8], ids=["linear", "Conv1D", "int4", "w8a8", "fp8"])
def test_each_linear_gets_the_products_of_its_rows(make: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    module = Pair(make).requires_grad_(False)
    inputs = {"input_ids": torch.randint(-9, 9, (23, WIDTH)), "logits_index": torch.tensor([4, 9, 22])}
    dynamic = {"input_ids": {0: "T"}, "logits_index": {0: "N"}}
    plain = compile_graph(module, inputs, dynamic, config=FX)
    slots = AdapterSlots.of(module, 2, RANK, 64, torch.device("cpu"))
    changed = compile_graph(module, inputs, dynamic, config=FX, first_passes=(LowRankAdapters(slots),))
    assert sorted(slots.places) == ["head", "one", "two"] and not slots.refusals
    for place in slots.places.values():
        place.a.normal_()
        place.b.normal_()
    for tokens in (1, 7, 30):
        ids, index = torch.randint(-9, 9, (tokens, WIDTH)), torch.tensor([tokens - 1, 0])
        slots.index[:tokens] = torch.randint(0, 3, (tokens,))
        x, expected = ids.float() / 7, plain(call_op, ids, index)
        rows = {"one": slice(None), "two": slice(None), "head": index}
        for name, base, got in zip(("one", "two", "head"), expected, changed(call_op, ids, index), strict=True):
            at = slots.index[:tokens][rows[name]]
            place, base, got = slots.places[name], base.view(-1, base.shape[-1]), got.view(-1, got.shape[-1])
            for row, number in enumerate(at.tolist()):
                if number == 0:
                    assert torch.equal(got[row], base[row])
                    continue
                added = place.b[number - 1] @ (place.a[number - 1] @ x[rows[name]][row])
                torch.testing.assert_close(got[row], base[row] + added, rtol=1e-4, atol=1e-3)


class Read(nn.Module):
    """A weight that is read beside its product, one whose rows are no tokens, and one that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.fixed, self.plain, self.one, self.same = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.same.weight = self.one.weight
        self.register_buffer("rows", torch.randn(5, WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = input_ids.float()
        return self.plain(self.read(self.one(self.same(x)))) + self.read.weight.sum() + self.fixed(self.rows).sum()


def test_linears_without_a_place_say_why() -> None:
    module = Read().requires_grad_(False)
    slots = AdapterSlots.of(module, 1, RANK, 64, torch.device("cpu"))
    ids = torch.ones(23, WIDTH, dtype=torch.int64)
    compiled = compile_graph(
        module, {"input_ids": ids}, {"input_ids": {0: "T"}}, config=FX, first_passes=(LowRankAdapters(slots),)
    )
    assert list(slots.places) == ["plain"]
    assert slots.refusals == {
        "read": "its weight is read by more than products", "fixed": "its rows are not the tokens of a step",
        "one": "it has the weight of same", "same": "it has the weight of one",
    }  # fmt: skip
    slots.index[:] = 1
    torch.testing.assert_close(compiled(call_op, ids[:7]), module(ids[:7]))


def test_a_linear_reads_what_the_adapter_made_of_another_one() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, 8), nn.Linear(8, 4)).requires_grad_(False)
    slots = AdapterSlots.of(module, 1, RANK, 64, torch.device("cpu"))
    x = torch.randn(23, WIDTH)
    compiled = compile_graph(
        module, {"input": x}, {"input": {0: "T"}}, config=FX, first_passes=(LowRankAdapters(slots),)
    )
    slots.index[:] = 1
    expected = x
    for name, place in sorted(slots.places.items()):
        place.a.normal_()
        place.b.normal_()
        expected = module[int(name)](expected) + expected @ place.a[0].t() @ place.b[0].t()
    assert len(slots.places) == 3
    torch.testing.assert_close(compiled(call_op, x), expected, rtol=1e-4, atol=1e-3)
