"""expand: fused ops without benefit for Inductor are expanded again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiler.passes.written import BF16, heads, llama_norm, rotary
from torchweave.compiler.passes.aten import add_rms_norm, gated_activation, qk_norm_rope, raise_rms_norm, rope
from torchweave.compiler.passes.aten.expand import EXPANDED_OPS, Expand
from torchweave.compiler.passes.manager import run_pass
from torchweave.compiler.passes.testing import T, check, graph_of
from torchweave.ops.norm import rms_norm

FUSIONS = [module.FUSION for module in (raise_rms_norm, add_rms_norm, gated_activation, rope, qk_norm_rope)]


def layer(x: Tensor, r: Tensor, w: Tensor, cos: Tensor, sin: Tensor, head: Tensor) -> tuple[Tensor, ...]:
    """All fused ops between two calls of attention."""
    h = r + x
    y = llama_norm(h, w)
    gate, up = y.chunk(2, -1)
    act = torch.nn.functional.silu(gate) * up
    h2 = h[..., :32] + act * torch.sigmoid(act)
    q, k = heads(llama_norm(h2, w[:32])), heads(h2)
    q = llama_norm(q.transpose(1, 2), head).transpose(1, 2)
    k = llama_norm(k.transpose(1, 2), head).transpose(1, 2)
    return (*rotary(q, k, cos, sin), h2)


EXAMPLES = [
    torch.randn(1, T, 64), torch.randn(1, T, 64), torch.rand(64), torch.randn(1, T, 16), torch.randn(1, T, 16), torch.rand(16)
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_raise_then_expand_restores_the_graph(dtype: torch.dtype) -> None:
    examples = [example.to(dtype) for example in EXAMPLES]
    graph = graph_of(layer, examples)
    before = sorted(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    for fusion in FUSIONS:
        assert run_pass(fusion, graph).matches
    assert run_pass(Expand(), graph, debug=True).matches == 5
    after = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert not any("torchweave" in target for target in after)
    views = ("view", "transpose", "squeeze", "slice", "split", "getitem", "clone", "contiguous", "alias", "sym_size")

    def work(targets: Any) -> list[str]:
        return sorted(target for target in targets if not any(view in target for view in views))

    assert work(after) == work(before)
    assert all(map(torch.equal, graph.module(*examples), layer(*examples)))


@pytest.mark.parametrize("kept", [(), ("torchweave::rms_norm",)])
def test_expand_expands_the_selected_ops(kept: tuple[str, ...]) -> None:
    each = Expand(name for name in EXPANDED_OPS if name not in kept)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, 1e-6) * 2

    check(each, function, [torch.randn(T, 48), torch.randn(48)], matches=0 if kept else 1, opcheck=False)
