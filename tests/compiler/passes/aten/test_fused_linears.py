"""fused_linears: norm, gate and residual are fused into the linear between them; near-misses are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compiler.passes.torch_ir.test_small_linears import decoder
from tests.compiler.toy import BOUNDARY, DYNAMIC, example, step
from torchweave.compiler import compile_graph
from torchweave.compiler.passes.aten import gated_activation as gate
from torchweave.compiler.passes.aten import raise_rms_norm
from torchweave.compiler.passes.aten.fused_linears import FusedLinears
from torchweave.compiler.passes.manager import default_passes, run_pass
from torchweave.compiler.passes.testing import T, check, graph_of
from torchweave.compiler.passes.torch_ir.merge_linears import MergeLinears
from torchweave.compiler.passes.torch_ir.small_linears import SmallLinears
from torchweave.compiler.runtime.forward import call_op
from torchweave.compiler.tuning.table import Entry, Table
from torchweave.config.options import TorchCompileConfig
from torchweave.ops.activation import gated_activation
from torchweave.ops.linear import linear
from torchweave.ops.linear_config import LinearConfig, parse_choices
from torchweave.ops.norm import rms_norm
from torchweave.report import Report

BF16 = torch.bfloat16
K, N = 512, 2048
PASS = FusedLinears(devices=("cpu",))
X, RESIDUAL = torch.randn(1, T, K).to(BF16), torch.randn(1, T, N).to(BF16)
W, BIAS, NORM = torch.randn(N, K).to(BF16) / 20, torch.randn(N).to(BF16), torch.rand(K).to(BF16)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, 1e-5)


def with_norm(x: Tensor, w: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    return F.linear(normed(x, weight), w, bias)


def with_norm_and_gate(x: Tensor, w: Tensor, weight: Tensor) -> Tensor:
    return gated_activation(linear(normed(x, weight), w, None, "1=blas"), "silu")


def with_gate_only(x: Tensor, w: Tensor) -> Tensor:
    return gated_activation(F.linear(x, w), "gelu_tanh")


def with_residual(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return residual + F.linear(x, w)


def with_residual_last(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return linear(x, w, None, "") + residual


def with_two_adds(x: Tensor, w: Tensor, branch: Tensor, residual: Tensor) -> Tensor:
    return residual + (branch + F.linear(x, w))


def scaled(x: Tensor, w: Tensor, factors: Tensor, residual: Tensor) -> Tensor:
    return residual + linear(x, w, None, "1=blas", 1.25, factors)


@pytest.mark.parametrize(
    ("function", "examples"),
    [
        (with_norm, [X, W, BIAS, NORM]),
        (with_norm_and_gate, [X, W, NORM]),
        (with_gate_only, [X, W]),
        (with_residual, [X, W, RESIDUAL]),
        (with_residual_last, [X[0], W, RESIDUAL[0]]),
        (with_two_adds, [X, W, RESIDUAL.flip(-1).contiguous(), RESIDUAL]),
        (scaled, [X, W, BIAS, RESIDUAL]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_norm_gate_and_residual_are_fused_with_equal_rounding(
    function: Callable[..., Any], examples: list[Tensor]
) -> None:
    check(PASS, function, examples, matches=1)
    graph = graph_of(function, examples)
    run_pass(PASS, graph)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names == ["torchweave.fused_linear.default"]


def alpha(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return torch.add(F.linear(x, w), residual, alpha=2)


def broadcast(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, w) + residual[:, :1]


def read_twice(x: Tensor, w: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = normed(x, weight)
    return F.linear(y, w), y


def computed(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, w * 2) + residual


def small(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, w) + residual


@pytest.mark.parametrize(
    ("function", "examples", "why"),
    [
        (alpha, [X, W, RESIDUAL], "alpha"),
        (broadcast, [X, W, RESIDUAL], "another shape"),
        (read_twice, [X, W, NORM], "is also read by"),
        (computed, [X, W, RESIDUAL], "computed, not a parameter"),
        (small, [X, W[:64], RESIDUAL[..., :64]], "the op has no kernel but the BLAS"),
        (small, [X.float(), W.float(), RESIDUAL.float()], "the op has no kernel but the BLAS"),
        (small, [X.expand(2, T, K), W, RESIDUAL.expand(2, T, N)], "more than one dimension"),
    ],
    ids=["alpha", "broadcast", "norm read twice", "computed weight", "small", "float32", "batch"],
)  # fmt: skip
def test_near_misses_have_reasons(function: Callable[..., Any], examples: list[Tensor], why: str) -> None:
    check(PASS, function, examples, near_miss=why)


def test_linear_with_two_readers_keeps_its_output() -> None:
    def both(x: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w)
        return y + residual, y

    check(PASS, both, [X, W, RESIDUAL], matches=0)


def test_op_gets_the_tuned_choice_of_its_fusion() -> None:
    config = LinearConfig("split", 16, 64, 4, 4, norm_apart=True)
    table = Table("cpu", (Entry("fused_linears", f"{N}x{K}/ng", 8, str(config), 1.0, 2.0, 0.0),))
    graph = graph_of(with_norm_and_gate, [X, W, NORM])
    run_pass(FusedLinears(devices=("cpu",), table=table), graph)
    (node,) = (node for node in graph.graph.nodes if node.op == "call_function")
    assert parse_choices(node.args[-1])[-1] == (8, config)


def test_by_default_only_gpus_count() -> None:
    graph = graph_of(with_residual, [X, W, RESIDUAL])
    names = [each.name for each in default_passes()]
    each = default_passes()[names.index("fused_linears")]
    assert run_pass(each, graph).matches == 0 and each.token_range == (1, 32)
    order = ["raise_rms_norm", "gated_activation", "fused_linears", "add_rms_norm", "expand"]
    assert [name for name in names if name in order] == order, (
        "what it takes in is raised before, and not taken by others"
    )


def test_a_decoder_has_one_op_for_every_product_of_a_layer() -> None:
    """q/k/v and gate/up with their norm, the gate, o and down with their residual; the same numbers as without."""
    config = TorchCompileConfig(enable_inductor=False)
    module, passes = decoder(), (MergeLinears(), SmallLinears(devices=("cpu",)), raise_rms_norm.FUSION, gate.FUSION)
    compiled_graph, plain = (
        compile_graph(
            module, example(), DYNAMIC, boundary_ops=BOUNDARY, config=config, report=Report(show=False), passes=each
        )
        for each in ((*passes, PASS), passes)
    )
    facts = [
        each for each in compiled_graph.report.select("pass") if each["name"] == "fused_linears" and each["matches"]
    ]
    assert sum(each["matches"] * each["shared_by"] for each in facts) == 9, facts
    assert {tuple(each["tokens"]) for each in facts} == {(1, 32)}
    for tokens in (1, 2, 7, 32, 33):
        inputs = step(tokens, min(tokens, 3))
        torch.testing.assert_close(compiled_graph(call_op, *inputs), plain(call_op, *inputs), rtol=0, atol=0)
