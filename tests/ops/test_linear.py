"""The linear op: its reference, its schema, its choice of kernel, and the kernels without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.interpreted import run_interpreted
from torchweave.ops.linear import MAX_TOKENS, LinearConfig, choose, linear


@pytest.mark.parametrize("shape", [(3, 16), (1, 5, 16), (0, 16), (16,)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_is_linear_on_the_cpu(shape: tuple[int, ...], with_bias: bool) -> None:
    x, w, bias = torch.randn(shape), torch.randn(7, 16), torch.randn(7) if with_bias else None
    got = linear(x, w, bias)
    assert got.equal(F.linear(x, w, bias)) and got.shape == (*shape[:-1], 7)


def test_opcheck() -> None:
    for bias in (None, torch.randn(7)):
        torch.library.opcheck(linear, (torch.randn(1, 5, 16), torch.randn(7, 16), bias))


def test_it_stays_one_node_with_a_symbolic_number_of_tokens() -> None:
    w = torch.randn(7, 16)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: linear(x, w), backend=backend, dynamic=True, fullgraph=True)
    for tokens in (4, 9):
        x = torch.randn(tokens, 16)
        assert compiled(x).equal(F.linear(x, w))
    assert len(graphs) == 1
    assert sum(node.op == "call_function" for node in graphs[0].graph.nodes) == 1


def test_choice() -> None:
    bf16 = torch.bfloat16
    assert choose(1, 3072, 2048, bf16) is not None and choose(1, 3072, 2048, torch.float16) is not None
    assert choose(MAX_TOKENS + 1, 3072, 2048, bf16) is None and choose(0, 3072, 2048, bf16) is None
    assert choose(1, 3072, 2048, torch.float32) is None, "float32 is for checking: it stays with cuBLAS"
    assert choose(1, 256, 256, bf16) is None and choose(1, 8192, 2047, bf16) is None


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("interpreted_linear.py")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dependent", [False, True])
def test_kernels_build_for_hopper(dtype: torch.dtype, dependent: bool) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels import linear as kernels

    configs = [LinearConfig("row", 4, 1024, 4, 4, dependent), LinearConfig("dot", 16, 256, 4, 4, dependent)]
    for config in configs:
        for tokens in (1, 2):
            x, w = torch.empty(tokens, 2048, dtype=dtype), torch.empty(3072, 2048, dtype=dtype)
            with recorded(kernels, "row_kernel", "dot_kernel") as launches:
                config.run(x, w, None, torch.empty(tokens, 3072, dtype=dtype))
            ptx = compile_for_hopper(launches[0]).asm["ptx"]
            assert "v4.b32" in ptx or "cp.async" in ptx, "the weight must be read 16 bytes at a time"
            assert ("griddepcontrol.wait" in ptx) == dependent
