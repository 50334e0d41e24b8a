"""fused_int_linears: norm, gate and residual are fused into the product with 4-bit weights between them; near-misses are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.int_cases import IntCase, fp4_operands, operands
from torchweave.compiler.passes.aten import add_rms_norm
from torchweave.compiler.passes.aten.fused_int_linears import FusedIntLinears
from torchweave.compiler.passes.manager import PassManager, run_pass
from torchweave.compiler.passes.testing import T, check, graph_of
from torchweave.compiler.piece_builder import passes_for_range, token_ranges
from torchweave.config.options import TorchCompileConfig
from torchweave.ops.activation import gated_activation
from torchweave.ops.norm import rms_norm
from torchweave.ops.quant.int_linear import ROW_KERNEL_MAX_TOKENS, int_linear

K, N = 256, 384
PASS = FusedIntLinears(devices=("cpu",))
X, RESIDUAL = torch.randn(1, T, K).bfloat16(), torch.randn(1, T, N).bfloat16()
NORM = torch.rand(K).bfloat16()
PLAIN = operands(IntCase(4, 128), 1, N, K, torch.bfloat16)
POINTS = operands(IntCase(4, 64, zero=True, order=True, bias=True), 1, N, K, torch.bfloat16)
W, S = PLAIN.weight[:2]


def product(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return int_linear(x, w, scale, None, None, None, 128)


def normed(x: Tensor, w: Tensor, scale: Tensor, norm: Tensor) -> Tensor:
    return product(rms_norm(x, norm, 1e-5), w, scale)


def gemma(x: Tensor, w: Tensor, scale: Tensor, norm: Tensor) -> Tensor:
    return gated_activation(product(rms_norm(x, norm, 1e-5, 1.0, True), w, scale), "gelu_tanh")


def gated(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return gated_activation(product(x, w, scale), "silu")


def added(x: Tensor, w: Tensor, scale: Tensor, residual: Tensor) -> Tensor:
    return residual + product(x, w, scale)


def all_tensors(x: Tensor, w: Tensor, scale: Tensor, zero: Tensor, order: Tensor, bias: Tensor, norm: Tensor) -> Tensor:
    return int_linear(rms_norm(x, norm, 1e-5), w, scale, zero, order, bias, 64, None)


@pytest.mark.parametrize(
    ("function", "examples"),
    [
        (normed, [X, W, S, NORM]),
        (gemma, [X, W, S, NORM]),
        (gated, [X, W, S]),
        (added, [X, W, S, RESIDUAL]),
        (added, [X[0], W, S, RESIDUAL[0]]),
        (all_tensors, [X, *POINTS.weight, POINTS.bias, NORM]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_norm_gate_and_residual_are_fused_with_equal_rounding(
    function: Callable[..., Any], examples: list[Any]
) -> None:
    check(PASS, function, examples, matches=1)
    graph = graph_of(function, examples)
    run_pass(PASS, graph)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names == ["torchweave.fused_int_linear.default"]


def a_layer(x: Tensor, h: Tensor, w: Tensor, scale: Tensor, up: Tensor, up_scale: Tensor, norm: Tensor) -> Tensor:
    h = h + product(x, w, scale)
    y = rms_norm(h, norm, 1e-5)
    gate = gated_activation(int_linear(y, up, up_scale, None, None, None, 128), "silu")
    return h + product(gate, w, scale)


def test_a_layer_has_a_launch_for_every_product() -> None:
    square, wide = (operands(IntCase(4, 128), 1, rows, K, torch.bfloat16).weight[:2] for rows in (K, 2 * K))
    examples = [X, X.flip(-1), *square, *wide, NORM]
    check(PASS, a_layer, examples, matches=3)
    graph = graph_of(a_layer, examples)
    assert run_pass(PASS, graph).rewritten == 4 and run_pass(add_rms_norm.FUSION, graph).matches == 0
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert calls == ["torchweave.fused_int_linear.default"] * 3


def alpha(x: Tensor, w: Tensor, scale: Tensor, residual: Tensor) -> Tensor:
    return torch.add(product(x, w, scale), residual, alpha=2)


def read_twice(x: Tensor, w: Tensor, scale: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    y = rms_norm(x, norm, 1e-5)
    return product(y, w, scale), y


def computed(x: Tensor, w: Tensor, scale: Tensor, residual: Tensor) -> Tensor:
    return product(x, w, scale * 2) + residual


def bytes_of(x: Tensor, w: Tensor, scale: Tensor, residual: Tensor) -> Tensor:
    return residual + int_linear(x, w, scale, None, None, None, 128)


def e2m1(x: Tensor, w: Tensor, scale: Tensor, residual: Tensor) -> Tensor:
    return residual + int_linear(x, w, scale, None, None, None, 32)


def of_a_sum(x: Tensor, w: Tensor, scale: Tensor, norm: Tensor, other: Tensor) -> Tensor:
    """Gemma 2: the residual is added to a norm, not to a product."""
    return product(rms_norm(rms_norm(other, norm, 1e-5) + x, norm, 1e-5), w, scale)


@pytest.mark.parametrize(
    ("function", "examples", "why"),
    [
        (alpha, [X, W, S, RESIDUAL], "alpha"),
        (read_twice, [X, W, S, NORM], "is also read by"),
        (computed, [X, W, S, RESIDUAL], "computed, not a parameter"),
        (bytes_of, [X, *operands(IntCase(8, 128), 1, N, K, torch.bfloat16).weight[:2], RESIDUAL], "8 bits"),
        (e2m1, [X, *fp4_operands("mxfp4", 1, N, K).weight[:2], RESIDUAL], "scales in torch.uint8"),
        (added, [X.float(), W, S, RESIDUAL.float()], "no kernel that fuses"),
        (added, [X.expand(2, T, K), W, S, RESIDUAL.expand(2, T, N)], "more than one dimension"),
        (of_a_sum, [X, W, S, NORM, X.flip(-1)], "norm is that of a sum"),
    ],
    ids=["alpha", "norm read twice", "computed scale", "8 bits", "mxfp4", "float32", "batch", "norm of a sum"],
)
def test_near_misses_have_reasons(function: Callable[..., Any], examples: list[Tensor], why: str) -> None:
    check(PASS, function, examples, near_miss=why)


def test_it_runs_where_it_is_enabled_on_gpus_for_one_and_two_tokens() -> None:
    off = next(each for each in PassManager().settings if each.each.name == "fused_int_linears")
    assert not off.enabled and off.why == "no measurement shows that it pays here"
    passes = PassManager(config=TorchCompileConfig(enabled_passes=("fused_int_linears",))).passes("aten")
    names = [each.name for each in passes]
    each = passes[names.index("fused_int_linears")]
    assert run_pass(each, graph_of(added, [X, W, S, RESIDUAL])).matches == 0 and each.token_range == (1, 2)
    assert names.index("gated_activation") < names.index(each.name) < names.index("add_rms_norm")
    runs = [span for span in token_ranges(passes) if each in passes_for_range(passes, *span)]
    assert runs == [(1, ROW_KERNEL_MAX_TOKENS)], "steps of more tokens keep add_rms_norm"
