"""Patterns over ops that write into their arguments, and shapes computed in patterns: SGLang's fused SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

import torchweave
from torchweave.compiler import Fusion
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

aten = torch.ops.aten


@torch.library.custom_op("seeds::silu_and_mul", mutates_args=("out",))
def silu_and_mul(out: Tensor, input: Tensor) -> None:
    gate, up = input.chunk(2, -1)
    out.copy_(F.silu(gate) * up)


@silu_and_mul.register_fake
def _(out: Tensor, input: Tensor) -> None: ...


@torch.library.custom_op("seeds::fused_swiglu", mutates_args=())
def fused_swiglu(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w).chunk(2, -1)
    return F.silu(gate) * up


@fused_swiglu.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1] // 2)


def fused_swiglu_pattern(x: Tensor, w: Tensor):
    mm = aten.mm.default(x, w)
    result = aten.empty.memory_format(
        [mm.shape[0], mm.shape[1] // 2], dtype=mm.dtype, device=mm.device, pin_memory=False
    )
    at: Any = auto_functionalized_v2(
        torch.ops.seeds.silu_and_mul.default, input=mm, _out_base_index=0, _all_bases=[result]
    )
    return at[1]


def first_version(x: Tensor, w: Tensor):
    mm = aten.mm.default(x, w)
    at: Any = auto_functionalized(torch.ops.seeds.silu_and_mul.default, input=mm, out=torch.empty_like(mm))
    return at[1]


def fused_swiglu_replacement(x: Tensor, w: Tensor):
    return torch.ops.seeds.fused_swiglu.default(x, w)


class SwiGLU(nn.Module):
    """`up` computes the product, `buffer` the tensor that the activation is written into."""

    def __init__(self, up: Callable[..., Tensor], buffer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, 32), requires_grad=False)
        self.up, self.buffer = up, buffer

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x, self.weight)
        out = self.buffer(y)
        torch.ops.seeds.silu_and_mul(out, y)
        return out + 1


def half(y: Tensor) -> Tensor:
    return torch.empty((y.shape[0], y.shape[1] // 2), dtype=y.dtype, device=y.device)


def compiled_facts(module: nn.Module, pattern: Any) -> dict[str, Any]:
    """Facts of the pass, after a comparison with the module."""
    report = Report(show=False)
    config = TorchCompileConfig(enable_inductor=False, compile_cache=False)
    passes = [Fusion("fused_swiglu", pattern, fused_swiglu_replacement)]
    compiled = torchweave.compile(module, {"x": torch.randn(5, 16)}, {"x": {0: "T"}}, config, report, passes)
    for tokens in (1, 7):
        x = torch.randn(tokens, 16)
        torch.testing.assert_close(compiled(x), module(x))
    (facts,) = report.select("pass")
    return facts


def test_sglangs_fused_swiglu_matches_as_its_rfc_writes_it() -> None:
    facts = compiled_facts(SwiGLU(torch.mm, half), fused_swiglu_pattern)
    assert (facts["matches"], facts["near_misses"]) == (1, [])
    assert facts["diff"]["seeds.fused_swiglu.default"] == 1 and facts["diff"]["auto_functionalized_v2"] == -1


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (SwiGLU(torch.matmul, half), "matmul is aten.matmul.default, not aten.mm.default"),
        (
            SwiGLU(torch.mm, lambda y: torch.zeros(y.shape[0], 16)),
            "is aten.zeros.default, not aten.empty.memory_format",
        ),
    ],
)
def test_a_place_with_the_same_op_that_does_not_match_says_why(module: nn.Module, why: str) -> None:
    facts = compiled_facts(module, fused_swiglu_pattern)
    assert facts["matches"] == 0 and why in " ".join(facts["near_misses"])


def test_other_arguments_of_the_same_op_are_named() -> None:
    def without_index(x: Tensor, w: Tensor):
        mm = aten.mm.default(x, w)
        at: Any = auto_functionalized_v2(torch.ops.seeds.silu_and_mul.default, input=mm, _all_bases=[mm])
        return at[1]

    facts = compiled_facts(SwiGLU(torch.mm, half), without_index)
    (miss,) = facts["near_misses"]
    assert miss.endswith("has the arguments input _out_base_index _all_bases, not input _all_bases")


def test_a_shape_that_differs_is_named_with_what_the_pattern_computes() -> None:
    def third(x: Tensor, w: Tensor):
        mm = aten.mm.default(x, w)
        shape = [mm.size(0), mm.shape[-1] - 15]
        result = aten.empty.memory_format(shape, dtype=mm.dtype, device=mm.device, pin_memory=False)
        op = torch.ops.seeds.silu_and_mul.default
        at: Any = auto_functionalized_v2(op, input=mm, _out_base_index=0, _all_bases=[result])
        return at[1]

    facts = compiled_facts(SwiGLU(torch.mm, half), third)
    assert facts["near_misses"] == [
        "getitem: argument size[1] of empty is 16, not mm_default.shape[-1] - 15, which is 17"
    ]


def test_a_pattern_over_the_first_version_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="write auto_functionalized_v2"):
        compiled_facts(SwiGLU(torch.mm, half), first_version)
