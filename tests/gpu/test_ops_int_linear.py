"""Products with integer weights on a GPU against float64: every kernel, every kind of weight, CUDA graphs, and the whole engine."""

from __future__ import annotations

from pathlib import Path

import demo_tasks as tasks
import pytest
import torch

from tests.ops.int_cases import Fp4Operands, IntCase, Operands, fp4_operands, operands, weight_values
from tests.ops.quant.test_int8_linear import expected as int8_expected
from tests.ops.quant.test_int8_linear import operands as int8_operands
from torchweave import LLM, SamplingParams, TorchCompileConfig
from torchweave.ops.kernels.quant.dequantize import launch_dequantize
from torchweave.ops.quant.int8_linear import int8_linear
from torchweave.ops.quant.int_linear import IntConfig, int_linear, launch_samples
from torchweave.report import Report

pytestmark = pytest.mark.gpu

SHAPES = [(4096, 4096), (1000, 2880), (6144, 14336), (512, 4104)]
CASES = [
    IntCase(4, 128),
    IntCase(4, 128, zero=True, bias=True),
    IntCase(4, 64),
    IntCase(4, 32, zero=True),
    IntCase(4, 0, zero=True),
    IntCase(4, 256, order=True),
    IntCase(4, 48),
    IntCase(8, 128, bias=True),
    IntCase(8, 32, zero=True),
    IntCase(8, 0),
]

TILES = [
    (64, 4, 32, 1),
    (64, 4, 64, 2),
    (128, 8, 64, 1),
    (128, 4, 128, 1),
    (128, 8, 128, 4),
    (256, 8, 128, 1),
    (128, 8, 256, 1),
]
"""Rows, warps, tokens and programs of tiles."""


def check(got: torch.Tensor, made: Operands, unit: float) -> None:
    """Above 16 tokens weights in 4 bits are rounded to 16: of 4096 products each has an error of its own."""
    rounded = made.weight[0].dtype == torch.int32 and len(made.x) > 16
    torch.testing.assert_close(got.double(), made.expected(), rtol=unit, atol=unit * (0.8 if rounded else 0.5))


BF16, FP16 = torch.bfloat16, torch.float16
OPS = [(SHAPES[0], case, BF16) for case in CASES]
OPS += [(shape, case, BF16) for shape in SHAPES[1:] for case in (CASES[1], CASES[2], CASES[7])]
OPS += [(SHAPES[1], CASES[1], FP16), (SHAPES[1], CASES[8], FP16)]
"""Every kind of weight at one width and three at each other: a kernel is compiled for each width, kind and dtype."""


@pytest.mark.parametrize(("shape", "case", "dtype"), OPS, ids=str)
def test_op_at_every_kind_of_token_count(shape: tuple[int, int], case: IntCase, dtype: torch.dtype) -> None:
    unit = 2 * torch.finfo(dtype).eps
    for tokens in (0, 1, 2, 3, 9, 17, 40, 64, 65, 300, 513):
        made = operands(case, tokens, *shape, dtype, "cuda", seed=tokens)
        got = int_linear(made.x, *made.weight, made.bias, made.group)
        assert got.shape == (tokens, shape[0]) and got.dtype == dtype
        check(got, made, unit)
    assert int_linear(made.x[None], *made.weight, made.bias, made.group).shape == (1, tokens, shape[0])


FP4 = [("mxfp4", BF16), ("mxfp4", FP16), ("nvfp4", BF16), ("nvfp4", FP16)]


def check_fp4(got: torch.Tensor, made: Fp4Operands) -> None:
    unit = 2 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(
        got.double(), made.expected(), rtol=unit, atol=unit * float(made.expected().abs().amax())
    )


@pytest.mark.parametrize(("kind", "dtype"), FP4)
@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 2880), (6144, 14336)])
def test_e2m1_numbers(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    for tokens in (1, 2, 3, 9, 17, 64, 65, 300):
        made = fp4_operands(kind, tokens, *shape, dtype, "cuda", bias=tokens % 2 == 1)
        check_fp4(int_linear(*made.arguments), made)


@pytest.mark.parametrize(("kind", "dtype"), [each for each in FP4 if each != ("mxfp4", FP16)])
def test_configs_with_e2m1_numbers(kind: str, dtype: torch.dtype) -> None:
    """In float16 a power of two of MXFP4 may not fit."""
    configs = [IntConfig("split", 64, 4, 3, 32, 2), *(IntConfig("tile", n, warps, 3, t, p) for n, warps, t, p in TILES)]
    for tokens in (1, 3, 17, 65, 300):
        made = fp4_operands(kind, tokens, 1000, 2880, dtype, "cuda", bias=tokens > 1)
        for config in configs:
            out = torch.full((tokens, 1000), torch.nan, device="cuda", dtype=dtype)
            config.run(made.x, made.w, made.scale, None, made.bias, made.group, out, made.row_scale)
            check_fp4(out, made)


@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 2880), (28672, 4096)])
def test_w8a8(shape: tuple[int, int]) -> None:
    for tokens in (1, 3, 17, 64, 65, 300):
        x, w, scale, bias = (each.cuda() for each in int8_operands(tokens, *shape, torch.bfloat16))
        right = int8_expected(x, w, scale, bias)
        # Numbers midway between two steps may be rounded either way.
        atol = float(right.abs().amax()) * 2**-7
        torch.testing.assert_close(int8_linear(x, w, scale, bias).double(), right, rtol=2**-7, atol=atol)


