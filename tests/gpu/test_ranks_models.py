"""Tensor parallelism over two GPUs gives the tokens of transformers, by the module alone and by the engine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.models.paged import paged_tokens
from tests.models.parallel.test_parallel import prompts
from tests.ranks import run_ranks
from torchweave import LLM, SamplingParams
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.models import load
from torchweave.verify import zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
NAMES = ("llama-tied", "gpt2", "olmo2", "gpt_oss", "deepseek_v3", "qwen3_moe", "qwen3_next", "bamba")


def _tokens(
    process_groups: ProcessGroups, folders: dict[str, str], expert_parallel: bool
) -> dict[str, list[list[int]]]:
    found = {}
    for name, folder in folders.items():
        loaded = load(
            folder, torch.float32, process_groups.device, process_groups=process_groups, expert_parallel=expert_parallel
        )
        found[name] = paged_tokens(loaded.module, prompts(), 6, device=process_groups.device)
    return found


def test_tp2_module_equals_transformers(tmp_path: Path) -> None:
    expected, folders = {}, {}
    for name in NAMES:
        model = zoo.build(zoo.zoo_model(name))
        expected[name] = zoo.reference_tokens(model, prompts(), 6)
        zoo.save(model, tmp_path / name)
        folders[name] = str(tmp_path / name)
    for expert_parallel in (False, True):
        for rank in run_ranks(_tokens, 2, folders, expert_parallel, device="cuda"):
            assert rank == expected, f"expert_parallel={expert_parallel}"


@pytest.mark.parametrize(
    ("name", "symmetric_memory"), [("llama-tied", True), ("llama-tied", False), ("qwen3_moe", True)]
)
def test_tp2_engine_equals_transformers(name: str, symmetric_memory: bool, tmp_path: Path) -> None:
    model = zoo.build(zoo.zoo_model(name))
    expected = zoo.reference_tokens(model, prompts(), 12)
    zoo.save(model, tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    sizes = {"num_kv_blocks": 256, "max_batch_size": 4, "dtype": "float32", "device": "cuda"}
    with LLM(str(tmp_path), tensor_parallel_size=2, symmetric_memory=symmetric_memory, **sizes) as llm:
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts(), greedy)]
        assert llm.report.select("tensor_parallel")[0]["ranks"] == 2
        begin = time.monotonic()
    assert time.monotonic() - begin < 20, "graphs with collectives of NCCL must not keep anyone from leaving"
    assert found == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tp2_with_an_eagle_head_answers_as_without(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=7, max_tokens=24, ignore_eos=True)
    prompts = ["12+30=", "copy: one two three", "sort: pear fig apple"]
    sizes = {"num_kv_blocks": 256, "max_batch_size": 4, "dtype": "float32", "device": "cuda"}
    head = {"method": "eagle3", "model": "demo-eagle", "num_speculative_tokens": 3, "adaptive": False}
    with LLM("demo", **sizes) as llm:
        expected = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling)]
    with LLM("demo", tensor_parallel_size=2, speculative_config=head, **sizes) as llm:
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling)]
        assert llm.engine.scheduler.speculation.num_accepted_tokens > 0
    assert found == expected
