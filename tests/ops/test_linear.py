"""The linear op: its reference, its schema, its choice of kernel, and the kernels without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.ops.interpreted import run_interpreted
from torchweave.ops.linear import LinearFusion, fused_linear, linear, run
from torchweave.ops.linear_config import (
    MAX_TOKENS,
    LinearConfig,
    choose,
    default_choices,
    format_choices,
    parse_choices,
    select_config,
)


@pytest.mark.parametrize("shape", [(3, 16), (1, 5, 16), (0, 16), (16,)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_reference_equals_nn_linear(shape: tuple[int, ...], with_bias: bool) -> None:
    x, w, bias = torch.randn(shape), torch.randn(7, 16), torch.randn(7) if with_bias else None
    got = linear(x, w, bias)
    assert got.equal(F.linear(x, w, bias)) and got.shape == (*shape[:-1], 7)


def test_opcheck() -> None:
    for bias in (None, torch.randn(7)):
        torch.library.opcheck(linear, (torch.randn(1, 5, 16), torch.randn(7, 16), bias))


def test_op_is_one_node_with_a_symbolic_token_count() -> None:
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


def test_kernel_choice() -> None:
    bf16 = torch.bfloat16
    assert choose(1, 3072, 2048, bf16) is not None and choose(1, 3072, 2048, torch.float16) is not None
    assert choose(MAX_TOKENS + 1, 3072, 2048, bf16) is None and choose(0, 3072, 2048, bf16) is None
    assert choose(1, 3072, 2048, torch.float32) is None, "float32 is for checking: it stays with cuBLAS"
    assert choose(1, 64, 256, bf16) is None and choose(1, 8192, 2047, bf16) is None
    router = choose(1, 264, 2048, bf16)
    assert router is not None and router.block_k == 2048, "a small weight is read whole before its input exists"
    assert choose(2, 264, 2048, bf16) == router and choose(3, 264, 2048, bf16) is None


def test_choices_round_trip() -> None:
    one, many = LinearConfig("row", 4, 1024, 4, 4, 1), LinearConfig("split", 16, 64, 4, 4, norm_apart=True)
    text = format_choices([(64, None), (1, one), (8, many), (2, one), (4, None), (16, many)])
    assert text == "2=row,4,1024,4,4,1,0;4=blas;16=split,16,64,4,4,0,1"
    assert parse_choices(text) == ((2, one), (4, None), (16, many))
    picked = [select_config(text, tokens) for tokens in (0, 1, 2, 3, 4, 5, 16, 17)]
    assert picked == [None, one, one, None, None, many, many, None]
    assert format_choices([(1, None), (64, None)]) == "" and select_config("", 1) is None
    text = default_choices(16384, 2048, torch.bfloat16)
    assert [select_config(text, n) for n in range(1, 70)] == [
        choose(n, 16384, 2048, torch.bfloat16) for n in range(1, 70)
    ]


@pytest.mark.parametrize(
    "text",
    ["1=column,1,2,3,4,5,6", "1=row,1,2", "x", "2=blas;1=blas", "8=row,4,1024,4,4,1,0", "1=row,-1,2,3,4,5,6"],
)
def test_malformed_choices_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"linear|choices"):
        parse_choices(text)


def _eager(x: torch.Tensor, w: torch.Tensor, bias, norm, eps, residual, gated: bool) -> torch.Tensor:
    if norm is not None:
        wide = x.float()
        x = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    y = F.linear(x, w, bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_linear_equals_the_separate_ops(dtype: torch.dtype) -> None:
    for shape in ((3, 16), (1, 5, 16), (0, 16)):
        x, w, bias, norm = (torch.randn(size).to(dtype) for size in (shape, (8, 16), (8,), (16,)))
        for gated in (False, True):
            residual = torch.randn(*shape[:-1], 4 if gated else 8).to(dtype)
            for parts in ((None, None, None), (bias, None, residual), (None, norm, None), (bias, norm, residual)):
                with_bias, with_norm, with_residual = parts
                arguments = (x, w, with_bias, with_norm, 1e-5, 0.0, False, with_residual, "silu" if gated else None, "")
                assert fused_linear(*arguments).equal(_eager(x, w, with_bias, with_norm, 1e-5, with_residual, gated))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_round_as_separate_products(dtype: torch.dtype) -> None:
    x, w, norm, factors, residual, addend = (
        torch.randn(size).to(dtype) for size in ((1, 5, 16), (8, 16), (16,), (8,), (1, 5, 8), (1, 5, 8))
    )
    scaled = F.linear(x * 1.3, w) * factors
    assert linear(x, w, None, "", 1.3, factors).equal(scaled)
    columns = F.linear(x, w)
    columns = torch.cat([columns[..., :2], columns[..., 2:5] * 0.3, columns[..., 5:]], -1)
    assert linear(x, w, None, "", 1.0, None, 0.3, 2, 5).equal(columns)
    normed = norm * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    around = (None, norm, 1e-5, 0.0, False, residual, None, "")
    expected = residual + (addend + F.linear(normed * 1.3, w) * 0.3)
    assert fused_linear(x, w, *around, 1.3, None, 0.3, 0, 0, addend).equal(expected)


def test_opcheck_of_the_fused_linear() -> None:
    x, w, norm = torch.randn(1, 5, 16), torch.randn(8, 16), torch.randn(16)
    torch.library.opcheck(fused_linear, (x, w, None, norm, 1e-5, 0.0, False, torch.randn(1, 5, 4), "silu", "1=blas"))
    torch.library.opcheck(fused_linear, (x, w, torch.randn(8), None, 0.0, 0.0, False, None, None, ""))
    torch.library.opcheck(linear, (x, w, None, "", 1.3, torch.randn(8)))


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("tests.ops.interpreted_linear")


def _built(config: LinearConfig, tokens: int, kind: str, dtype: torch.dtype) -> str:
    """PTX of a configuration for sm_90; `kind` as in interpreted_linear."""
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from tests.ops.interpreted_linear import around_of
    from torchweave.ops.kernels import linear as kernels

    fusion = around_of(kind, tokens, 4096, 2048)
    fused = {
        name: getattr(fusion, name).to(dtype)
        for name in ("bias", "norm", "residual", "addend", "factors")
        if getattr(fusion, name) is not None
    }
    x, w = torch.empty(tokens, 2048, dtype=dtype), torch.empty(4096, 2048, dtype=dtype)
    out = torch.empty(tokens, 2048 if fusion.activation else 4096, dtype=dtype)
    with recorded(kernels, "row_kernel", "dot_kernel", "split_kernel") as launches:
        run(config, x, w, out, replace(fusion, **fused))
    return compile_for_hopper(launches[0]).asm["ptx"]


BUILDS = [
    (LinearConfig("row", 4, 1024, 4, 4), 1, "n"),
    (LinearConfig("row", 8, 1024, 4, 2, dependent=1), 2, "ng"),
    (LinearConfig("row", 2, 1024, 4, 2, dependent=2), 4, "r"),
    (LinearConfig("dot", 64, 128, 4, 4, dependent=1), 32, "g"),
    (LinearConfig("dot", 16, 256, 4, 4), 8, "r"),
    (LinearConfig("split", 16, 64, 4, 4, dependent=1), 8, "n"),
    (LinearConfig("split", 32, 32, 8, 4, dependent=1), 32, "wh"),
    (LinearConfig("row", 4, 1024, 4, 4, dependent=1), 1, "xv"),
    (LinearConfig("row", 4, 1024, 4, 4, dependent=1), 1, "far"),
    (LinearConfig("split", 16, 64, 4, 4, dependent=1), 8, "nfg"),
]


@pytest.mark.parametrize(("config", "tokens", "kind"), BUILDS, ids=lambda value: getattr(value, "kernel", value))
def test_kernels_build_for_hopper(config: LinearConfig, tokens: int, kind: str) -> None:
    pytest.importorskip("triton")
    ptx = _built(config, tokens, kind, torch.bfloat16 if tokens != 4 else torch.float16)
    weights = re.findall(r"cp\.async\.cg\.shared\.global .*0x10|ld\.global\.L1::evict_first\S*v4\.b32", ptx)
    assert weights, "the weight must be read 16 bytes at a time"
    assert ("griddepcontrol.wait" in ptx) == bool(config.dependent)
    assert ("mma" in ptx) == (config.kernel != "row"), "tensor cores are used where they are meant to be"


def test_tiles_of_the_row_kernel_stay_words_until_they_are_multiplied() -> None:
    """A tile that is divided where it is loaded makes the program wait for memory there, and takes twice the registers."""
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels import linear as kernels

    x, w, out = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((1, 4096), (64, 4096), (1, 64)))
    norm = torch.empty(4096)  # of float32: it is read as the two halves of a word, too
    with recorded(kernels, "row_kernel") as launches:
        run(LinearConfig("row", 2, 2048, 4, 1, dependent=1), x, w, out, LinearFusion(norm=norm, eps=1e-5))
    kernel = compile_for_hopper(launches[0])
    before_wait = kernel.asm["ptx"].partition("griddepcontrol.wait")[0]
    assert "ld.global" in before_wait and "%rs" not in before_wait.partition("ld.global")[2]
    carried = " ".join(re.findall(r"scf\.for .*iter_args\(.*\) -> \((.*)\)", kernel.asm["ttgir"]))
    assert "xi32" in carried and "xbf16" not in carried
