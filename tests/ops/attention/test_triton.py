"""The Triton backend without a GPU: interpreted against float64, and built for sm_90."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.ops.attention.attention_cases import Case, build
from tests.ops.interpreted import run_interpreted

pytest.importorskip("triton")

from tests.ops.cross_compile import compile_for_hopper, recorded, spilled_bytes
from torchweave.ops.attention.backends import triton as attention_triton
from torchweave.ops.attention.backends.fa3 import Fa3Backend
from torchweave.ops.attention.backends.triton import (
    MAX_SPLITS,
    DecodeConfig,
    PrefillConfig,
    TritonBackend,
    default_decode_config,
)
from torchweave.ops.attention.op import LayerSpec
from torchweave.ops.kernels import rope

KERNELS = ("paged_decode", "paged_prefill", "write_kv")
HOPPER_SMEM = 232448


def test_interpreted_kernels_equal_float64() -> None:
    """All of `attention_cases.CASES` and `ROTARY_CASES`, and the variants of the program itself."""
    run_interpreted("tests.ops.attention.interpreted_attention")


def launches(
    case: Case, decode: DecodeConfig | None = None, prefill: PrefillConfig | None = None, num_sms: int = 132
) -> list:
    """What the backend launches on an H100 for one step of `case`."""
    backend = TritonBackend(torch.device("cpu"), decode=decode, prefill=prefill, num_sms=num_sms)
    built = build(case)
    with recorded(attention_triton, *KERNELS) as found, recorded(rope, "rope_kernel") as turned:
        built.run(backend.begin(built.meta))
    return turned + found


def names(found: list) -> list[str]:
    return [launch.kernel.fn.__name__ for launch in found]


DECODE = ((1, 200), (1, 30))
MIXED = ((1, 200), (70, 3))
BUILT = {
    "llama_1b": (LayerSpec(8, 64, 64, 32), torch.bfloat16, 64),
    "llama_8b": (LayerSpec(8, 128, 128, 32), torch.bfloat16, 64),
    "small_blocks": (LayerSpec(8, 128, 128, 32), torch.bfloat16, 16),
    "phi_96": (LayerSpec(2, 96, 96, 2), torch.float16, 64),
    "gemma_256": (LayerSpec(1, 256, 256, 4, window=4096, softcap=50.0), torch.bfloat16, 64),
    "gemma_3_images": (LayerSpec(4, 256, 256, 8, window=1024, lookahead=True), torch.bfloat16, 64),
    "gpt_oss": (LayerSpec(8, 64, 64, 64, window=128, sinks=True), torch.bfloat16, 64),
    "mpt_alibi": (LayerSpec(32, 128, 128, 32, alibi=True), torch.bfloat16, 64),
    "deepseek": (LayerSpec(4, 192, 128, 4), torch.bfloat16, 64),
    "llama4_chunks": (LayerSpec(2, 128, 128, 10, chunk=8192), torch.bfloat16, 64),
    "float32": (LayerSpec(2, 80, 80, 4), torch.float32, 64),
    "llama_1b_fp8": (LayerSpec(8, 64, 64, 32, cache_dtype=torch.float8_e4m3fn), torch.bfloat16, 64),
    "llama_8b_fp8": (LayerSpec(8, 128, 128, 32, cache_dtype=torch.float8_e4m3fn), torch.bfloat16, 64),
    "llama_8b_e5m2": (LayerSpec(8, 128, 128, 32, cache_dtype=torch.float8_e5m2), torch.float16, 64),
    "gpt_oss_fp8": (
        LayerSpec(8, 64, 64, 64, window=128, sinks=True, cache_dtype=torch.float8_e4m3fn),
        torch.bfloat16,
        16,
    ),
}


@pytest.mark.parametrize("name", BUILT)
def test_kernels_build_for_hopper(name: str, tmp_path: Path) -> None:
    spec, dtype, block_size = BUILT[name]
    spans = ((1, 1, 65),) if spec.lookahead else ()
    mixed = Case(MIXED, spec, block_size, dtype=dtype, spans=spans)
    found = launches(Case(DECODE, spec, block_size, dtype=dtype)) + launches(mixed)
    assert names(found) == ["paged_decode", "write_kv", "paged_prefill", "paged_decode"]
    of_many_tokens = launches(mixed, num_sms=1)[1]  # many for so few multiprocessors
    for launch in (*found, of_many_tokens):
        kernel = compile_for_hopper(launch)
        assert kernel.metadata.shared <= HOPPER_SMEM, f"{launch.kernel.fn.__name__} takes too much shared memory"
        if launch.kernel.fn.__name__ == "paged_decode" and dtype != torch.float32:
            assert spilled_bytes(kernel, tmp_path) == 0
        if launch.kernel.fn.__name__ == "paged_prefill" and dtype != torch.float32:
            assert "wgmma" in kernel.asm["ptx"], "the prefill kernel does not use the tensor cores of Hopper"
            sass = kernel.asm["sass"]
            products, moves, groups = (sass.count(word) for word in ("HGMMA", "R2UR", "WARPGROUP.ARRIVE"))
            assert moves < products, "addresses of products are computed by each thread"
            assert groups < products, "the assembler runs products one by one"


def test_a_decode_step_is_one_launch() -> None:
    assert names(launches(Case(DECODE, LayerSpec(8, 64, 64, 32)))) == ["paged_decode"]


@pytest.mark.parametrize("spec", [LayerSpec(2, 256, 256, 16), LayerSpec(4, 128, 128, 32)], ids=["qwen_3_5", "afmoe"])
def test_a_gate_takes_no_launch(spec: LayerSpec) -> None:
    gated = {"block_size": 64, "dtype": torch.bfloat16, "gated": True}
    decode, mixed = launches(Case(DECODE, spec, **gated)), launches(Case(MIXED, spec, **gated))
    assert names(decode) == ["paged_decode"] and names(mixed) == ["write_kv", "paged_prefill", "paged_decode"]
    for launch in (*decode, *mixed[1:]):
        assert launch.kwargs["GATED"]
        kernel = compile_for_hopper(launch)
        assert kernel.metadata.shared <= HOPPER_SMEM and "ex2.approx" in kernel.asm["ptx"]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        LayerSpec(8, 64, 64, 32),
        LayerSpec(8, 128, 128, 32),
        LayerSpec(8, 128, 128, 32, cache_dtype=torch.float8_e4m3fn),
        LayerSpec(8, 64, 64, 32, cache_dtype=torch.float8_e5m2),
    ],
)
def test_rope_is_fused_into_attention_or_kv_write(spec: LayerSpec, norm: bool) -> None:
    rotary = {"rotary": spec.head_dim, "norm": norm, "dtype": torch.bfloat16, "block_size": 64}
    decode, mixed = launches(Case(DECODE, spec, **rotary)), launches(Case(MIXED, spec, **rotary))
    assert names(decode) == ["paged_decode"]
    assert names(mixed) == ["rope_kernel", "paged_prefill", "paged_decode"]
    for launch in decode + mixed[:1]:
        assert compile_for_hopper(launch).metadata.shared <= HOPPER_SMEM


@pytest.mark.parametrize("norm", [False, True])
def test_few_decode_rows_use_a_separate_rope_launch(norm: bool) -> None:
    spec, dependent = LayerSpec(8, 64, 64, 32), DecodeConfig(dependent=2)
    few, more = (((1, 200),) * count for count in (4, 5))
    found = launches(Case(few, spec, rotary=64, norm=norm), dependent)
    assert names(found) == ["rope_kernel", "paged_decode"] and found[1].kwargs["HALF"] == 0
    assert names(launches(Case(more, spec, rotary=64, norm=norm), dependent)) == ["paged_decode"]


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_only_what_earlier_kernels_wrote_is_read_before_the_wait(rows: tuple[tuple[int, int], ...]) -> None:
    case = Case(rows, LayerSpec(8, 128, 128, 32), block_size=64, dtype=torch.bfloat16)
    kernel = compile_for_hopper(launches(case, DecodeConfig(dependent=2))[-1])
    before, after = kernel.asm["ptx"].split("griddepcontrol.wait")
    assert "prefetch.global.L2" in before and "prefetch" not in after
    loads = [line for line in before.splitlines() if "ld.global" in line]
    assert loads and all(".cg" in line for line in loads), "a line in L1 could be stale behind the wait"
    assert "ld.global" in after and "st.global" not in before


@pytest.mark.parametrize(
    ("rows", "kv_heads", "max_len"),
    [(1, 8, 8192), (1, 1, 100), (5, 8, 8192), (32, 8, 8192), (256, 8, 8192), (1, 200, 64)],
)
def test_splits_fit_the_workspace(rows: int, kv_heads: int, max_len: int) -> None:
    backend = TritonBackend(torch.device("cpu"), num_sms=132)
    config = default_decode_config(64, torch.bfloat16, torch.bfloat16, rows)
    splits = backend.num_splits(config, rows, kv_heads, max_len, 4 * 64)
    assert 1 <= splits <= MAX_SPLITS
    assert splits & (splits - 1) == 0, "each other number would be another kernel to build"
    if splits > 1:
        work = backend.workspace(4, 64, 64, torch.bfloat16)
        assert rows * kv_heads * splits <= len(work.partial)
        assert rows * kv_heads <= len(work.counters)


def test_small_prefills_use_smaller_tiles() -> None:
    backend, bf16 = TritonBackend(torch.device("cpu"), num_sms=132), torch.bfloat16
    of_1b = [backend.prefill_config(64, 32, 8, bf16, tokens).block_m for tokens in (16, 1000, 1056, 1057, 8192)]
    assert of_1b == [64, 64, 64, 128, 128]
    assert backend.prefill_config(64, 71, 1, bf16, 16).block_m == 128, "a tile holds a token's heads"
    assert backend.prefill_config(64, 32, 8, torch.float32, 16) == backend.prefill_config(
        64, 32, 8, torch.float32, 8192
    )
    given = PrefillConfig(256, 64, 8, 3)
    assert TritonBackend(torch.device("cpu"), num_sms=132, prefill=given).prefill_config(64, 32, 8, bf16, 16) == given


def test_batch_sizes_share_kernels() -> None:
    """Recording 30 batch sizes must not build 30 kernels."""

    backend = TritonBackend(torch.device("cpu"), num_sms=132)
    built = build(Case(((1, 200),), LayerSpec(8, 64, 64, 32)))

    def constants(rows: int) -> tuple:
        meta = dataclasses.replace(built.meta, num_rows=rows)
        with recorded(attention_triton, *KERNELS) as found:
            backend.begin(meta).forward(built.call, built.cache)
        return tuple(sorted((name, value) for name, value in found[0].kwargs.items()))

    assert len({constants(rows) for rows in (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 200)}) <= 4


def test_block_size_that_is_no_power_of_two_is_refused() -> None:
    backend = TritonBackend(torch.device("cpu"), num_sms=132)
    with pytest.raises(ValueError, match="power of two"):
        backend.allocate(LayerSpec(1, 16, 16, 1), 4, 24, torch.float32, torch.device("cpu"))


def test_fa3_refuses_unsupported_layers() -> None:
    assert Fa3Backend.unsupported_reason(LayerSpec(8, 128, 128, 32), torch.bfloat16) is None
    assert "bfloat16" in (Fa3Backend.unsupported_reason(LayerSpec(8, 128, 128, 32), torch.float16) or "")
    assert "heads of 64 or 128" in (Fa3Backend.unsupported_reason(LayerSpec(8, 96, 96, 32), torch.bfloat16) or "")
    in_fp8 = LayerSpec(8, 128, 128, 32, cache_dtype=torch.float8_e4m3fn)
    assert "queries in FP8" in (Fa3Backend.unsupported_reason(in_fp8, torch.bfloat16) or "")
    assert "windows" in (Fa3Backend.unsupported_reason(LayerSpec(8, 64, 64, 64, window=128), torch.bfloat16) or "")
