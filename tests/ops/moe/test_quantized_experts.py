"""Experts in FP8 and packed: rounding, the op against float64 on the values of its weights, and its kernels without a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.int_cases import mxfp4_values
from tests.ops.interpreted import run_interpreted
from tests.ops.moe.experts_cases import call_of, cases, expected
from torchweave.models.weights.int_linear import MXFP4, NVFP4, IntScheme, quantize_int_weight
from torchweave.ops.kernels.moe.packing import Packing
from torchweave.ops.moe.experts import ExpertsCall
from torchweave.ops.moe.fused_experts import GemmConfig, Rows, Tiles, choose, run, weight_format
from torchweave.ops.moe.quantized_experts import quantized_experts
from torchweave.ops.quant.int_linear import dequantize_int
from torchweave.ops.quant.mxfp4 import quantize_mxfp4

GPT_OSS: dict[str, Any] = {
    "biased": True, "interleaved": True, "alpha": 1.702, "limit": 1.0, "width": 96, "inner": 64, "residual": True,
}  # fmt: skip
SHAPES = {
    "gpt_oss": GPT_OSS,
    "halves": {"width": 64, "inner": 32},
    "ungated": {"gated": False, "width": 32, "inner": 96},
}


FORMATS = ("fp8", "fp8_per_block")
PACKED = {
    "int4": IntScheme(4, 32),
    "int4-channel": IntScheme(4, 0),
    "int4-zero": IntScheme(4, 64),
    "int8": IntScheme(8, 32),
    "int8-zero": IntScheme(8, 64),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}
"""Formats in the layout of `torchweave::int_linear`."""
EVERY = (*FORMATS, *PACKED)
NARROW = Tiles(GemmConfig(32, 256, 2, 2), GemmConfig(64, 128, 2, 2, 4), block_m=8, dependent=True)
READ_DIFFERENTLY = (*FORMATS, "int4-zero", "int8-zero", "nvfp4")
"""A format for each way in which kernels read weights: FP8 by rows and by blocks, words and bytes with zeros, scales of rows."""


def quantized(weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """A weight `[E, rows, width]` in FP8, its scales, and its values in its dtype."""
    experts, rows, width = weight.shape
    blocks = (rows // 128, -(-width // 128)) if kind == "fp8_per_block" else (rows, 1)
    scale = torch.rand(experts, *blocks, generator=torch.Generator().manual_seed(rows)) + 0.5
    wide = scale
    if kind == "fp8_per_block":
        wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :, :width]
    q = (weight.float() / wide).to(torch.float8_e4m3fn)
    return q, scale, (q.float() * wide).to(weight.dtype)


def in_words(weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Packing, Tensor]:
    """A weight `[E, rows, width]` in words or bytes, its scales, what it has beside, and its values."""
    experts, rows, width = weight.shape
    made = quantize_int_weight(weight.flatten(0, 1), PACKED[kind])
    zero = None
    if kind.endswith("zero"):
        middle, generator = 1 << (PACKED[kind].bits - 1), torch.Generator().manual_seed(rows)
        zero = torch.randint(middle - 3, middle + 3, made.scale.shape, generator=generator).to(torch.uint8)
    values = dequantize_int(made.w, made.scale, zero, width, made.group, weight.dtype, made.row_scale)
    by_expert = (
        None if t is None else t.unflatten(0, (experts, rows)) for t in (made.w, made.scale, zero, made.row_scale)
    )
    w, scale, zero, row_scale = by_expert
    assert w is not None and scale is not None
    return w, scale, Packing(zero, row_scale, PACKED[kind].group), values.view(experts, rows, width)


def packed(case: dict[str, Any], kind: str) -> tuple[ExpertsCall, ExpertsCall]:
    """The call with weights in a format, and the same with their values in x's dtype."""
    call = call_of(case)
    if kind in PACKED:
        ups, downs = in_words(call.up, kind), in_words(call.down, kind)
        plain = replace(call, up=ups[3], down=downs[3])
        scales = {"up_scale": ups[1], "down_scale": downs[1], "up_packing": ups[2], "down_packing": downs[2]}
        return replace(call, up=ups[0], down=downs[0], **scales), plain
    (up, up_scale, up_values), (down, down_scale, down_values) = quantized(call.up, kind), quantized(call.down, kind)
    plain = replace(call, up=up_values, down=down_values)
    return replace(call, up=up, down=down, up_scale=up_scale, down_scale=down_scale), plain


def shapes(kind: str) -> list[dict[str, Any]]:
    """Kinds of experts that a format can have: blocks of FP8 are whole."""
    wide = {"width": 256, "inner": 128}
    return [shape | wide for shape in SHAPES.values()] if kind == "fp8_per_block" else list(SHAPES.values())


