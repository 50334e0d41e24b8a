"""Attention kernels on a GPU against float64: realistic shapes, CUDA graphs with changing lengths, padding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torchweave.ops.activation  # noqa: F401 (registers the op)
from tests.ops.attention.attention_cases import CASES, Built, Case, build
from torchweave.ops.attention.choose import available_backends, get_backend
from torchweave.ops.attention.op import AttentionBackend, LayerSpec

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
LLAMA_1B, LLAMA_8B = LayerSpec(8, 64, 64, 32), LayerSpec(8, 128, 128, 32)

REALISTIC = {
    "1b_batch_1": Case(((1, 1023),), LLAMA_1B, 64),
    "1b_batch_1_long": Case(((1, 8000),), LLAMA_1B, 64),
    "1b_decode": Case(((1, 0), (1, 191), (1, 64), (1, 63), (1, 1500), None, None), LLAMA_1B, 64),
    "1b_many": Case(tuple((1, 37 * i % 700) for i in range(96)), LLAMA_1B, 64),
    "8b_decode": Case(((1, 5), (1, 2000), (1, 777)), LLAMA_8B, 64),
    "1b_context": Case(((1024, 0), (300, 0)), LLAMA_1B, 64),
    "8b_mixed": Case(((1, 900), (1, 3), (513, 700), (64, 0), None), LLAMA_8B, 128, padded_tokens=37),
    "small_blocks": Case(((1, 900), (200, 100)), LLAMA_8B, 16, padded_tokens=3),
    "gpt_oss": Case(((1, 900), (300, 500)), LayerSpec(8, 64, 64, 64, window=128, sinks=True), 64),
    "gpt_oss_decode": Case(((1, 900), (1, 100)), LayerSpec(8, 64, 64, 64, window=128, sinks=True), 64),
    "gemma": Case(((1, 900), (300, 500)), LayerSpec(4, 256, 256, 8, window=256, softcap=50.0), 64),
    "phi_96": Case(((1, 300), (200, 70)), LayerSpec(8, 96, 96, 8), 64),
    "deepseek": Case(((1, 300), (200, 70)), LayerSpec(4, 192, 128, 4), 64),
    "llama4": Case(((1, 1100), (400, 900)), LayerSpec(2, 128, 128, 10, chunk=1024), 64),
    "qwen_3_5": Case(((1, 900), (1, 3), (300, 500)), LayerSpec(2, 256, 256, 16), 64, padded_tokens=9, gated=True),
    "qwen_3_5_decode": Case(((1, 128), (1, 900), None, (1, 7000)), LayerSpec(2, 256, 256, 16), 64, gated=True),
    "multi_query": Case(((1, 300), (200, 70)), LayerSpec(1, 64, 64, 71), 64),
}


def backend_for(case: Case, name: str = "triton") -> AttentionBackend:
    backend = get_backend(name, "cuda", case.dtype, [case.spec])
    backend.allocate(case.spec, 1, case.block_size, case.dtype, torch.device("cuda"))
    return backend


def attend(backend: AttentionBackend, built: Built) -> None:
    built.run(backend.begin(built.meta))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", [*CASES, *REALISTIC])
def test_triton_backend_equals_float64(name: str, dtype: torch.dtype) -> None:
    case = dataclasses.replace({**CASES, **REALISTIC}[name], dtype=dtype)
    built = build(case, "cuda")
    backend = backend_for(case)
    for _ in range(2):
        built.out.fill_(float("nan"))
        attend(backend, built)
        built.check(TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["qwen_3_5", "qwen_3_5_decode"])
def test_gate_is_that_of_a_separate_kernel(name: str) -> None:
    case = dataclasses.replace(REALISTIC[name], dtype=torch.bfloat16)
    built = build(case, "cuda")
    backend, plain = backend_for(case), torch.empty_like(built.out)
    backend.begin(built.meta).forward(dataclasses.replace(built.call, out=plain, gate=None), built.cache)
    attend(backend, built)
    assert torch.equal(built.out, torch.ops.torchweave.gated_activation_pair(built.call.gate, plain, "sigmoid"))


@pytest.mark.parametrize("name", ["decode", "mixed", "mixed_sinks", "mixed_gated", "8b_mixed"])
def test_torch_backend_equals_float64(name: str) -> None:
    case = dataclasses.replace({**CASES, **REALISTIC}[name], dtype=torch.bfloat16)
    built = build(case, "cuda")
    attend(get_backend("torch", "cuda"), built)
    built.check(TOLERANCE[torch.bfloat16])


def fill(into: Built, source: Built) -> None:
    """Copy one step's inputs to the addresses that a graph holds."""
    for field in ("slots", "query_start", "seq_lens", "block_table", "slot_mapping"):
        getattr(into.meta, field).copy_(getattr(source.meta, field))
    for mine, theirs in zip(
        (into.call.q, into.call.k, into.call.v, *into.cache.tensors),
        (source.call.q, source.call.k, source.call.v, *source.cache.tensors),
        strict=True,
    ):
        mine.copy_(theirs)
    into.out.fill_(float("nan"))
    into.expected, into.expected_cache = source.expected, source.expected_cache


