"""Pipeline parallelism: the layers of a stage, tokens of two stages, and rejected models."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.captured import CAPTURED
from tests.ops.collectives.collective_cases import mirrored
from tests.ranks import run_ranks
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.engine.startup.compile_model import compile_model
from torchweave.models import LoadedModel, UnsupportedModel, load
from torchweave.models.parallel import pipeline_stages as stages
from torchweave.models.parallel.pipeline_stages import stage_layers
from torchweave.report import Report
from torchweave.verify import image_zoo, zoo
from torchweave.verify.ranks import RankResult, generate
from torchweave.verify.verify import verify


def stage_of(source: Any, stage: int, size: int = 2, **options: Any) -> LoadedModel:
    """A stage, loaded in this process."""
    return load(
        source,
        torch.float32,
        process_groups=ProcessGroups(size - 1 - stage, size, pipeline_parallel_size=size),
        **options,
    )


def names(loaded: LoadedModel) -> set[str]:
    return {name for name, _ in loaded.module.model.named_parameters(remove_duplicate=False)}


class ForkedRanks(AbstractContextManager["ForkedRanks"]):
    """`RankProcesses` whose ranks do not import anew; tests/verify/test_verify.py starts those of `models verify`."""

    def __init__(self, size: int, stages: int) -> None:
        self.size, self.stages = size, stages

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, *args: Any) -> list[RankResult]:
        return run_ranks(generate, self.size * self.stages, *args, pipeline_parallel_size=self.stages)


def test_tokens_of_two_pipeline_stages_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts, an untied vocabulary, and windows in every other layer, in groups of blocks that cross stages."""
    monkeypatch.setattr("torchweave.verify.verify.RankProcesses", ForkedRanks)
    result = verify(["gpt_oss"], stages=2)
    (row,) = result["results"]
    assert (row["reason"], row["ranks"], row["stages"]) == ("", 1, 2)
    assert result["passed"] == result["total"] == 1
    assert row["pieces"] == 3, "the leader has the last two of four layers"


def test_a_pipeline_stage_reads_its_own_layers_alone(tmp_path: Path) -> None:
    entry = zoo.zoo_model("llama")
    entry = replace(entry, options={**entry.options, "num_hidden_layers": 4})
    zoo.save(zoo.build(entry), tmp_path)
    whole, parts = load(tmp_path), []
    for stage in range(2):
        report = Report(show=False)
        parts.append(stage_of(tmp_path, stage, report=report))
        read = [event for event in report.select("progress") if event["title"] == "weights"][-1]["total"]
        assert read == sum(parameter.numel() * 4 for parameter in parts[-1].module.model.parameters())
        assert report.select("pipeline_parallel")[0]["layers"] == [2 * stage, 2 * stage + 2]
        assert 0.4 * whole.weight_bytes < parts[-1].weight_bytes < 0.55 * whole.weight_bytes
        assert len(parts[-1].module.attention_layers) == 2 and parts[-1].num_parameters == whole.num_parameters
    first, last = map(names, parts)
    assert first | last == names(whole) and first & last == {"model.norm.weight"}
    assert "model.embed_tokens.weight" in first and "lm_head.weight" in last
    for part in parts:
        for name, parameter in part.module.model.named_parameters():
            assert torch.equal(parameter, whole.module.model.get_parameter(name)), name


def test_each_pipeline_stage_has_the_whole_vision_tower(tmp_path: Path) -> None:
    """A tower of more layers than the decoder, whose names in the checkpoint are not those of the model."""
    entry = image_zoo.zoo_entry("llava-images")
    assert isinstance(entry, image_zoo.ImageZooModel)
    tower = entry.options["vision_config"] | {"num_hidden_layers": 4}
    model = replace(entry, options=entry.options | {"vision_config": tower}).build()
    zoo.save(model, tmp_path)
    parts = [stage_of(tmp_path, stage, images=True) for stage in range(2)]
    for part in parts:
        assert {name for name, _ in model.named_parameters() if "vision_tower" in name} <= names(part)
        for name, parameter in part.module.model.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name)), name
    assert {part.module.first_image_id for part in parts} == {zoo.VOCAB}, "an id names the same row on each stage"


def test_pipeline_stages_share_pieces_of_equal_layers() -> None:
    config = zoo.zoo_model("gpt2").config().to_dict() | {"n_layer": 6}
    found = []
    for stage in range(2):
        report = Report(show=False)
        module = stage_of(config, stage, load_format="dummy").module
        compile_model(module, CAPTURED, torch.device("cpu"), None, report)
        found.append({event["hash"]: event["shared_by"] for event in report.select("piece")})
    shared = found[0].keys() & found[1].keys()
    assert [[each.get(piece) for each in found] for piece in shared] == [[2, 2]]


def test_pipeline_stages_in_the_middle_have_no_vocabulary() -> None:
    config = zoo.zoo_model("llama-tied").config().to_dict() | {"num_hidden_layers": 3}
    parts = [stage_of(config, stage, 3, load_format="dummy") for stage in range(3)]
    table = ["model.embed_tokens.weight" in names(part) for part in parts]
    assert table == [True, False, True]
    model: Any = parts[2].module.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    whole = load(config, torch.float32, load_format="dummy").module.model
    for part in parts:  # the same numbers as on one rank
        for name, parameter in part.module.model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name