def arguments(call: ExpertsCall) -> tuple[Any, ...]:
    form = call.form
    return (
        call.x, call.index, call.weight, call.up, call.up_scale, call.down, call.down_scale, call.up_bias, call.down_bias,
        form.activation, form.gated, form.interleaved, form.alpha, form.limit, call.up_packing.group, call.up_packing.zero,
        call.down_packing.zero, call.up_packing.row_scale, call.down_packing.row_scale, call.residual,
    )  # fmt: skip


def test_every_number_is_rounded_to_the_nearest_code() -> None:
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.randn(5, 128) * torch.logspace(-6, 6, 5)[:, None]
    q, s = quantize_mxfp4(x)
    assert q.shape == (5, 64) and s.shape == (5, 4) and q.dtype == s.dtype == torch.uint8
    blocks, scale = x.unflatten(1, (4, 32)), torch.ldexp(torch.ones(5, 4), s.int() - 127)[..., None]
    nearest = ((blocks.abs() / scale)[..., None] - codes).abs().amin(-1) * scale
    values = mxfp4_values(q, s).unflatten(1, (4, 32))
    torch.testing.assert_close((values - blocks).abs(), nearest, rtol=1e-5, atol=0)
    assert bool((blocks.abs().amax(-1, keepdim=True) / scale < 8).all()) and bool((values.sign() * blocks >= 0).all())
    zeros, s = quantize_mxfp4(torch.zeros(1, 32))
    assert not mxfp4_values(zeros, s).any()
    exact = torch.tensor([0.5, -6, 3, 1.5] * 8)[None] * 2.0**-9
    assert torch.equal(mxfp4_values(*quantize_mxfp4(exact)), exact)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("kind", EVERY)
