"""all_reduce_norm and its quantized forms: matches, near-misses, results with other readers, bitwise equality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.collectives.collective_cases import mirrored
from torchweave.compiler.passes.aten import add_rms_norm
from torchweave.compiler.passes.aten.fused_linears import FusedLinears
from torchweave.compiler.passes.collectives.all_reduce_norm import FUSION
from torchweave.compiler.passes.collectives.all_reduce_norm_quant import FP4, FP8
from torchweave.compiler.passes.manager import run_pass
from torchweave.compiler.passes.testing import T, check, graph_of
from torchweave.ops.quant.fp8 import GROUP, PER_TOKEN

ops = torch.ops.torchweave
BF16 = torch.bfloat16
D = 256
X = [torch.randn(1, T, D).to(BF16), torch.randn(1, T, D).to(BF16), torch.randn(D).to(BF16)]
GIVEN = torch.tensor([0.02])


@pytest.fixture(autouse=True)
def ranks() -> Iterator[str]:
    with mirrored() as group:
        yield group


def norm(h: Tensor, weight: Tensor) -> Tensor:
    return ops.rms_norm(h, weight, 1e-6, 1.0, True)


def last(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return norm(residual + ops.all_reduce(x, "tp"), weight)


def kept(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = ops.all_reduce(x, "tp") + residual
    return norm(h, weight), h * 2


def alone(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return residual + norm(ops.all_reduce(x, "tp"), weight)


def alone_kept(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = ops.all_reduce(x, "tp")
    return norm(h, weight), h + residual


@pytest.mark.parametrize("function", [last, kept, alone, alone_kept])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_all_reduce_residual_and_norm_are_fused_and_live_sums_kept(
    function: Callable[..., Any], dtype: torch.dtype
) -> None:
    examples = [each.to(dtype) for each in X]
    check(FUSION, function, examples, matches=1)
    graph = graph_of(function, examples)
    run_pass(FUSION, graph)
    (node,) = (node for node in graph.graph.nodes if "all_reduce" in str(node.target))
    assert node.target is ops.all_reduce_add_rms_norm.default
    residual, keep_sum = node.args[1], node.args[6]
    assert (residual is not None, keep_sum) == ("alone" not in function.__name__, "kept" in function.__name__)


def sum_is_read(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    a = ops.all_reduce(x, "tp")
    return norm(a + residual, weight), a


def alpha(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return norm(torch.add(ops.all_reduce(x, "tp"), residual, alpha=2), weight)


def other_dtype(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return norm(ops.all_reduce(x, "tp") + residual.float(), weight)


def broadcast(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return norm(ops.all_reduce(x, "tp") + residual[:, :1], weight)


def other_width(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    h = ops.all_reduce(x, "tp") + residual
    return norm(h.unflatten(-1, (2, -1)), weight[: D // 2])


def other_group(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """The norm's sum is over one group, of a value that another operation reads."""
    a = ops.all_reduce(x, "tp")
    return norm(ops.all_reduce(a, "ep") + residual + a, weight)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (sum_is_read, "is also read by"),
        (alpha, "argument alpha of add is 2, not 1"),
        (other_dtype, "the add widens"),
        (broadcast, "the add broadcasts"),
        (other_width, None),
        (other_group, "is also read by"),
    ],
)
def test_near_misses_have_reasons(function: Callable[..., Any], why: str | None) -> None:
    with mirrored("ep"):
        check(FUSION, function, X, near_miss=why, matches=0)


# -- quantized ---------------------------------------------------------------------------------------------------------

QUANTS = {
    "token": lambda y, scale: ops.fp8_quant(y, PER_TOKEN, None),
    "groups": lambda y, scale: ops.fp8_quant(y, GROUP, None),
    "static": lambda y, scale: ops.fp8_quant(y, PER_TOKEN, scale),
    "fp4": lambda y, scale: ops.fp4_quant(y, scale),
}


@pytest.mark.parametrize("read", ["nothing", "norm", "sum", "both"])
@pytest.mark.parametrize("scheme", QUANTS)
def test_quantization_is_fused_and_values_with_other_readers_are_kept(scheme: str, read: str) -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> list[Tensor]:
        y, h = ops.all_reduce_add_rms_norm(x, residual, weight, 1e-6, 0.0, False, read in ("sum", "both"), "tp")
        q, s = QUANTS[scheme](y, scale)
        found = [q.view(torch.uint8), s.float()]
        return [*found, *([y + 1] if read in ("norm", "both") else []), *([h * 2] if read in ("sum", "both") else [])]

    each = FP4 if scheme == "fp4" else FP8
    check(each, function, [*X, GIVEN], matches=1, opcheck=scheme in ("token", "fp4") and read in ("nothing", "both"))
    graph = graph_of(function, [*X, GIVEN])
    run_pass(each, graph)
    (node,) = (node for node in graph.graph.nodes if "all_reduce" in str(node.target))
    assert node.args[-3:] == (read in ("norm", "both"), read in ("sum", "both"), "tp")


def test_near_misses_of_quantized_norms_have_reasons() -> None:
    def changed(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        y, _ = ops.all_reduce_add_rms_norm(x, residual, weight, 1e-6, 0.0, False, False, "tp")
        q, s = ops.fp8_quant(y * 2, PER_TOKEN, None)
        return q.float(), s

    def heads(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y, _ = ops.all_reduce_add_rms_norm(x, residual, weight, 1e-6, 0.0, False, False, "tp")
        return ops.fp4_quant(y.unflatten(-1, (4, -1)), scale)[0]

    check(FP8, changed, X, matches=0)
    check(FP4, heads, [*X, GIVEN], matches=0)


# -- beside the other fusions --------------------------------------------------------------------------------------------


def products(x: Tensor, residual: Tensor, weight: Tensor, w: Tensor) -> Any:
    """A norm that a linear reads, and a linear whose all-reduced result is added to the residual."""
    h = residual + ops.all_reduce(torch.nn.functional.linear(x, w[:D]), "tp")
    return torch.nn.functional.linear(norm(h, weight), w), h


def products_of_a_read_sum(x: Tensor, residual: Tensor, weight: Tensor, w: Tensor) -> Any:
    a = ops.all_reduce(torch.nn.functional.linear(x, w[:D]), "tp")
    h = residual + a
    return torch.nn.functional.linear(norm(h, weight), w), h, a


def test_linear_fusions_leave_residuals_to_the_collective() -> None:
    examples = [*X, torch.randn(4096, D).to(BF16) / 16]
    passes = (FUSION, FusedLinears(devices=("cpu",)), add_rms_norm.FUSION)

    def ends(function: Callable[..., Any]) -> Counter[str]:
        graph = graph_of(function, examples)
        for each in passes:
            run_pass(each, graph)
        return Counter(str(node.target).split(".")[1] for node in graph.graph.nodes if "torchweave" in str(node.target))

    assert ends(products) == {"all_reduce_add_rms_norm": 1}
    assert ends(products_of_a_read_sum) == {"all_reduce": 1, "fused_linear": 1}, "the norm is the product's prologue"
