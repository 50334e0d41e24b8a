"""The KV cache on a GPU: FP8, offloading to host memory, and blocks freed outside the attention window."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import demo_tasks as tasks
import numpy as np
import pytest
import torch

from tests.gpu.test_ops_attention import REALISTIC, attend, backend_for
from tests.ops.attention.attention_cases import CASES, ROTARY_CASES, build, in_fp8
from torchweave import LLM, SamplingParams
from torchweave.config.options import EngineConfig
from torchweave.engine.kv_cache.block_copy import CudaBlockCopier
from torchweave.models import load
from torchweave.ops.attention.kv_cache_dtype import FP8_DTYPES
from torchweave.report import Report
from torchweave.verify import zoo

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize("cache_dtype", FP8_DTYPES.values(), ids=FP8_DTYPES)
@pytest.mark.parametrize("name", [*CASES, *REALISTIC])
def test_triton_backend_with_an_fp8_cache(name: str, cache_dtype: torch.dtype) -> None:
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 1e-4)):
        case = dataclasses.replace(in_fp8({**CASES, **REALISTIC}[name], cache_dtype), dtype=dtype)
        built = build(case, "cuda")
        backend = backend_for(case)
        for _ in range(2):
            built.out.fill_(float("nan"))
            attend(backend, built)
            built.check(tolerance)


@pytest.mark.parametrize("name", ROTARY_CASES)
def test_rotated_keys_are_written_to_an_fp8_cache(name: str) -> None:
    case = in_fp8(ROTARY_CASES[name])
    built = build(case, "cuda")
    built.run(backend_for(case).begin(built.meta))
    built.check(5e-2)  # a key next to the middle of two FP8 numbers may go either way behind a norm


def test_demo_model_with_an_fp8_cache() -> None:
    asked = [one for task in tasks.TASKS for one in tasks.held_out_questions(task, 20)]
    right = {}
    for kv_cache_dtype in ("auto", "fp8", "fp8_e5m2"):
        with LLM("demo", device="cuda", kv_cache_dtype=kv_cache_dtype) as llm:
            params = SamplingParams(temperature=0, max_tokens=120)
            said = llm.generate([tasks.plain_prompt(one) for one in asked], params)
        pairs = zip(said, asked, strict=True)
        right[kv_cache_dtype] = sum(output.outputs[0].text.strip() == one.answer.strip() for output, one in pairs)
    assert min(right.values()) >= right["auto"] - 0.01 * len(asked), right


def test_an_fp8_cache_gets_twice_as_many_blocks() -> None:
    blocks = {}
    for kv_cache_dtype in ("auto", "fp8"):
        report = Report(show=False)
        options: dict[str, Any] = {"max_batch_size": 512, "gpu_memory_utilization": 0.3}
        with LLM("shape:llama-1b", load_format="dummy", kv_cache_dtype=kv_cache_dtype, report=report, **options):
            (event,) = report.select("kv_cache")
            blocks[kv_cache_dtype] = event["blocks"] * event["block_size"]
    assert 1.9 < blocks["fp8"] / blocks["auto"] < 2.1, blocks


def test_blocks_are_offloaded_to_the_host_and_restored() -> None:
    """Two tensors with different block sizes; more copies than programs, across the end of a chunk of pinned memory."""
    tensors = [torch.randn(300, 64, 8, 64, device="cuda"), torch.randint(99, (300, 24), device="cuda")]
    block_bytes = sum(tensor[0].nbytes for tensor in tensors)
    copier = CudaBlockCopier(tensors, 250 * block_bytes)
    assert copier.num_host_blocks == 250
    before = [tensor.clone() for tensor in tensors]
    rng = np.random.default_rng(0)
    blocks, host_blocks = rng.permutation(300)[:200].astype(np.int64), rng.permutation(250)[:200].astype(np.int64)
    stored = copier.store(blocks, host_blocks)
    copier.wait_for(stored)
    for tensor in tensors:
        tensor.zero_()  # waits for the copies
    loaded = copier.load(host_blocks, blocks)
    assert loaded == stored + 1
    torch.cuda.synchronize()
    assert copier.is_done(loaded)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[blocks], old[blocks])
        rest = np.setdiff1d(np.arange(300), blocks)
        assert not tensor[rest].any(), "other blocks were written"


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_offloading_changes_no_token(kv_cache_dtype: str) -> None:
    """A tiny cache: each turn of a chat loads its prefix from host memory, with graphs and steps in flight."""
    rng = np.random.default_rng(0)
    begins = [rng.integers(3, 100, 150).tolist() for _ in range(12)]
    answers = []
    for gigabytes in (0.0, 0.2):
        options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "kv_offload_gb": gigabytes, "dtype": "float32"}
        with LLM(
            "demo", device="cuda", num_kv_blocks=40, block_size=16, max_model_len=256, max_batch_size=4, **options
        ) as llm:
            kv = llm.engine.scheduler.kv
            said, prompts = [], begins
            for _ in range(3):
                outputs = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY)]
                said.append(outputs)
                prompts = [prompt + answer for prompt, answer in zip(prompts, outputs, strict=True)]
                kv.check()
            answers.append(said)
            assert (kv.restored_total > 0) == (gigabytes > 0)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("name", "groups"), [("gemma3", 6), ("gpt_oss", 2), ("mistral", 1)])
def test_blocks_outside_the_attention_window_are_freed(name: str, groups: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    model = zoo.build(zoo.zoo_model(name))
    begin = rng.integers(3, 90, 40).tolist()
    prompts = [[*begin, *rng.integers(3, 90, length).tolist()] for length in (30, 9, 50, 44, 21)]
    expected = zoo.reference_tokens(model, prompts, 16)
    zoo.save(model, tmp_path)
    report = Report(show=False)
    config = EngineConfig(
        model=name, dtype="float32", device="cuda", max_batch_size=5, max_num_tokens=24, max_model_len=112, block_size=16,
        num_kv_blocks=10 * groups, capacity_scheduler_policy="max_utilization",
    )  # fmt: skip
    with LLM.from_loaded(load(tmp_path, torch.float32, "cuda", report=report), config, report) as llm:
        for _ in range(2):
            assert [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY)] == expected
            llm.engine.scheduler.kv.check()
        assert llm.engine.scheduler.kv.num_groups == groups
