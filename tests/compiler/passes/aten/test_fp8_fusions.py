"""fp8_norm and fp8_activation: matches in all three FP8 schemes, near-misses, order of passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, randn

import torchweave.ops.quant.fp8_linear  # noqa: F401  (defines torchweave::fp8_linear)
from torchweave.compiler.passes.aten import fp8_activation, fp8_norm
from torchweave.compiler.passes.testing import T, check
from torchweave.ops.quant.fp8 import FP8, GROUP, PER_TOKEN
from torchweave.ops.quant.fp8_linear import block_scales

ops = torch.ops.torchweave
EPS = 1e-5
SCHEMES = pytest.mark.parametrize("scheme", ["token", "groups", "static"])


def quant(x: Tensor, scheme: str, given: Tensor) -> tuple[Tensor, Tensor]:
    q, s = ops.fp8_quant(x, GROUP if scheme == "groups" else PER_TOKEN, given if scheme == "static" else None)
    return q.float(), s


GIVEN = torch.tensor([0.02])


@SCHEMES
@pytest.mark.parametrize("lead", [(), (1,)])
def test_a_norm_into_fp8(scheme: str, lead: tuple[int, ...]) -> None:
    def plain(x: Tensor, weight: Tensor, given: Tensor) -> Any:
        return quant(ops.rms_norm(x, weight, EPS), scheme, given)

    def residual(x: Tensor, r: Tensor, weight: Tensor, given: Tensor) -> Any:
        y, h = ops.add_rms_norm(x, r, weight, EPS, 1.0, True)
        return *quant(y, scheme, given), h * 2

    x, r, weight = randn(*lead, T, 208), randn(*lead, T, 208), randn(208)
    check(fp8_norm.FUSION, plain, [x, weight, GIVEN], opcheck=False)
    check(fp8_norm.FUSION, residual, [x.bfloat16(), r.bfloat16(), weight.bfloat16(), GIVEN], opcheck=False)


@SCHEMES
def test_a_gated_activation_into_fp8(scheme: str) -> None:
    def gated(gate_up: Tensor, given: Tensor) -> Any:
        return quant(ops.gated_activation(gate_up, "gelu_tanh"), scheme, given)

    check(fp8_activation.FUSION, gated, [randn(T, 416), GIVEN], opcheck=False)
    check(fp8_activation.FUSION, gated, [randn(1, T, 416).half(), GIVEN], opcheck=False)


def test_near_misses() -> None:
    def read_twice(x: Tensor, weight: Tensor, given: Tensor) -> Any:
        y = ops.rms_norm(x, weight, EPS)
        return *quant(y, "token", given), y + 1

    def changed(x: Tensor, weight: Tensor, given: Tensor) -> Any:
        return quant(ops.rms_norm(x, weight, EPS) * 2, "token", given)

    def activation_read_twice(gate_up: Tensor, given: Tensor) -> Any:
        y = ops.gated_activation(gate_up, "silu")
        return *quant(y, "groups", given), y.sum(-1)

    arguments = [randn(T, 64), randn(64), GIVEN]
    check(fp8_norm.FUSION, read_twice, arguments, near_miss="also read by")
    check(fp8_norm.FUSION, changed, arguments, matches=0)
    check(fp8_activation.FUSION, activation_read_twice, [randn(T, 256), GIVEN], near_miss="also read by")


@pytest.mark.parametrize("blocks", [False, True])
def test_a_decoder_layer_needs_no_quantisation_of_its_own_but_behind_attention(blocks: bool) -> None:
    """norm, gate/up, activation, down, residual, norm: two fusions, and linears that read their results."""
    group = GROUP if blocks else PER_TOKEN

    def half_layer(x: Tensor, r: Tensor, n: Tensor, w1: Tensor, s1: Tensor, w2: Tensor, s2: Tensor) -> Any:
        y, h = ops.add_rms_norm(x, r, n, EPS)
        q, s = ops.fp8_quant(y, group)
        gate_up = ops.fp8_linear(q, s, w1, s1, None, torch.float32)
        q, s = ops.fp8_quant(ops.gated_activation(gate_up, "silu"), group)
        return ops.fp8_linear(q, s, w2, s2, None, torch.float32) + h

    w1, w2 = randn(512, 128).to(FP8), randn(128, 256).to(FP8)
    s1, s2 = (
        (block_scales(torch.rand(4, 1)), block_scales(torch.rand(1, 2)))
        if blocks
        else (torch.rand(512), torch.rand(128))
    )
    arguments = [randn(T, 128), randn(T, 128), randn(128), w1, s1, w2, s2]
    for fusion in (fp8_norm.FUSION, fp8_activation.FUSION):
        check(fusion, half_layer, arguments, opcheck=False)


def test_opcheck() -> None:
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x, weight = randn(1, 7, 208), randn(208)
    for group, scale in ((PER_TOKEN, None), (GROUP, None), (PER_TOKEN, GIVEN)):
        torch.library.opcheck(ops.rms_norm_fp8, (x, weight, EPS, 0.0, False, group, scale), test_utils=utilities)
        torch.library.opcheck(ops.add_rms_norm_fp8, (x, x, weight, EPS, 0.0, True, group, scale), test_utils=utilities)
        torch.library.opcheck(ops.gated_activation_fp8, (x, "silu", group, scale), test_utils=utilities)