@pytest.mark.parametrize(("hopper", "shape"), [(True, SHAPES[0]), (False, SHAPES[3])])
@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_configs(case: IntCase, hopper: bool, shape: tuple[int, int]) -> None:
    rows = [
        IntConfig("row", n, warps, depth, hopper=hopper) for n, warps, depth in ((4, 4, 512), (8, 2, 256), (2, 8, 1024))
    ]
    splits = [
        IntConfig("split", n, warps, stages, block_t=t, hopper=hopper)
        for n, warps, stages, t in ((16, 4, 4, 8), (16, 8, 3, 16), (32, 4, 4, 32), (64, 4, 3, 64))
    ]
    splits += [
        IntConfig(kernel, n, 4, stages, block_t=t, programs=programs, hopper=hopper)
        for kernel, n, stages, t, programs in (("split", 64, 3, 8, 2), ("tile", 64, 5, 16, 1), ("tile", 128, 5, 32, 4))
    ]
    for config in (*rows, *splits):
        for tokens in (1, 3) if config.kernel == "row" else (1, 5, 40):
            made = operands(case, tokens, *shape, torch.bfloat16, "cuda")
            out = torch.full((tokens, shape[0]), torch.nan, device="cuda", dtype=torch.bfloat16)
            config.run(made.x, *made.weight[:3], made.bias, made.group, out)
            check(out, made, 2**-7)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3]], ids=str)
def test_tiles(case: IntCase, tile: tuple[int, int, int, int]) -> None:
    """Tiles with rows, inputs and tokens left over; with many programs on a multiprocessor each run has the same bits."""
    n, warps, t, programs = tile
    config = IntConfig("tile", n, warps, 3, t, programs)
    for shape, tokens in (((1000, 2056), (1, t - 1, t, 3 * t // 2, 3 * t)), ((28672, 2056), (2 * t,))):
        for count in tokens:
            made = operands(case, count, *shape, torch.bfloat16, "cuda")
            out = torch.full((count, shape[0]), torch.nan, device="cuda", dtype=torch.bfloat16)
            config.run(made.x, *made.weight[:3], made.bias, made.group, out)
            check(out, made, 2**-7)
            for _ in range(8):
                again = torch.full_like(out, torch.nan)
                config.run(made.x, *made.weight[:3], made.bias, made.group, again)
                assert torch.equal(again, out)


@pytest.mark.parametrize("case", [case for case in CASES if case.group != 48], ids=str)
def test_dequantization_rounds_once(case: IntCase) -> None:
    for shape in SHAPES:
        made = operands(case, 1, *shape, torch.bfloat16, "cuda")
        out = torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)
        launch_dequantize(*made.weight[:3], made.group, out)
        torch.testing.assert_close(out, weight_values(made).float().bfloat16(), rtol=2**-8, atol=0)


def test_chain_in_a_graph() -> None:
    """Dependent launches one behind the other: one that did not wait would read stale numbers."""
    layers = [
        operands(IntCase(4, 128, zero=bool(at % 2)), 1, 4096, 4096, torch.bfloat16, "cuda", seed=at) for at in range(8)
    ]
    for tokens in (1, 2, 8, 100):
        x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)

        def chain(x: torch.Tensor) -> torch.Tensor:
            for made in layers:
                x = int_linear(x, *made.weight, None, made.group)
                x = x / x.float().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-3).bfloat16()
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


def test_samples_launch_what_merged_linears_need() -> None:
    """After them no shape of this width builds a kernel."""
    from torchweave.ops.kernels.quant.dequantize import dequantize_words_kernel
    from torchweave.ops.kernels.quant.int_linear import add_kernel, split_kernel
    from torchweave.ops.kernels.quant.int_rows import row_kernel
    from torchweave.ops.kernels.quant.int_tiles import tile_kernel

    made = operands(IntCase(4, 128), 8, 512, 2048, torch.bfloat16, "cuda")
    for tokens in (1, 8, 64, 128, 256, 512, 600):
        launch_samples(made.x[:1].expand(tokens, -1).contiguous(), *made.weight, None, 128)
    kernels = (row_kernel, split_kernel, tile_kernel, add_kernel, dequantize_words_kernel)
    built = [sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in kernels]
    for rows in (1024, 12288):
        wide = operands(IntCase(4, 128), 1, rows, 2048, torch.bfloat16, "cuda")
        for tokens in (1, 7, 60, 100, 200, 400, 700):
            int_linear(wide.x.expand(tokens, -1).contiguous(), *wide.weight, None, 128)
    assert built == [sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in kernels]


@pytest.mark.parametrize("enable_inductor", [True, False])
def test_the_demo_model_in_int4(enable_inductor: bool, tmp_path: Path) -> None:
    config = TorchCompileConfig(enable_inductor=enable_inductor, compile_cache_dir=str(tmp_path))
    report = Report(show=False)
    asked = [one for task in tasks.TASKS for one in tasks.held_out_questions(task, 20)]
    with LLM("demo", device="cuda", quantization="int4", torch_compile_config=config, report=report) as llm:
        assert not report.select("fallback")
        outputs = llm.generate(
            [tasks.plain_prompt(one) for one in asked], SamplingParams(temperature=0, max_tokens=120)
        )
    right = [output.outputs[0].text.strip() == one.answer.strip() for output, one in zip(outputs, asked, strict=True)]
    assert sum(right) / len(right) >= 0.95
    merged = next(event for event in report.select("pass") if event["name"] == "merge_int_linears")
    assert merged["matches"] == 10, "q/k/v and gate/up in each of 5 layers"
