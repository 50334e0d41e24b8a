"""Both linear kernels on a GPU against float64, in CUDA graphs and as programmatic dependent launches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torchweave.ops.linear import LinearFusion, linear, linear_gelu, run, run_unfused
from torchweave.ops.linear_config import LinearConfig, choose, default_choices

pytestmark = pytest.mark.gpu

SHAPES = [(2048, 2048), (3072, 2048), (2048, 8192), (5000, 4104), (1001, 2880)]


def check(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, cublas: bool = False) -> None:
    """The kernels sum in float32 and round once; cuBLAS may add partial sums in the low precision."""
    expected = x.double() @ w.double().T + (0 if bias is None else bias.double())
    unit = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=unit, atol=unit * (2 if cublas else 0.05))


def operands(tokens: int, outputs: int, width: int, dtype: torch.dtype):
    torch.manual_seed(outputs + width)
    x = torch.randn(tokens, width, device="cuda", dtype=dtype)
    return (
        x,
        torch.randn(outputs, width, device="cuda", dtype=dtype) / width**0.5,
        torch.randn(outputs, device="cuda", dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_at_every_small_token_count(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for tokens in (0, 1, 2, 3, 17):
        x, w, bias = operands(tokens, *shape, dtype)
        for added in (None, bias):
            got = linear(x, w, added, default_choices(*shape, dtype))
            check(got, x, w, added, cublas=choose(tokens, *shape, dtype) is None)
    x = torch.randn(1, 1, shape[1], device="cuda", dtype=dtype)
    assert linear(x, w, None, default_choices(*shape, dtype)).shape == (1, 1, shape[0])


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_config(shape: tuple[int, int], dependent: bool) -> None:
    configs = [LinearConfig("row", n, k, 4, 4, dependent) for n, k in ((4, 1024), (8, 512), (2, 2048))]
    configs += [LinearConfig("dot", 16, 256, 4, 3, dependent), LinearConfig("dot", 64, 128, 4, 4, dependent)]
    configs += [
        LinearConfig("split", 16, 64, 4, 4, dependent),
        LinearConfig("split", 32, 32, 8, 3, dependent),
    ]
    for config in configs:
        for tokens in (1, 2) if config.kernel == "row" else (1, 5, 16):
            x, w, bias = operands(tokens, *shape, torch.bfloat16)
            out = torch.full((tokens, shape[0]), torch.nan, device="cuda", dtype=torch.bfloat16)
            run(config, x, w, out, LinearFusion(bias))
            check(out, x, w, bias)


def differs(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of unequal values, after a check that all are close."""
    unit = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), expected.float(), rtol=4 * unit, atol=4 * unit)
    return (got != expected).float().mean().item()


@pytest.mark.parametrize("norm_apart", [False, True])
@pytest.mark.parametrize("kernel", ["row", "dot", "split"])
def test_fused_linear_rounds_as_separate_ops_do(kernel: str, norm_apart: bool) -> None:
    config = {
        "row": LinearConfig("row", 4, 1024, 4, 2, 1, norm_apart),
        "dot": LinearConfig("dot", 64, 128, 4, 4, 1, norm_apart),
        "split": LinearConfig("split", 16, 64, 4, 4, 1, norm_apart),
    }[kernel]
    for tokens in (1, 2, 3) if kernel == "row" else (1, 7, 33):
        x, w, bias = operands(tokens, 4096, 2048, torch.bfloat16)
        norm, half, whole = (
            torch.rand_like(x[0]),
            torch.randn_like(x),
            torch.randn(tokens, 4096, device="cuda").bfloat16(),
        )
        for fusion in (
            LinearFusion(bias=bias, residual=whole),
            LinearFusion(norm=norm, eps=1e-5),
            LinearFusion(norm=norm, eps=1e-5, activation="silu"),
            LinearFusion(norm=norm, eps=1e-5, offset=1.0, wide=True, activation="gelu_tanh", residual=half),
            LinearFusion(input_factor=1.3, factors=torch.rand_like(bias)),
            LinearFusion(norm=norm, eps=1e-5, activation="silu", factor=0.3, end=2048),
            LinearFusion(
                norm=norm, eps=1e-5, input_factor=0.7, factor=0.3, residual=whole, addend=whole.flip(1).contiguous()
            ),
        ):
            expected = run_unfused(x, w, fusion)
            out = torch.full_like(expected, torch.nan)
            run(config, x, w, out, fusion)
            # cuBLAS may sum in another order: a product that falls on the other side of a tie is another number.
            assert differs(out, expected) < 0.05, fusion


@pytest.mark.parametrize("dependent", [0, 1, 2])
def test_chained_launches_in_a_graph(dependent: int) -> None:
    """Layers that read the previous one's output: a missing wait of a dependent launch would read stale values."""
    config = LinearConfig("row", 4, 1024, 4, 4, dependent)
    weights = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 2048**0.5 for _ in range(24)]
    x = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)
    outs = [torch.empty_like(x) for _ in weights]

    def chain() -> None:
        value = x
        for weight, out in zip(weights, outs, strict=True):
            run(config, value, weight, out)
            value = F.silu(out) if out is outs[7] else out  # an ordinary kernel between dependent ones

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        graph.replay()
        value = x
        for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
            check(out, value, weight, None)
            value = F.silu(out) if i == 7 else out


def test_unsupported_operands_fall_back_to_cublas() -> None:
    x, w, _ = operands(1, 2048, 2048, torch.bfloat16)
    shifted = torch.empty(2048 * 2048 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(2048, 2048)
    shifted.copy_(w)
    choices = default_choices(2048, 2048, torch.bfloat16)
    check(linear(x, shifted, None, choices), x, w, None, cublas=True)
    transposed = w.T.contiguous().T
    check(linear(x, transposed, None, choices), x, w, None, cublas=True)
    assert linear(x.float(), w.float(), None, choices).dtype == torch.float32


def test_slices_of_a_merged_weight() -> None:
    merged = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16) / 2048**0.5
    x = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)
    check(linear(x, merged[1024:3072], None, default_choices(2048, 2048, torch.bfloat16)), x, merged[1024:3072], None)


def test_tuning_table_covers_the_decode_shapes() -> None:
    assert all(choose(tokens, 3072, 2048, torch.bfloat16) for tokens in (1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 577, 4096])
def test_linear_gelu_rounds_once(tokens: int, dtype: torch.dtype) -> None:
    """The widths of SigLIP's MLP; never further from float64 than the separate calls, but for float32's own roundings."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    x, w, bias = (
        torch.randn(*shape, generator=generator, device="cuda").mul(scale).to(dtype)
        for shape, scale in (((1, tokens, 1152), 1.0), ((4304, 1152), 1152**-0.5), ((4304,), 0.1))
    )
    right = F.gelu(F.linear(x.double(), w.double(), bias.double()), approximate="tanh")
    got = linear_gelu(x, w, bias)
    assert got.shape == right.shape and got.dtype == dtype and got.is_contiguous()
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), right, rtol=unit, atol=unit * 0.02)
    apart = F.gelu(F.linear(x, w, bias), approximate="tanh")
    assert (got - right).norm() <= (apart - right).norm()