@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoe"])
def test_experts_of_a_pipeline_stage(name: str, tmp_path: Path) -> None:
    """Merged as they are read, or converted by transformers."""
    zoo.save(zoo.build(zoo.zoo_model(name)), tmp_path)
    whole = load(tmp_path).module.model
    for stage in range(2):
        part = stage_of(tmp_path, stage)
        experts = [name for name in names(part) if "experts" in name]
        assert {name.split(".")[2] for name in experts} == ({"0", "1"} if stage == 0 else {"2"})
        for each in experts:
            assert torch.equal(part.module.model.get_parameter(each), whole.get_parameter(each))


def test_a_pipeline_of_tensor_parallel_ranks_loads_quarters(tmp_path: Path) -> None:
    zoo.save(zoo.build(zoo.zoo_model("qwen3_moe")), tmp_path)
    whole, process_groups = load(tmp_path).module.model, ProcessGroups(1, 4, 2, 2)
    with mirrored("tp", 2, 1):
        part = load(tmp_path, torch.float32, process_groups=process_groups, expert_parallel=True)
    (spec,) = part.module.attention_layers
    assert (
        part.stage is not None and part.stage.number == 1 and spec.num_heads * 2 == part.config["num_attention_heads"]
    )
    experts = "model.layers.2.mlp.experts.down_proj"
    assert torch.equal(part.module.model.get_parameter(experts), whole.get_parameter(experts)[4:])


@pytest.mark.parametrize("layers, stages, expected", [(5, 2, [3, 2]), (4, 4, [1, 1, 1, 1]), (11, 4, [3, 3, 3, 2])])
def test_pipeline_stages_are_even(layers: int, stages: int, expected: list[int]) -> None:
    bounds = [stage_layers(layers, stage, stages) for stage in range(stages)]
    assert [end - begin for begin, end in bounds] == expected
    assert [0, *(end for _, end in bounds)] == [*(begin for begin, _ in bounds), layers]


def test_more_pipeline_stages_than_layers_are_refused() -> None:
    config = zoo.zoo_model("llama").config().to_dict()
    with pytest.raises(UnsupportedModel, match="has 3 layers, fewer than 4 stages; lower pipeline_parallel"):
        stage_of(config, 0, 4, load_format="dummy")


def test_buffers_that_a_model_computes_for_its_layers_at_once() -> None:
    """Falcon-H1's multipliers, which checkpoints lack."""
    config = zoo.zoo_model("falcon_h1").config().to_dict() | {"ssm_multipliers": [0.5, 2.0, 3.0, 4.0, 5.0]}
    whole = load(config, torch.float32, load_format="dummy").module.model
    for stage in range(2):
        model = stage_of(config, stage, load_format="dummy").module.model
        multipliers = {name: buffer for name, buffer in model.named_buffers() if "mup_vector" in name}
        assert len(multipliers) == 2 - stage
        assert all(torch.equal(buffer, whole.get_buffer(name)) for name, buffer in multipliers.items())


def test_layers_that_share_weights_over_stages_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="layers 3 and 1, which are on different stages, share weights"):
        stage_of(zoo.zoo_model("zamba2").config().to_dict(), 0, load_format="dummy")


def test_a_stage_numbers_the_states_and_attention_layers_it_has() -> None:
    """Attention is layer 1 of 4; the others have a convolution and a scan."""
    config = zoo.zoo_model("granitemoehybrid").config().to_dict()
    first, last = (stage_of(config, stage, load_format="dummy") for stage in range(2))
    assert (len(first.module.attention_layers), len(first.module.recurrent_layers)) == (1, 2)
    assert (len(last.module.attention_layers), len(last.module.recurrent_layers)) == (0, 4)
    config["layer_types"] = ["mamba", "mamba", "attention", "attention"]
    first, last = (stage_of(config, stage, load_format="dummy") for stage in range(2))
    assert (len(last.module.attention_layers), len(last.module.recurrent_layers)) == (2, 0)
    assert first.has_recurrent_layers and last.has_recurrent_layers


def test_layers_that_are_not_a_chain_are_no_pipeline() -> None:
    """XLM adds and normalizes between the modules of its attentions."""
    with pytest.raises(UnsupportedModel, match="a layer takes are not those that the layer before returns"):
        stage_of(zoo.zoo_model("xlm").config().to_dict(), 0, load_format="dummy")


def test_layers_that_return_more_than_hidden_states_are_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.empty(1, 53, 64, device="meta")
    seen = [stages._LayerCall(hidden, hidden, -1)] * 3
    monkeypatch.setattr(stages, "_record_layer_calls", lambda *_: seen)
    with pytest.raises(
        UnsupportedModel,
        match=r"LlamaForCausalLM cannot be split into pipeline stages: .* or tensors besides the hidden",
    ):
        stage_of(zoo.zoo_model("llama").config().to_dict(), 0, load_format="dummy")
