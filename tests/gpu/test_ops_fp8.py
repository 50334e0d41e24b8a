"""FP8 ops on a GPU bitwise against the torch references, also in CUDA graphs, and the choice of cuBLAS."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import torchweave.ops.quant.fp8_fused  # noqa: F401  (defines the fused ops)
from tests.ops.attention.attention_cases import Case, build
from torchweave.ops.attention.choose import get_backend
from torchweave.ops.attention.op import LayerSpec
from torchweave.ops.quant.fp8 import FP8, GROUP, fp8_quant, quantize
from torchweave.ops.quant.fp8_linear import Fp8Config, block_scales, choose, fp8_linear

pytestmark = pytest.mark.gpu

SCHEMES = [(0, None), (GROUP, None), (0, torch.tensor([0.02]))]
SHAPES = [(4096, 4096), (6144, 4096), (4096, 14336), (1040, 2880)]
ops = torch.ops.torchweave


def numbers(q: Tensor) -> Tensor:
    return q.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("group", "scale"), SCHEMES)
def test_quantization_equals_the_reference_bitwise(group: int, scale: Tensor | None, dtype: torch.dtype) -> None:
    for tokens, width in ((1, 4096), (2, 14336), (37, 2880), (5, 16), (3, 28672), (0, 64)):
        x = torch.randn(tokens, width, device="cuda", dtype=dtype) * 3
        if tokens > 2:
            x[1] = 0
        given = None if scale is None else scale.cuda()
        q, s = fp8_quant(x, group, given)
        # On the CPU: on a GPU torch divides by a number as it multiplies by its inverse.
        right_q, right_s = (each.cuda() for each in quantize(x.cpu(), group, scale))
        assert torch.equal(s, right_s) and torch.equal(numbers(q), numbers(right_q)), (tokens, width)


def operands(tokens: int, outputs: int, width: int, blocks: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(outputs + width)
    q, x_scale = quantize(torch.randn(tokens, width, device="cuda"), GROUP if blocks else 0)
    w = (torch.randn(outputs, width, device="cuda") * 100).clamp(-448, 448).to(FP8)
    shape = (-(-outputs // GROUP), -(-width // GROUP)) if blocks else (outputs,)
    w_scale = (torch.rand(shape, device="cuda") + 0.5) / 100 / width**0.5
    return q, x_scale, w, block_scales(w_scale) if blocks else w_scale


def expected(q: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    cpu = [None if each is None else each.cpu() for each in (q, x_scale, w, w_scale, bias)]
    return ops.fp8_linear(*cpu, torch.float32).cuda()


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_linear_at_small_and_large_token_counts(shape: tuple[int, int], blocks: bool) -> None:
    for tokens in (0, 1, 2, 3, 17, 33, 256):
        q, x_scale, w, w_scale = operands(tokens, *shape, blocks)
        for bias in (None, torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)):
            got = fp8_linear(q, x_scale, w, w_scale, bias, torch.bfloat16)
            # Above the small counts tensor cores add with about 14 bits, K / 32 times.
            atol = 2e-2 * max(shape[1] / 4096, 1)
            torch.testing.assert_close(got.float(), expected(q, x_scale, w, w_scale, bias), rtol=2**-7, atol=atol)
    assert fp8_linear(q[None], x_scale, w, w_scale, None, torch.float16).shape == (1, tokens, shape[0])


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dependent", [False, True])
def test_every_tile_config(blocks: bool, dependent: bool) -> None:
    configs = [
        Fp8Config("row", n, k, 4, 2, dependent=dependent) for n, k in ((4, 2048), (8, 1024), (2, 4096), (16, 512))
    ]
    configs += [Fp8Config("dot", n, k, 4, 4, 16, dependent) for n, k in ((16, 256), (64, 128), (32, 128))]
    configs += [Fp8Config("dot", 128, 128, 8, 3, 64)]
    for outputs, width in SHAPES:
        for config in configs:
            for tokens in (1, 2) if config.kernel == "row" else (1, 5, 40):
                q, x_scale, w, w_scale = operands(tokens, outputs, width, blocks)
                out = torch.full((tokens, outputs), torch.nan, device="cuda", dtype=torch.bfloat16)
                config.run(q, x_scale, w, w_scale, None, out)
                torch.testing.assert_close(out.float(), expected(q, x_scale, w, w_scale, None), rtol=2**-7, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "scale"), SCHEMES)
def test_fused_ops_equal_the_separate_ops(group: int, scale: Tensor | None, dtype: torch.dtype) -> None:
    """Against the kernels of the halves, which round at the same places: almost every number is the same, and none is far."""
    given = None if scale is None else scale.cuda()
    for tokens, width in ((1, 4096), (2, 14336), (37, 2880), (300, 4096)):
        x, r = (torch.randn(1, tokens, width, device="cuda", dtype=dtype) for _ in range(2))
        weight, gate_up = torch.rand(width, device="cuda", dtype=dtype), torch.cat((x, r), -1)
        y, h = ops.add_rms_norm(x, r, weight, 1e-5)
        q, s, total = ops.add_rms_norm_fp8(x, r, weight, 1e-5, 0.0, False, group, given)
        assert torch.equal(total, h)
        near((q, s), fp8_quant(y, group, given))
        q, s = ops.rms_norm_fp8(x, weight, 1e-5, 1.0, True, group, given)
        near((q, s), fp8_quant(ops.rms_norm(x, weight, 1e-5, 1.0, True), group, given))
        q, s = ops.gated_activation_fp8(gate_up, "silu", group, given)
        near((q, s), fp8_quant(ops.gated_activation(gate_up, "silu"), group, given))


def near(got: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(got[1], right[1], rtol=2**-7, atol=0)
    assert float((numbers(got[0]) != numbers(right[0])).float().mean()) < 0.02
    torch.testing.assert_close(got[0].float(), right[0].float(), rtol=0.13, atol=0.02)


@pytest.mark.parametrize("given", [None, 0.01])
def test_decode_kernel_writes_fp8_output(given: float | None) -> None:
    """Several splits, padding rows, RoPE in the kernel: its unquantized output, quantized."""
    case = Case(((1, 700), (1, 0), None, (1, 5000)), LayerSpec(8, 128, 128, 32), 64, dtype=torch.bfloat16, rotary=128)
    built = build(case, "cuda")
    backend = get_backend("triton", "cuda")
    backend.allocate(case.spec, 4, 64, torch.bfloat16, torch.device("cuda"))
    step = backend.begin(built.meta)
    built.run(step)
    scale = None if given is None else torch.tensor([given], device="cuda")
    q, s = fp8_quant(built.out.flatten(1), GROUP if scale is None else 0, scale)
    out = torch.empty(built.out.shape, dtype=FP8, device="cuda")
    written = torch.empty_like(s) if scale is None else None
    assert step.fuses_quant
    step.forward(dataclasses.replace(built.call, out=out, given_scale=scale, out_scale=written), built.cache)
    near((out.flatten(1), s if written is None else written), (q, s))


def test_static_scales() -> None:
    given = torch.tensor([0.03], device="cuda")
    for tokens in (1, 2, 5, 64):
        q, s = fp8_quant(torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16), 0, given)
        _, _, w, w_scale = operands(tokens, 1024, 4096, False)
        got = fp8_linear(q, s, w, w_scale, None, torch.bfloat16)
        torch.testing.assert_close(got.float(), expected(q, s, w, w_scale, None), rtol=2**-7, atol=2e-2)


@pytest.mark.parametrize("group", [0, GROUP])
def test_chained_launches_in_a_graph(group: int) -> None:
    """Consecutive dependent launches with quantization between them: a missing wait would read stale values."""
    width, blocks = 4096, group == GROUP
    layers = [operands(1, width, width, blocks)[2:] for _ in range(8)]
    for tokens in (1, 2, 4):
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)

        def chain(x: Tensor) -> Tensor:
            for w, w_scale in layers:
                q, s = fp8_quant(x, group)
                x = fp8_linear(q, s, w, w_scale, None, torch.bfloat16) * 4
            return x

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            chain(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x)
        for _ in range(10):
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, chain(x))


def test_kernel_choice() -> None:
    for blocks in (False, True):
        assert choose(1, 6144, 4096, blocks=blocks) is not None and choose(2048, 6144, 4096, blocks=blocks) is None
