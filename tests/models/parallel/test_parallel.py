"""Tensor parallelism: tokens of two ranks, parameter shards, one graph for all ranks, and rejected models."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.compiler.canonical import canonical
from tests.models.paged import paged_tokens
from tests.models.test_trace_once import DYNAMIC, INPUTS
from tests.ops.collectives.collective_cases import mirrored
from tests.ranks import run_ranks
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.partition.split import Piece, split
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.models import LoadedModel, UnsupportedModel, load
from torchweave.models.parallel import linear_roles as roles
from torchweave.models.weights.quantize import Fp8Linear
from torchweave.models.weights.shards import HeadSharding, TensorShard, even_shard, padded_shard
from torchweave.report import Report
from torchweave.verify import image_zoo, zoo

# Grouped heads and experts by width or number; packed heads of other classes; norms over all heads; tied vocabularies.
NAMES = ("llama-tied", "gpt2", "olmo2", "gpt_oss")
BY_NUMBER = ("gpt_oss",)
_IDENTITY = re.compile(r"(?<=\]) \d{9,}")  # of a constant, in canonical lines


def part_of(source: Any, rank: int, size: int = 2, **options: Any) -> LoadedModel:
    """A rank's part, loaded in this process."""
    with mirrored("tp", size, rank):
        return load(
            source,
            torch.float32,
            process_groups=ProcessGroups(rank=rank, size=size, tensor_parallel_size=size),
            **options,
        )


def join_experts(own: list[torch.Tensor], leaf: str, expert_parallel: bool) -> torch.Tensor:
    """The experts `[E, ...]` of a whole model from the parts of two ranks."""
    if expert_parallel:
        return torch.cat(own)
    if leaf == "down_proj":
        return torch.cat(own, 2)
    (gate, up), (other_gate, other_up) = (part.chunk(2, 1) for part in own)
    return torch.cat([gate, other_gate, up, other_up], 1)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in (3, 70)]


def zoo_model(name: str) -> zoo.ZooModel:
    """A specimen; GPT-2's vocabulary does not divide."""
    entry = zoo.zoo_model(name)
    return replace(entry, options={**entry.options, "vocab_size": 253}) if name == "gpt2" else entry


def _tokens(process_groups: ProcessGroups, folders: dict[str, str]) -> dict[str, list[list[int]]]:
    found = {}
    for name, folder in folders.items():
        for by_number in (False, True)[: 1 + (name in BY_NUMBER)]:
            loaded = load(folder, torch.float32, process_groups=process_groups, expert_parallel=by_number)
            found[f"{name} {by_number}"] = paged_tokens(loaded.module, prompts(), 6)
    return found


def test_tokens_of_two_ranks_are_those_of_transformers(tmp_path: Path) -> None:
    expected, folders = {}, {}
    for name in NAMES:
        model = zoo.build(zoo_model(name))
        expected[name] = zoo.reference_tokens(model, prompts(), 6)
        zoo.save(model, tmp_path / name)
        folders[name] = str(tmp_path / name)
    first, second = run_ranks(_tokens, 2, folders)
    assert first == second
    assert len(first) == len(NAMES) + len(BY_NUMBER)
    for how, tokens in first.items():
        assert tokens == expected[how.split()[0]], how


@pytest.mark.parametrize("name", ["llama-bias", "qwen3_moe"])
def test_all_ranks_have_one_graph(name: str) -> None:
    entry = zoo.zoo_model(name)
    config = replace(entry, options={**entry.options, "num_hidden_layers": 4}).config().to_dict()
    lines, clones, digests = [], [], []
    for rank in range(2):
        report = Report(show=False)
        loaded = part_of(config, rank, load_format="dummy", expert_parallel=True)
        with mirrored("tp", 2, rank):
            graph = capture(loaded.module, INPUTS, DYNAMIC, "backed_size_oblivious", report)
        lines.append([_IDENTITY.sub("", line) for line in canonical(graph)])
        graph.boundary_ops = frozenset({"torchweave::attention"})
        digests.append([piece.digest for piece in split(graph) if isinstance(piece, Piece)])
        clones += [event["cloned"] for event in report.select("trace_once")]
    assert lines[0] == lines[1]
    assert digests[0] == digests[1] and len(digests[0]) == 5 and len(set(digests[0])) == 3
    assert sum("torchweave.all_reduce" in line for line in lines[0]) == 1 + 2 * 4
    assert sum("torchweave.all_gather" in line for line in lines[0]) == 1
    assert clones == [3, 3], "one kind of layer, traced once"


