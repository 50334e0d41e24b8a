"""fp8_attention: attention writes FP8 exactly where a quantization reads its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweave.compiler import compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.passes.base import PassResult
from torchweave.compiler.passes.torch_ir.fp8_attention import Fp8Attention
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.ops.attention.op import attention
from torchweave.ops.quant.fp8 import FP8, GROUP, fp8_quant
from torchweave.ops.quant.fp8_linear import block_scales

BOUNDARY = frozenset({"torchweave::attention"})
DYNAMIC = {"x": {0: "T"}}


class Layer(nn.Module):
    """Attention over x and the linear behind it, in the form of `models.attention` and `models.quantize`."""

    def __init__(self, group: int, given: bool = False, head: int = GROUP, twice: bool = False) -> None:
        super().__init__()
        self.group, self.head, self.twice = group, head, twice
        self.weight = nn.Parameter(torch.randn(32, 2 * head).to(FP8), requires_grad=False)
        scale = torch.rand(1, -(-2 * head // GROUP)) if group else torch.rand(32)
        self.register_buffer("scale", block_scales(scale) if group else scale)
        self.register_buffer("given", torch.tensor([0.01]) if given else None)

    def forward(self, x: Tensor) -> Tensor:
        q = x.view(-1, 2, self.head)
        k = v = q[:, :1] * 0.5
        out = torch.empty(q.shape[0], q.shape[1], self.head, dtype=q.dtype, device=q.device)
        torch.ops.torchweave.attention(q, k, v, out, 0, 0.1)
        y = out.unsqueeze(0).reshape(1, x.shape[0], -1).contiguous()
        a, s = torch.ops.torchweave.fp8_quant(y, self.group, self.given)
        result = torch.ops.torchweave.fp8_linear(a, s, self.weight, self.scale, None, x.dtype)
        return result + y.sum() if self.twice else result


def run(module: Layer, x: Tensor) -> tuple[Any, PassResult]:
    graph = capture(module, {"x": x}, DYNAMIC, "backed_size_oblivious")
    result = Fp8Attention().run(graph)
    graph.graph.lint()
    return graph, result


@pytest.mark.parametrize("given", [False, True])
def test_fp8_attention_fires_and_is_bitwise_equal(given: bool) -> None:
    torch.manual_seed(0)
    module = Layer(0 if given else GROUP, given)
    graph, result = run(module, torch.randn(5, 256))
    assert result.matches == 1 and not result.near_misses
    assert not any("fp8_quant" in str(node.target) for node in graph.graph.nodes)
    assert Fp8Attention().run(graph).matches == 0, "its own result must not match again"
    config = TorchCompileConfig(enable_inductor=False)
    compiled_graph = compile_graph(module, {"x": torch.randn(5, 256)}, DYNAMIC, boundary_ops=BOUNDARY, config=config)
    assert next(e for e in compiled_graph.report.select("pass") if e["name"] == "fp8_attention")["matches"] == 1
    for tokens in (1, 2, 7, 64):
        x = torch.randn(tokens, 256)
        assert torch.equal(compiled_graph(call_op, x), module(x))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Layer(0), "needs all of its heads"),
        (Layer(GROUP, head=64), "a head has 64"),
        (Layer(GROUP, twice=True), None),
    ],
    ids=["token", "short heads", "also read"],
)
def test_near_misses_are_left_alone(module: Layer, why: str | None) -> None:
    graph, result = run(module, torch.randn(5, 2 * module.head))
    assert result.matches == 0 and any("fp8_quant" in str(node.target) for node in graph.graph.nodes)
    assert [why in miss.why for miss in result.near_misses] == ([True] if why else [])


@pytest.mark.parametrize("given", [None, torch.tensor([0.01])])
def test_the_op_itself_quantises(given: Tensor | None) -> None:
    q, k, v = torch.randn(7, 4, 128), torch.randn(7, 2, 128), torch.randn(7, 2, 128)
    wide = torch.empty(7, 4, 128)
    attention(q, k, v, wide, 0, 0.1)
    right, scale = fp8_quant(wide.flatten(1), 0 if given is not None else GROUP, given)
    out, written = torch.empty(7, 4, 128, dtype=FP8), None if given is not None else torch.empty(4, 7)
    if written is None:
        attention(q, k, v, out, 0, 0.1, given_scale=given)
    else:
        torch.ops.torchweave.attention_fp8(q, k, v, out, written, 0, 0.1)
    assert torch.equal(out.flatten(1).float(), right.float())
    assert written is None or torch.equal(written, scale)
