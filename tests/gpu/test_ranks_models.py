"""Tensor parallelism over two GPUs gives the tokens of transformers, by the module alone and by the engine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.models.paged import paged_tokens
from tests.models.test_parallel import prompts
from tests.ranks import run_ranks
from torchweave import LLM, SamplingParams
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.models import load
from torchweave.verify import zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
NAMES = ("llama-tied", "gpt2", "olmo2", "gpt_oss", "deepseek_v3", "qwen3_moe")


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