def test_ranks_read_only_their_shards(tmp_path: Path) -> None:
    entry = zoo.zoo_model("llama-bias")
    zoo.save(zoo.build(entry), tmp_path)
    whole, parts, read = load(tmp_path).module.model, [], 0
    for rank in range(2):
        report = Report(show=False)
        parts.append(part_of(tmp_path, rank, report=report).module.model)
        read = [event for event in report.select("progress") if event["title"] == "weights"][-1]["total"]
        assert read == sum(parameter.numel() * 4 for parameter in parts[-1].parameters())
        assert report.select("tensor_parallel")[0]["ranks"] == 2
    assert read < 0.53 * sum(parameter.numel() * 4 for parameter in whole.parameters())
    down = "model.layers.0.mlp.down_proj"
    joined = torch.cat([part.get_parameter(f"{down}.weight") for part in parts], 1)
    assert torch.equal(joined, whole.get_parameter(f"{down}.weight"))
    assert torch.equal(sum(part.get_parameter(f"{down}.bias") for part in parts), whole.get_parameter(f"{down}.bias"))
    assert torch.equal(parts[1].get_parameter(f"{down}.bias"), torch.zeros(64))
    keys = torch.cat([part.get_parameter("model.layers.1.self_attn.k_proj.weight") for part in parts])
    assert torch.equal(keys, whole.get_parameter("model.layers.1.self_attn.k_proj.weight"))


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts_are_merged_in_parts(expert_parallel: bool, tmp_path: Path) -> None:
    zoo.save(zoo.build(zoo.zoo_model("qwen3_moe")), tmp_path)
    whole, name = load(tmp_path).module.model, "model.layers.1.mlp.experts"
    gate, up = whole.get_parameter(f"{name}.gate_up_proj").chunk(2, 1)
    for rank in range(2):
        report, mine = Report(show=False), slice(rank * 16, rank * 16 + 16)
        part = part_of(tmp_path, rank, expert_parallel=expert_parallel, report=report).module.model
        expected = torch.cat([gate[:, mine], up[:, mine]], 1), whole.get_parameter(f"{name}.down_proj")[:, :, mine]
        if expert_parallel:
            experts = slice(rank * 4, rank * 4 + 4)
            expected = torch.cat([gate, up], 1)[experts], whole.get_parameter(f"{name}.down_proj")[experts]
        assert torch.equal(part.get_parameter(f"{name}.gate_up_proj"), expected[0])
        assert torch.equal(part.get_parameter(f"{name}.down_proj"), expected[1])
        read = [event for event in report.select("progress") if event["title"] == "weights"][-1]["total"]
        assert read == sum(parameter.numel() * 4 for parameter in part.parameters())


def test_other_conversions_are_cut_behind_them(tmp_path: Path) -> None:
    zoo.save(zoo.build(zoo.zoo_model("granitemoe")), tmp_path)
    name = "model.layers.0.block_sparse_moe.experts.down_proj"
    parts = [part_of(tmp_path, rank).module.model.get_parameter(name) for rank in range(2)]
    assert torch.equal(torch.cat(parts, 2), load(tmp_path).module.model.get_parameter(name))


def test_dummy_weights_are_parts_of_the_same_numbers() -> None:
    config = zoo.zoo_model("gpt_oss").config().to_dict()
    whole = load(config, torch.float32, load_format="dummy")
    parts = [part_of(config, rank, load_format="dummy") for rank in range(2)]
    name = "model.layers.2.mlp.experts.down_proj"
    found = torch.cat([part.module.model.get_parameter(name) for part in parts], 1)
    assert torch.equal(found, whole.module.model.get_parameter(name))
    assert parts[0].num_parameters == whole.num_parameters
    assert parts[0].weight_bytes < 0.6 * whole.weight_bytes
    assert parts[0].module.vocab_size == whole.module.vocab_size == zoo.VOCAB
    assert [spec.num_heads for spec in parts[1].module.attention_layers] == [2] * 4
    assert parts[1].process_groups.tensor_rank == 1


