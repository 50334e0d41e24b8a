"""Quantized experts on a GPU against float64 on the values of their weights."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.ops.moe.experts_cases import cases, expected
from tests.ops.moe.test_quantized_experts import EVERY, arguments, packed
from torchweave.ops.kernels.moe.packing import Packing
from torchweave.ops.moe.experts import ExpertsCall
from torchweave.ops.moe.quantized_experts import quantized_experts

pytestmark = pytest.mark.gpu

GPT_OSS: dict[str, Any] = {
    "biased": True,
    "interleaved": True,
    "alpha": 1.702,
    "limit": 7.0,
    "num_experts": 8,
    "top": 4,
}
SHAPES = {
    "gpt_oss": GPT_OSS | {"width": 2816, "inner": 2816},
    "qwen3": {"width": 2048, "inner": 768, "num_experts": 16, "top": 8},
}


def on_gpu(call: ExpertsCall) -> ExpertsCall:
    tensors = {field.name: getattr(call, field.name) for field in fields(call)}
    moved = {name: value.cuda() for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    for name in ("up_packing", "down_packing"):
        packing = tensors[name]
        moved[name] = Packing(*(None if each is None else each.cuda() for each in packing[:2]), packing.group)
    return replace(call, **moved)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_op_at_every_kind_of_token_count(shape: dict[str, Any], kind: str) -> None:
    for tokens in (1, 2, 7, 33, 300):
        call, plain = (on_gpu(each) for each in packed(cases(tokens, **shape, dtype=torch.bfloat16), kind))
        got = quantized_experts(*arguments(call))
        rows = slice(0, 16)  # the oracle runs a token at a time
        right = expected(replace(plain.tokens(0, 16), out=plain.out[rows]))
        # The values of FP8 weights are rounded to bfloat16 in the oracle, and the activation here.
        error = (got[rows].double() - right).norm() / right.norm()
        assert error < 1e-2, (tokens, float(error))


def test_a_graph_replays_it() -> None:
    call, _ = packed(cases(3, **SHAPES["qwen3"], dtype=torch.bfloat16), "mxfp4")
    call = on_gpu(call)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        quantized_experts(*arguments(call))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantized_experts(*arguments(call))
    for _ in range(5):
        call.x.copy_(torch.randn_like(call.x))
        call.index.copy_(torch.rand(3, 16, device="cuda").argsort(1)[:, :8])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, quantized_experts(*arguments(call)))
