"""The C++ backend against float64, and its guarantees beyond the torch backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor import codecache

from tests.ops.attention.attention_cases import CASES, Built, Case, build, in_fp8
from torchweave.ops.attention.backends.cpp import LONG_PREFILL_TOKENS
from torchweave.ops.attention.choose import get_backend
from torchweave.ops.attention.kv_cache_dtype import FP8_DTYPES
from torchweave.ops.attention.op import LayerSpec
from torchweave.ops.kernels import cpp
from torchweave.ops.kernels.cpp import has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def run(built: Built) -> Tensor:
    step = get_backend("cpp", "cpu").begin(built.meta)
    built.run(step)
    return built.out


@pytest.mark.parametrize("name", CASES)
def test_cpp_backend_equals_float64(name: str) -> None:
    built = build(CASES[name])
    run(built)
    built.check(1e-5)


@pytest.mark.parametrize("name", ["decode", "mixed_sinks"])
def test_other_dtypes_use_the_torch_backend(name: str) -> None:
    built = build(dataclasses.replace(CASES[name], dtype=torch.bfloat16))
    run(built)
    built.check(2e-2)


@pytest.mark.parametrize("cache_dtype", FP8_DTYPES.values(), ids=FP8_DTYPES)
@pytest.mark.parametrize("name", ["decode_padded", "decode_all", "mixed", "mixed_sinks"])
def test_cpp_backend_over_an_fp8_cache(name: str, cache_dtype: torch.dtype) -> None:
    built = build(in_fp8(CASES[name], cache_dtype))
    run(built)
    built.check(1e-5)


@pytest.mark.parametrize("padded_tokens", [0, 5])
@pytest.mark.parametrize("window", [0, 40])
def test_long_and_short_rows_in_one_step(window: int, padded_tokens: int) -> None:
    rows = (
        (1, 30),
        (1, 0),
        (LONG_PREFILL_TOKENS - 1, 3),
        (LONG_PREFILL_TOKENS, 9),
        None,
        (LONG_PREFILL_TOKENS + 30, 0),
        (7, 20),
    )
    built = build(Case(rows, LayerSpec(2, 32, 32, 4, window=window), padded_tokens=padded_tokens))
    run(built)
    built.check(1e-5)


def test_a_token_does_not_depend_on_its_batch() -> None:
    """Bit for bit: a prompt in one piece, and its last token alone over the cache of the others, beside other rows."""
    whole = build(Case(((20, 0),)))
    alone = build(Case(((1, 19), (1, 5), (3, 4))))
    keys = whole.call.k.clone(), whole.call.v.clone()
    place = alone.meta.slot_mapping[0].item()
    blocks = alone.meta.block_table[alone.meta.slots[0]].tolist()
    for cache, values in zip(alone.cache.tensors, keys, strict=True):
        for position in range(19):
            cache[blocks[position // 16], position % 16] = values[position]
    for name in ("q", "k", "v"):
        getattr(alone.call, name)[0] = getattr(whole.call, name)[19]
    assert place == blocks[1] * 16 + 3
    assert torch.equal(run(alone)[0], run(whole)[19])


@pytest.mark.parametrize("rows", [((1, 9), (1, 40)), ((1, 4), (6, 0))])
def test_strides_that_models_produce(rows: tuple[tuple[int, int], ...]) -> None:
    built = build(Case(rows))
    q, k, v = built.call.q, built.call.k, built.call.v
    built.call = dataclasses.replace(
        built.call,
        q=q.transpose(0, 1).contiguous().transpose(0, 1),
        k=torch.cat([k, v], 1)[:, : k.shape[1]],
        v=v.transpose(1, 2).contiguous().transpose(1, 2),
    )
    assert built.call.v.stride(2) != 1
    run(built)
    built.check(1e-5)


def test_a_kernel_needs_no_precompiled_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor would precompile one, or preprocess it in each process to find it precompiled."""
    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "cache", {})
    monkeypatch.setattr(codecache, "_precompile_header", lambda *_, **__: pytest.fail("a header was asked for"))
    assert callable(cpp.attention.__wrapped__(16, 16, 2, 0))