def _block_checkpoint(folder: Path, head_dim: int) -> None:
    """A Llama whose linears are in FP8 with a scale for each 128 x 128."""
    options = {"hidden_size": 256, "intermediate_size": 512, "head_dim": head_dim, "num_hidden_layers": 1}
    model = zoo.build(replace(zoo.zoo_model("llama"), options=options))
    zoo.save(model, folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensors[name] = tensor.contiguous()
        if "_proj" in name:
            tensors[name] = tensor.clamp(-1, 1).to(torch.float8_e4m3fn)
            shape = [-(-size // 128) for size in tensor.shape]
            tensors[name.removesuffix("weight") + "weight_scale_inv"] = torch.rand(shape) + 0.5
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))


def test_scales_of_blocks_are_divided_with_their_weights(tmp_path: Path) -> None:
    _block_checkpoint(tmp_path, 128)
    whole: Any = load(tmp_path).module.model.get_submodule("model.layers.0.mlp")
    for rank in range(2):
        part: Any = part_of(tmp_path, rank).module.model.get_submodule("model.layers.0.mlp")
        rows = slice(rank * 256, rank * 256 + 256)
        assert isinstance(part.down_proj, Fp8Linear)
        up = part.up_proj.weight.float()
        assert torch.equal(up, whole.up_proj.weight.float()[rows])
        x = torch.randn(3, 256)
        with mirrored("tp", 2, rank):
            torch.testing.assert_close(part.up_proj(x), whole.up_proj(x)[:, rows])
            h = torch.randn(3, 512)
            h[:, :256] *= rank == 0
            h[:, 256:] *= rank == 1
            torch.testing.assert_close(part.down_proj(h[:, rows]), 2 * whole.down_proj(h), msg="a sum of two mirrors")


def test_shards_within_a_scale_block_are_refused(tmp_path: Path) -> None:
    _block_checkpoint(tmp_path, 64)
    with pytest.raises(UnsupportedModel, match=r"one scale per 128 x 128 weights.*use fewer ranks"):
        part_of(tmp_path, 0)


@pytest.mark.parametrize(
    ("name", "size", "expert_parallel", "said"),
    [
        ("llama", 3, False, "4 attention heads are not divisible; choose among 1, 2, 4"),
        ("gpt_bigcode", 8, False, "4 attention heads are not divisible"),
        ("codegen", 8, False, "cannot be split into 2 heads per rank; use fewer ranks"),
        ("llama4", 2, True, "are not selected by index; turn enable_expert_parallel off"),
        ("gemma3n_text", 2, False, "activation sparsity depends on all columns of an MLP; use one rank"),
    ],
)
def test_indivisible_models_are_refused_with_a_reason(name: str, size: int, expert_parallel: bool, said: str) -> None:
    config = zoo.zoo_model(name).config().to_dict()
    with pytest.raises(UnsupportedModel, match=f"cannot be sharded over {size} ranks: .*{said}"):
        part_of(config, 0, size, load_format="dummy", expert_parallel=expert_parallel)


def test_unsupported_tensor_parallel_models_are_rejected() -> None:
    entry = zoo.zoo_model("qwen3_moe")
    odd = replace(entry, options={**entry.options, "num_experts": 7, "moe_intermediate_size": 33})
    config = odd.config().to_dict()
    for by_number, said in (
        (False, "33 of the experts .* or enable_expert_parallel"),
        (True, "7 experts .* are not divisible"),
    ):
        with pytest.raises(UnsupportedModel, match=said):
            part_of(config, 0, load_format="dummy", expert_parallel=by_number)
    per_head = replace(zoo.zoo_model("stablelm"), options={"qk_layernorm": True}).config().to_dict()
    with pytest.raises(UnsupportedModel, match="a module for each head"):
        part_of(per_head, 0, load_format="dummy")


def test_unknown_architectures_are_divided_by_their_own_plan_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    models = *zoo.ZOO_MODELS, *image_zoo.IMAGE_MODELS
    assert {entry.config().get_text_config().model_type for entry in models} >= roles.VERIFIED
    monkeypatch.setattr(roles, "VERIFIED", frozenset())
    part = part_of(zoo.zoo_model("glm").config().to_dict(), 1, load_format="dummy").module.model
    assert tuple(part.model.layers[0].self_attn.q_proj.weight.shape) == (32, 64)
    assert tuple(part.model.layers[0].mlp.gate_up_proj.weight.shape) == (192, 64), "the plan gathers it: it stays whole"
    for name in ("gpt2", "olmo2"):
        with pytest.raises(UnsupportedModel, match="has a tensor-parallel plan for its attention"):
            part_of(zoo.zoo_model(name).config().to_dict(), 0, load_format="dummy")


def test_head_sharding_and_tensor_shards() -> None:
    for rank, kv in enumerate([(0, 4), (0, 4), (4, 8), (4, 8)]):
        heads = HeadSharding(query=8, kv=2, rank=rank, size=4)
        assert not heads.indivisible_reason
        assert (heads.query_range(4), heads.kv_range(4)) == ((8 * rank, 8 * rank + 8), kv)
    assert "neither a multiple nor a divisor" in HeadSharding(query=12, kv=3, rank=0, size=2).indivisible_reason
    whole = torch.arange(24.0).view(12, 2)
    packed = even_shard(whole.shape, 0, 1, 3, parts=2)
    assert packed is not None and packed.extract(whole)[:, 0].tolist() == [4, 6, 16, 18]
    assert even_shard(whole.shape, 0, 0, 5) is None
    last = padded_shard((5, 2), 0, 3, 4)
    assert last.extract(whole[:5]).tolist() == [[0, 0], [0, 0]] and last.shape == (2, 2)
    assert TensorShard((256, 8), 0, ((64, 128),)).for_block_scales(128, (2, 1)) is None