def replay_all(name: str, cases: list[Case], tolerance: float) -> None:
    """Record the first case, then replay the graph with the inputs of each."""
    longest = max(sum(row) for case in cases for row in case.rows if row)
    held = build(cases[0], "cuda")
    held.meta = dataclasses.replace(held.meta, max_seq_len=longest)
    backend = backend_for(cases[0], name)
    attend(backend, held)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        attend(backend, held)
    for case in cases:
        fill(held, build(case, "cuda"))
        graph.replay()
        torch.cuda.synchronize()
        held.check(tolerance)


def with_table(rows: tuple, spec: LayerSpec, **facts) -> Case:
    """A case of which row 0 fixes the size of the block table, so that steps of one graph are alike in shape."""
    return Case(rows, spec, 128, dtype=torch.bfloat16, **facts)


@pytest.mark.parametrize("spec", [LLAMA_1B, LLAMA_8B], ids=["1b", "8b"])
def test_decode_graph_replays_with_changed_lengths(spec: LayerSpec) -> None:
    steps = [
        ((1, 2000), (1, 1), (1, 700), (1, 0)),
        ((1, 1990), (1, 1999), (1, 3), (1, 128)),
        ((1, 1950), None, (1, 127), None),
    ]
    replay_all("triton", [with_table(rows, spec, seed=i) for i, rows in enumerate(steps)], 2e-2)


MIXED_STEPS = [
    (((1, 2000), (100, 0), (27, 300), None), 0),
    (((1, 1999), (1, 5), (1, 77), (60, 1000)), 64),
    (((120, 1900), None, None, None), 7),
    (((1, 1990), (1, 20), (1, 30), (1, 0)), 123),
]


@pytest.mark.parametrize("name", ["triton", "fa3"])
@pytest.mark.parametrize("spec", [LLAMA_1B, LLAMA_8B], ids=["1b", "8b"])
def test_mixed_graph_replays_with_changed_rows(name: str, spec: LayerSpec) -> None:
    reason = available_backends("cuda")[name]
    if reason is not None:
        pytest.skip(reason)
    unused = 1e4 if name == "fa3" else float("nan")  # FlashAttention 3 multiplies it by 0
    facts = [{"padded_tokens": pad, "seed": seed, "unused": unused} for seed, (_, pad) in enumerate(MIXED_STEPS)]
    cases = [with_table(rows, spec, **each) for (rows, _), each in zip(MIXED_STEPS, facts, strict=True)]
    filled = [build(case).meta.num_tokens for case in cases]
    size = max(filled)
    cases = [
        dataclasses.replace(c, padded_tokens=c.padded_tokens + size - n) for c, n in zip(cases, filled, strict=True)
    ]
    replay_all(name, cases, 2e-2)


def test_a_padded_decode_row_neither_writes_nor_reads() -> None:
    case = Case((None, (1, 40), None), LLAMA_1B, 64, dtype=torch.bfloat16)
    built = build(case, "cuda")
    built.call.q[0], built.call.k[0], built.call.v[0] = float("nan"), float("inf"), float("nan")
    attend(backend_for(case), built)
    built.check(2e-2)
