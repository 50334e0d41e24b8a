"""Kernels of norms, gated activations and RoPE on a GPU: bitwise against eager mode, against float64, in a graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.attention.attention_cases import ROTARY_CASES, build
from tests.ops.fusion_cases import DIALECTS, angles, draw, heads_of, norm64, rope64
from torchweave.ops import activation, norm, rope
from torchweave.ops.attention.backends.triton import TritonBackend
from torchweave.ops.registry import op_info

pytestmark = pytest.mark.gpu
TYPES = [torch.bfloat16, torch.float16, torch.float32]


def same(got: Tensor, want: Tensor, at_least: float) -> None:
    """Nearly all values are bitwise equal; the others differ by one unit in the last place."""
    unit = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want.double(), rtol=4 * unit, atol=4 * unit)
    share = (got == want).float().mean().item()
    assert share >= at_least, f"{share} of the results agree to the bit"


def reference(name: str, *arguments: Any) -> Any:
    """What torch computes on the GPU, operation by operation."""
    return op_info(f"torchweave::{name}").reference(*arguments)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("width", [64, 2048, 5120])
def test_norms_round_as_eager_mode_does(width: int, tokens: int, dtype: torch.dtype) -> None:
    x, residual = draw(tokens, width, dtype=dtype, device="cuda"), draw(tokens, width, dtype=dtype, device="cuda") * 2
    weight = draw(width, dtype=dtype, device="cuda")
    least = 0.5 if dtype == torch.float32 else 0.998
    for _, options in DIALECTS:
        arguments = (1e-5, options.get("offset", 0.0), options.get("wide", False))
        same(norm.rms_norm(x, weight, *arguments), reference("rms_norm", x, weight, *arguments), least)
        y, h = norm.add_rms_norm(x, residual, weight, *arguments)
        want_y, want_h = reference("add_rms_norm", x, residual, weight, *arguments)
        assert h.equal(want_h)
        same(y, want_y, least)
        assert norm.rms_norm_of_sum(x, residual, weight, *arguments).equal(y)
        exact = norm64(h.cpu(), weight.cpu(), 1e-5, arguments[1])
        torch.testing.assert_close(y.double().cpu(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_gated_activations_round_as_eager_mode_does(name: str, dtype: torch.dtype) -> None:
    for tokens in (1, 5, 300):
        gate_up = draw(tokens, 2 * 1408, dtype=dtype, device="cuda")
        want = reference("gated_activation", gate_up, name)
        same(activation.gated_activation(gate_up, name), want, 0.5 if dtype == torch.float32 else 0.998)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("dim", "width"), [(64, 64), (128, 128), (96, 48)])
def test_rope_equals_the_reference_bitwise(dim: int, width: int, dtype: torch.dtype) -> None:
    for tokens in (1, 9, 300):
        q, k, _ = heads_of(draw(tokens, 12 * dim, dtype=dtype, device="cuda"), 8, 2, 2)
        for cos, sin in (angles(tokens, width, dtype, "cuda"), angles(tokens, width, torch.float32, "cuda")):
            assert all(map(torch.equal, rope.rope(q, k, cos, sin), reference("rope", q, k, cos, sin)))
        weights = draw(dim, dtype=dtype, device="cuda"), draw(dim, dtype=dtype, device="cuda") + 1
        arguments = (q, k, *weights, cos, sin, 1e-6)
        for got, want in zip(rope.qk_norm_rope(*arguments), reference("qk_norm_rope", *arguments), strict=True):
            same(got, want, 0.5 if dtype == torch.float32 else 0.995)
        exact = rope64(norm64(q.cpu(), weights[0].cpu(), 1e-6), cos.cpu(), sin.cpu())
        got = rope.qk_norm_rope(*arguments)[0].double().cpu()
        torch.testing.assert_close(got, exact, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ROTARY_CASES)
def test_attention_applies_rope(name: str, dtype: torch.dtype) -> None:
    built = build(dataclasses.replace(ROTARY_CASES[name], dtype=dtype), "cuda")
    backend = TritonBackend(torch.device("cuda"))
    spec = ROTARY_CASES[name].spec
    backend.workspace(spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.value_dim, dtype)
    built.run(backend.begin(built.meta))
    built.check({torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype])
    before = built.out.clone()
    built.out.fill_(torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built.run(backend.begin(built.meta))
    graph.replay()
    assert built.out.equal(before)


def test_empty_tensors() -> None:
    x = torch.empty(0, 64, device="cuda", dtype=torch.bfloat16)
    assert norm.rms_norm(x, None, 1e-5).shape == activation.gated_activation_pair(x, x, "silu").shape == (0, 64)