def test_on_a_cpu(kind: str, tokens: int) -> None:
    for shape in shapes(kind):
        call, plain = packed(cases(max(tokens, 1), **shape), kind)
        if tokens == 0:
            assert quantized_experts(*arguments(call.tokens(0, 0))).shape == (0, shape["width"])
            continue
        torch.testing.assert_close(quantized_experts(*arguments(call)).double(), expected(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["int4", "int8", "fp8"])
def test_rows_run_with_few_tokens_and_tiles_with_more(weights: str) -> None:
    chosen = {n: type(choose(n, 4, (32, 2880, 2880), torch.bfloat16, weights=weights)) for n in (1, 2, 3, 4, 5, 8192)}
    few, four = Tiles if weights == "int8" else Rows, Rows if weights == "int4" else Tiles
    assert chosen == {1: few, 2: few, 3: four, 4: four, 5: Tiles, 8192: Tiles}


def test_narrow_tiles_run_while_an_expert_has_few_tokens() -> None:
    def block_m(tokens: int, weights: str) -> int:
        strategy = choose(tokens, 8, (128, 2048, 768), torch.bfloat16, weights=weights)
        assert isinstance(strategy, Tiles)
        return strategy.block_m

    assert [block_m(tokens, "int4") for tokens in (8, 64, 65)] == [8, 8, 16]
    assert [block_m(tokens, "fp8") for tokens in (8, 64, 65)] == [8, 8, 16]
    assert block_m(32, "int8") == 16


@pytest.mark.parametrize("kind", EVERY)
def test_weight_format_follows_from_dtype_and_scale(kind: str) -> None:
    call, plain = packed(cases(1, **shapes(kind)[0]), kind)
    assert weight_format(call) == kind.split("-")[0]
    assert weight_format(plain) is None


def test_opcheck() -> None:
    for kind in EVERY:
        checks = (
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        )  # others compare FP8 tensors by operations that it lacks
        torch.library.opcheck(
            quantized_experts, arguments(packed(cases(3, **shapes(kind)[0]), kind)[0]), test_utils=checks
        )


def check_kernels(kinds: tuple[str, ...]) -> None:
    """In Triton's interpreter: widths that are multiples of a tile's and others, and experts of another rank.

    FP8 runs with tiles of another size, too. Kernels compute the rows of an expert's form before they read their format, so that
    formats whose kernel is another's with other constants run with the first form alone (tests/gpu runs every pair).
    """
    from tests.ops.moe.interpreted_experts import TILES

    wide = tuple(replace(each, up=replace(each.up, block_k=64), down=replace(each.down, block_k=64)) for each in TILES)
    even, odd = (Rows(GemmConfig(n, 128, 2, 1), GemmConfig(n, 128, 2, 1)) for n in (4, 64))
    for kind in kinds:
        for number, shape in enumerate(shapes(kind)[: None if kind in READ_DIFFERENTLY else 1]):
            for tokens in (2, 19):
                case = cases(tokens, **shape)
                case["index"][0, 0] = 77
                call, plain = packed(case, kind)
                rows = even if number == 1 else odd
                tiles = wide[: 2 if number == 0 and kind == "fp8" else 1]
                if kind in ("int4-zero", "mxfp4", "nvfp4") and number == 0:  # two, four and eight groups in a block
                    tiles = (*tiles, replace(NARROW, dependent=False))
                for strategy in tiles if tokens > 2 else (wide[0] if kind.startswith("int8") else rows,):
                    out = torch.full_like(call.out, torch.nan)
                    run(replace(call, out=out), strategy)
                    torch.testing.assert_close(out.double(), expected(plain), rtol=1e-4, atol=1e-4)


def test_kernels_in_the_interpreter() -> None:
    """All formats in one process: the code that quantizes imports transformers, 2 s of CPU time."""
    run_interpreted("tests.ops.moe.test_quantized_experts", *EVERY)


@pytest.mark.parametrize("kind", EVERY)
def test_kernels_build_for_hopper(kind: str) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.moe import experts_tiles as kernels
    from torchweave.ops.kernels.moe import sort_pairs

    call, _ = packed(cases(8, **(GPT_OSS | {"width": 1408, "inner": 640, "dtype": torch.bfloat16})), kind)
    strategy = choose(64, 4, (32, 2880, 2880), torch.bfloat16)
    assert isinstance(strategy, Tiles)
    names = ("tiles_up_kernel", "tiles_down_kernel", "combine_kernel")
    with recorded(sort_pairs, "sort_pairs_kernel"), recorded(kernels, *names) as launches:
        run(call, strategy)
    for launch in launches[:2]:
        in_words = call.up.dtype == torch.int32
        given = replace(launch, kwargs=launch.kwargs | {"ASSEMBLY": True}) if in_words else launch
        compiled = compile_for_hopper(given)
        assert "mma" in compiled.asm["ptx"] and compiled.metadata.shared <= 227 << 10


@pytest.mark.parametrize("kind", [kind for kind in EVERY if not kind.startswith("int8")])
def test_narrow_tiles_build_for_hopper(kind: str) -> None:
    """Products of two warps keep e4m3 numbers away from the conversion by single numbers, and scales away from shared memory."""
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.moe import experts_tiles as kernels
    from torchweave.ops.kernels.moe import sort_pairs

    call, _ = packed(cases(8, **(GPT_OSS | {"width": 1408, "inner": 640, "dtype": torch.bfloat16})), kind)
    names = ("tiles_up_kernel", "tiles_down_kernel", "combine_kernel")
    with recorded(sort_pairs, "sort_pairs_kernel"), recorded(kernels, *names) as launches:
        run(call, replace(NARROW, down=replace(NARROW.down, block_k=128), up=replace(NARROW.up, block_k=128)))
    for launch in launches[:2]:
        compiled = compile_for_hopper(replace(launch, kwargs=launch.kwargs | {"ASSEMBLY": True}))
        assert "mma.sync" in compiled.asm["ptx"] and "cvt.bf16.f16" not in compiled.asm["ptx"]
        assert "prefetch.global.L2" in compiled.asm["ptx"] or launch is launches[0]


@pytest.mark.parametrize("kind", [kind for kind in EVERY if not kind.startswith("int8")])
def test_kernels_of_few_tokens_build_for_hopper(kind: str) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.moe import experts_gemv, experts_tiles

    call, _ = packed(cases(1, **(GPT_OSS | {"width": 1408, "inner": 640, "dtype": torch.bfloat16})), kind)
    strategy = choose(1, 4, (32, 2880, 2880), torch.bfloat16, weights=weight_format(call))
    names = (f"{name}_{side}_kernel" for name in ("rows", "words") for side in ("up", "down"))
    with recorded(experts_gemv, *names) as launches, recorded(experts_tiles, "combine_kernel"):
        run(call, strategy)
    assert len(launches) == 2
    for launch in launches:
        in_words = call.up.dtype == torch.int32
        given = replace(launch, kwargs=launch.kwargs | {"ASSEMBLY": True}) if in_words else launch
        compiled = compile_for_hopper(given)
        assert not in_words or "lop3" in compiled.asm["ptx"] or "prmt" in compiled.asm["ptx"]


if __name__ == "__main__":
    torch.manual_seed(0)
    check_kernels(tuple(sys.argv[1:]))
