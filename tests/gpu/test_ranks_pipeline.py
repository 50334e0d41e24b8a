"""Pipeline parallelism over two and four GPUs: the tokens of one GPU, full graphs per stage, joint shutdown."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.ranks.pipeline_cases import agreed, asked, assert_alike
from tests.gpu.ranks_engine import check_life, options
from tests.models.parallel.test_parallel import prompts
from torchweave import LLM, SamplingParams
from torchweave.verify import image_zoo, zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_pp2_gives_the_tokens_of_one_gpu_and_shuts_down_together(tmp_path: Path) -> None:
    check_life(str(tmp_path), "pipeline_parallel_size")  # layers in the middle are the same pieces: they are loaded


def test_pipeline_logprobs_equal_those_of_one_gpu(tmp_path: Path) -> None:
    """Logprobs, prompt logprobs, penalties and grammars: resampled tokens are sent to the other stage."""
    with LLM("demo", **options(str(tmp_path)), seed=7) as alone:
        expected = asked(alone)
    with LLM("demo", **options(str(tmp_path)), seed=7, pipeline_parallel_size=2) as llm:
        assert_alike(asked(llm), expected)
        assert agreed(llm, 2)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama-tied", {"pipeline_parallel_size": 2}),
        ("gemma3", {"pipeline_parallel_size": 2}),
        ("qwen3_moe", {"pipeline_parallel_size": 2}),
        ("llama-tied", {"pipeline_parallel_size": 3}),
        ("llama-tied", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    ],
)
def test_pipeline_equals_transformers(name: str, ranks: dict[str, Any], tmp_path: Path) -> None:
    needed = ranks["pipeline_parallel_size"] * ranks.get("tensor_parallel_size", 1)
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs")
    model = zoo.build(zoo.zoo_model(name))
    expected = zoo.reference_tokens(model, prompts(), 12)
    zoo.save(model, tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    sizes = {"num_kv_blocks": 256, "max_batch_size": 4, "dtype": "float32", "device": "cuda"}
    with LLM(str(tmp_path), **ranks, **sizes) as llm:
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts(), greedy)]
        counts = dict(llm.manager.counts)
        begin = time.monotonic()
    assert found == expected
    assert set(counts) <= {"decode_graph", "mixed_graph", "plain"} and counts["decode_graph"] > 0, counts
    assert time.monotonic() - begin < 20, "graphs with hand-overs of NCCL must not keep anyone from leaving"


@pytest.mark.parametrize("name", ["qwen3_vl-images", "gemma3-images"])
def test_images_over_two_stages_equal_transformers(name: str, tmp_path: Path) -> None:
    """Positions of three axes and features that both stages add; image tokens that see each other."""
    entry = image_zoo.zoo_entry(name)
    assert isinstance(entry, image_zoo.ImageZooModel)
    model = entry.build()
    given = image_zoo.image_prompts(entry, model)
    expected = [answer.tokens for answer in image_zoo.image_reference_answers(entry, model, given, 12)]
    zoo.save(model, tmp_path)
    never = {"min_tokens": 12, "stop_token_ids": [image_zoo.IMAGE_TOKEN]}
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **never)
    sizes = {"num_kv_blocks": 256, "max_batch_size": 4, "max_num_tokens": 64, "dtype": "float32", "device": "cuda"}
    with LLM(str(tmp_path), pipeline_parallel_size=2, **sizes) as llm:
        for _ in range(2):  # the second time behind cached prefixes
            assert [list(output.outputs[0].token_ids) for output in llm.generate(given, greedy)] == expected
