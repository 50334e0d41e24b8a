"""Recurrent layers over tensor-parallel ranks: their tokens, the part of a rank, and layers that stay whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.paged import paged_tokens
from tests.models.parallel.test_parallel import part_of, prompts
from tests.ranks import run_ranks
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.models import LoadedModel, load
from torchweave.models.hooks.recurrent import is_recurrent
from torchweave.report import Report
from torchweave.verify import zoo

# Heads whose projections are interleaved; groups of B and C that all heads share, and a norm over all of them.
SERVED = ("qwen3_next", "bamba")


def config_of(name: str, **options: Any) -> dict[str, Any]:
    entry = zoo.zoo_model(name)
    return replace(entry, options={**entry.options, **options}).config().to_dict()


def recurrent(loaded: LoadedModel) -> list[nn.Module]:
    return [module for module in loaded.module.model.modules() if is_recurrent(module)]


def parameters(loaded: LoadedModel) -> int:
    return sum(parameter.numel() for module in recurrent(loaded) for parameter in module.parameters())


def state_bytes(loaded: LoadedModel) -> int:
    return sum(spec.num_bytes for spec in loaded.module.recurrent_layers)


def _tokens(process_groups: ProcessGroups, folder: str) -> dict[str, list[list[int]]]:
    return {
        name: paged_tokens(load(f"{folder}/{name}", torch.float32, process_groups=process_groups).module, prompts(), 6)
        for name in SERVED
    }


def test_tokens_of_divided_recurrent_layers_are_those_of_transformers(tmp_path: Path) -> None:
    expected = {}
    for name in SERVED:
        model = zoo.build(zoo.zoo_model(name))
        expected[name] = zoo.reference_tokens(model, prompts(), 6)
        zoo.save(model, tmp_path / name)
    first, second = run_ranks(_tokens, 2, str(tmp_path))
    assert first == second == expected


@pytest.mark.parametrize(
    ("name", "most", "most_state"),
    [
        ("qwen3_next", 0.51, 0.5),
        ("qwen3_5", 0.51, 0.5),
        ("olmo_hybrid", 0.51, 0.5),
        ("kimi_linear", 0.58, 0.5),  # each rank has the first, narrow matrix of the gates
        ("mamba2", 0.51, 0.5),
        ("bamba", 0.55, 0.52),  # one group of B and C, which each rank has
        ("granitemoehybrid", 0.55, 0.52),
        ("nemotron_h", 0.51, 0.5),
        ("lfm2", 0.51, 0.5),
        ("jamba", 0.51, 0.5),
        ("minimax", 0.51, 0.5),
    ],
)
def test_each_rank_has_half_of_a_recurrent_layer_and_of_its_states(name: str, most: float, most_state: float) -> None:
    whole, report = load(config_of(name), torch.float32, load_format="dummy"), Report(show=False)
    part = part_of(config_of(name), 1, load_format="dummy", report=report)
    assert 0 < parameters(part) <= most * parameters(whole)
    assert 0 < state_bytes(part) <= most_state * state_bytes(whole)
    (event,) = report.select("tensor_parallel")
    assert event["recurrent_layers"] == len(recurrent(whole)) and not report.select("warning")
    assert (event["state_bytes"], event["of_state_bytes"]) == (state_bytes(part), state_bytes(whole))


@pytest.mark.parametrize("size", [2, 4])
def test_rows_of_a_projection_by_key_heads(size: int, tmp_path: Path) -> None:
    """With more ranks than key heads, a key head is on several ranks, each with some of its value heads."""
    model = zoo.build(zoo.zoo_model("qwen3_next"))
    zoo.save(model, tmp_path)
    whole: Any = model.get_submodule("model.layers.0.linear_attn")
    parts: list[Any] = [
        part_of(tmp_path, rank, size).module.model.get_submodule("model.layers.0.linear_attn") for rank in range(size)
    ]
    x = torch.randn(1, 5, 64)
    ordered = whole.fix_query_key_value_ordering(whole.in_proj_qkvz(x), whole.in_proj_ba(x))
    own = [part.fix_query_key_value_ordering(part.in_proj_qkvz(x), part.in_proj_ba(x)) for part in parts]
    for index, name in enumerate(("query", "key", "value", "z", "b", "a")):
        each = [tensors[index] for tensors in own]
        if index < 2 and size == 4:
            assert torch.equal(each[0], each[1]) and torch.equal(each[2], each[3])
            each = each[::2]
        torch.testing.assert_close(torch.cat(each, 2), ordered[index], msg=name)


def test_factors_of_a_projection_are_divided_with_its_rows() -> None:
    config = config_of("falcon_h1", ssm_multipliers=[1.0, 2.0, 3.0, 4.0, 5.0])
    whole = load(config, torch.float32, load_format="dummy").module.model.get_submodule("model.layers.0.mamba")
    for rank in range(2):
        part = part_of(config, rank, load_format="dummy").module.model.get_submodule("model.layers.0.mamba")
        assert part.mup_vector.shape[-1] == part.in_proj.weight.shape[0] < whole.in_proj.weight.shape[0]  # type: ignore[union-attr, operator]
        values, counts = part.mup_vector.unique(return_counts=True)  # type: ignore[operator]
        assert values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0] and counts.tolist() == [64, 64, 16, 16, 4]


@pytest.mark.parametrize(
    ("name", "size", "options", "why"),
    [
        ("qwen3_next", 4, {"linear_num_value_heads": 6, "linear_num_key_heads": 2}, "6 value heads are not divisible by 4"),
        ("qwen3_next", 4, {"linear_num_value_heads": 12, "linear_num_key_heads": 3}, "3 key heads are neither a multiple nor a"),
        ("nemotron_h", 4, {}, "a norm of one of its 2 groups has its inputs on several ranks, but not on all"),
        ("bamba", 4, {"mamba_n_heads": 2, "mamba_d_head": 64}, "its 2 heads are not divisible by 4"),
    ],
)  # fmt: skip
def test_layers_that_do_not_divide_are_whole_on_each_rank_with_a_reason(
    name: str, size: int, options: dict[str, Any], why: str
) -> None:
    config, report = config_of(name, **options), Report(show=False)
    whole = load(config, torch.float32, load_format="dummy")
    part = part_of(config, 0, size, load_format="dummy", report=report)
    assert parameters(part) == parameters(whole) and state_bytes(part) == state_bytes(whole)
    (warning,) = report.select("warning")
    assert why in warning["why"] and f"each of the {size} ranks has all of" in warning["why"]
    assert report.select("tensor_parallel")[0]["recurrent_layers"] == 0
