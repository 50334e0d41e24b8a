"""Recurrent ops on a GPU against float64: every case of the CPU tests, published shapes, graphs whose rows change."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.ops.recurrent.recurrent_cases import SIZES, STEPS, Built, Case, build, case

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}


def tolerance(name: str, dtype: torch.dtype) -> float:
    """That of `name`; in bfloat16 the longest rows of `ssd` reach 1.2 times the usual one, and a gate multiplies errors by its
    value, up to four: emulated on a CPU, its roundings exceed the usual one 1.8 times in some of a million results."""
    factor = 1.0 if dtype == torch.float32 else 4.0 if name == "ssd_gates" else 1.5 if name == "ssd" else 1.0
    return factor * TOLERANCE[dtype]


MIXED = {"rows": ((1, 9), (1, 0), (200, 20), (2, 0), (300, 0), None), "padded_tokens": 21}
DRAFTS = {"rows": ((4, 9), (1, 6), (4, 300), (3, 20), None), "kept": (2, 1, 4, 1, 0), "padded_tokens": 8}
DECODE = {"rows": ((1, 9), (1, 0), None, (1, 300))}
PUBLISHED = {
    "lfm2": ("conv", (2048, 3)),
    "qwen3_next_conv": ("conv", (8192, 4)),
    "qwen3_next": ("delta", (16, 32, 128, 128)),
    "kimi_linear": ("delta_by_channel", (32, 32, 128, 128)),
    "falcon_h1": ("ssd_gates", (24, 128, 1, 256)),
    "nemotron_h": ("ssd", (128, 64, 8, 128)),
    "minimax": ("ssd_lightning", (16, 128, 16, 128)),
    "mamba": ("scan", (4096, 16)),
    "recurrent_gemma": ("lru", (2560,)),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", SIZES)
def test_equals_float64(name: str, step: str, dtype: torch.dtype) -> None:
    built = build(case(name, step, dtype=dtype, strided=step == "mixed"), "cuda")
    built.run()
    built.check(tolerance(name, dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [DECODE, MIXED, DRAFTS], ids=["decode", "mixed", "drafts"])
@pytest.mark.parametrize("model", PUBLISHED)
def test_published_shapes_equal_float64(model: str, rows: dict, dtype: torch.dtype) -> None:
    name, sizes = PUBLISHED[model]
    built = build(dataclasses.replace(case(name, "decode", dtype=dtype, **rows), sizes=sizes), "cuda")
    built.run()
    built.check(tolerance(name, dtype))


@pytest.mark.parametrize("name", ["conv", "delta", "ssd", "scan", "lru"])
def test_many_decode_rows(name: str) -> None:
    built = build(case(name, "decode", rows=tuple((1, i % 4) for i in range(300))), "cuda")
    built.run()
    built.check(TOLERANCE[torch.float32])


def load(target: Case, built: Built) -> None:
    """Copy the inputs, states and rows of another step of the same size into the tensors of `built`."""
    other = build(target, "cuda")
    for mine, theirs in zip(built.states, other.states, strict=True):
        mine.copy_(theirs)
    for name in ("slots", "query_start", "seq_lens"):
        getattr(built.meta, name).copy_(getattr(other.meta, name))
    for name, value in built.args.items():
        if isinstance(value, torch.Tensor) and value.stride(0):
            value.copy_(other.args[name])
    if built.position is not None and other.position is not None:
        built.position.copy_(other.position)
    built.expected, built.expected_state = other.expected, other.expected_state


@pytest.mark.parametrize("name", ["conv", "delta", "delta_by_channel", "ssd", "scan", "lru"])
def test_a_recorded_step_serves_other_rows(name: str) -> None:
    """One CUDA graph of 6 rows and 150 tokens, replayed for rows of other lengths and with padding."""
    first = case(name, "mixed", rows=((1, 4), (1, 0), (148, 9), (0, 1), None, None), padded_tokens=0)
    built = build(first, "cuda")
    built.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built.run()
    others = (
        first,
        dataclasses.replace(first, rows=((1, 4), (70, 0), (2, 9), (65, 3), (1, 0), None), padded_tokens=11, seed=1),
        dataclasses.replace(first, rows=((20, 0), (1, 5), (20, 2), None, None, None), padded_tokens=109, seed=2),
    )
    for other in others:
        load(other, built)
        graph.replay()
        torch.cuda.synchronize()
        built.check(TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", ["conv", "delta", "delta_by_channel", "ssd", "scan", "lru"])
def test_a_recorded_step_with_drafts_keeps_other_tokens(name: str) -> None:
    """One CUDA graph of 4 rows of up to 4 tokens, replayed for other drafts, other kept tokens and with padding."""
    first = case(name, "drafts", rows=((4, 9), (4, 20), (4, 70), (4, 3)), kept=(4, 1, 2, 3), padded_tokens=0)
    built = build(first, "cuda")
    built.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built.run_drafts()
    others = (
        first,
        dataclasses.replace(first, rows=((1, 4), (3, 7), (4, 90), None), kept=(1, 3, 1, 0), padded_tokens=8, seed=1),
        dataclasses.replace(first, rows=((2, 4), None, None, None), kept=(2, 0, 0, 0), padded_tokens=14, seed=2),
    )
    for other in others:
        load(other, built)
        graph.replay()
        torch.cuda.synchronize()
        built.check(TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", ["delta", "delta_alike", "delta_by_channel", "ssd"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_chunks_of_a_prompt_keep_its_accuracy(name: str, dtype: torch.dtype) -> None:
    """A prompt of 600 tokens in one step, whose state passes ten chunks."""
    built = build(case(name, "prefill", rows=((600, 100),), dtype=dtype), "cuda")
    built.run()
    built.check(TOLERANCE[dtype])
