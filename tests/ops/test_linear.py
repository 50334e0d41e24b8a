"""The linear op: its reference, its schema, its choice of kernel, and the kernels without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace

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


def _built(config: LinearConfig, tokens: int, kind: str, dtype: torch.dtype) -> str:
    """PTX of a configuration for sm_90; `kind` as in interpreted_linear."""
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from tests.ops.interpreted_linear import around_of
    from torchweave.ops.kernels import linear as kernels

    around = around_of(kind, tokens, 4096, 2048)
    fused = {
        name: getattr(around, name).to(dtype)
        for name in ("bias", "norm", "residual")
        if getattr(around, name) is not None
    }
    x, w = torch.empty(tokens, 2048, dtype=dtype), torch.empty(4096, 2048, dtype=dtype)
    out = torch.empty(tokens, 2048 if around.activation else 4096, dtype=dtype)
    with recorded(kernels, "row_kernel", "dot_kernel", "split_kernel") as launches:
        config.run(x, w, out, replace(around, **fused))
    return compile_for_hopper(launches[0]).asm["ptx"]


BUILDS = [
    (LinearConfig("row", 4, 1024, 4, 4), 1, "n"),
    (LinearConfig("row", 8, 1024, 4, 2, dependent=1, ahead=2048), 2, "ng"),
    (LinearConfig("row", 2, 1024, 4, 2, dependent=2), 4, "r"),
    (LinearConfig("dot", 64, 128, 4, 4, dependent=1, ahead=2048), 32, "g"),
    (LinearConfig("dot", 16, 256, 4, 4), 8, "r"),
    (LinearConfig("split", 16, 64, 4, 4, dependent=1), 8, "n"),
    (LinearConfig("split", 32, 32, 8, 4, dependent=1, ahead=4096), 32, "wh"),
]


@pytest.mark.parametrize(("config", "tokens", "kind"), BUILDS, ids=lambda value: getattr(value, "kernel", value))
def test_kernels_build_for_hopper(config: LinearConfig, tokens: int, kind: str) -> None:
    pytest.importorskip("triton")
    ptx = _built(config, tokens, kind, torch.bfloat16 if tokens != 4 else torch.float16)
    weights = re.findall(r"cp\.async\.cg\.shared\.global .*0x10|ld\.global\.L1::evict_first\S*v4\.b32", ptx)
    assert weights, "the weight must be read 16 bytes at a time"
    assert ("griddepcontrol.wait" in ptx) == bool(config.dependent)
    assert ("prefetch.L2" in ptx) == bool(config.ahead)
    assert ("mma" in ptx) == (config.kernel != "row"), "tensor cores are used where they are meant to be"
