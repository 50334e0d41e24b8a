"""Sampling defaults of a checkpoint, those that options ask for, and configs with fields that options replace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchweave.config.model_source import resolve
from torchweave.config.options import EngineConfig
from torchweave.models.generation import GenerationDefaults, with_options
from torchweave.models.load import model_facts, read_config

STORED = GenerationDefaults((2,), temperature=0.7, top_k=20)


@pytest.mark.parametrize(
    ("options", "defaults"),
    [
        ({}, STORED),
        ({"generation_config": "vllm"}, GenerationDefaults((2,), 1.0, 0, 1.0, 0.0, 1.0)),
        ({"override_generation_config": {"top_k": 5, "do_sample": True}}, GenerationDefaults((2,), 0.7, 5)),
        (
            {"generation_config": "vllm", "override_generation_config": {"temperature": 0.2}},
            GenerationDefaults((2,), 0.2, 0, 1.0, 0.0, 1.0),
        ),
    ],
)
def test_options_choose_the_defaults(options: dict[str, Any], defaults: GenerationDefaults) -> None:
    assert with_options(STORED, EngineConfig("demo", **options)) == defaults


def test_defaults_of_another_folder(tmp_path: Path) -> None:
    config = EngineConfig("demo", generation_config=str(tmp_path))
    with pytest.raises(ValueError, match=r"has no generation_config\.json"):
        with_options(STORED, config)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "top_p": 0.8, "eos_token_id": 9}))
    assert with_options(STORED, config) == GenerationDefaults((2,), temperature=1.0, top_p=0.8)
    file.write_text(json.dumps({"repetition_penalty": "x"}))
    with pytest.raises(ValueError, match="repetition_penalty='x': expected a number"):
        with_options(STORED, config)


def test_fields_of_the_config_are_replaced() -> None:
    overrides = {
        "rms_norm_eps": 0.5,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "max_position_embeddings": 1024,
    }
    config: Any = read_config(resolve("demo", overrides=overrides))
    plain: Any = read_config(resolve("demo"))
    assert type(config) is type(plain) and config.rms_norm_eps == 0.5 and config.hidden_size == plain.hidden_size
    assert config.rope_parameters == {"rope_theta": plain.rope_parameters["rope_theta"], **overrides["rope_scaling"]}
    assert model_facts("demo", overrides=overrides).max_model_len == 1024
    shape: Any = read_config(resolve("shape:llama-1b", overrides={"num_hidden_layers": 2}))
    assert shape.num_hidden_layers == 2
