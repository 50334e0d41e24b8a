"""A model whose indexer selects keys, in a whole engine on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ops.collectives.collective_cases import mirrored
from torchweave import LLM, SamplingParams
from torchweave.config import EngineConfig, TorchCompileConfig
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.models import UnsupportedModel, load
from torchweave.report import Report
from torchweave.verify import zoo

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
BLOCK = 8


def prompts() -> list[list[int]]:
    """The second begins as the first does, three blocks of the KV cache long."""
    first, other = torch.randint(3, zoo.VOCAB, (2, 40), generator=torch.Generator().manual_seed(3)).tolist()
    return [first, first[: 3 * BLOCK] + other[:9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm_moe_dsa")
    zoo.save(zoo.build(zoo.zoo_model("glm_moe_dsa")), path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    compile_config = TorchCompileConfig(enable_fullgraph=False)
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", torch_compile_config=compile_config, block_size=BLOCK,
        kv_offload_gb=0.01, num_kv_blocks=16, max_model_len=64, max_num_tokens=32,
    )  # fmt: skip
    report = Report(show=False)
    with LLM.from_loaded(load(folder, torch.float32, report=report), config, report) as llm:
        yield llm


def test_a_prefix_hit_finds_the_indexer_s_keys(llm: LLM) -> None:
    expected = zoo.reference_tokens(zoo.build(zoo.zoo_model("glm_moe_dsa")), prompts(), 8)
    answers = [list(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids) for prompt in prompts()]
    assert answers == expected
    assert llm.engine.scheduler.kv.reused_total == 3


def test_the_indexer_has_a_cache_of_its_own(llm: LLM) -> None:
    shapes = [(cache.k.shape[1:], cache.v.shape[1:]) for cache in llm.engine.runner.caches]
    attention = ((BLOCK, 4, 48), (BLOCK, 4, 32))
    assert shapes == [attention] * 3 + [((BLOCK, 1, 12), (BLOCK, 1, 12))] * 2


def test_each_rank_has_the_indexer_and_some_of_the_heads(folder: Path) -> None:
    whole = load(folder, torch.float32).module
    with mirrored("tp", 2, 1):
        part = load(folder, torch.float32, process_groups=ProcessGroups(1, 2, 2)).module
    heads = [(spec.num_heads, spec.index_keys) for spec in part.attention_layers]
    assert heads == [(2, False)] * 3 + [(1, True)] * 2
    indexers = {name for name, _ in whole.named_parameters() if ".indexer." in name}
    assert indexers and all(torch.equal(part.get_parameter(name), whole.get_parameter(name)) for name in indexers)


def test_a_stage_numbers_the_indexers_it_has() -> None:
    config = zoo.zoo_model("deepseek_v32").config().to_dict()
    for stage, attention in enumerate(((0, 1, 3, 4), (2, 5))):
        groups = ProcessGroups(1 - stage, 2, pipeline_parallel_size=2)
        part = load(config, torch.float32, load_format="dummy", process_groups=groups)
        assert part.stage is not None and part.stage.attention == attention
        assert [spec.index_keys for spec in part.module.attention_layers] == [number > 2 for number in attention]


def test_layers_that_share_a_selection_are_no_pipeline(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be split into pipeline stages: its layers return different"):
        load(folder, torch.float32, process_groups=ProcessGroups(0, 2, pipeline_parallel_size=2))
