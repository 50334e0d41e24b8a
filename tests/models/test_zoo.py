"""Every architecture of the zoo, from a folder on disk, over a paged cache: the tokens of transformers' eager model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.paged import paged_tokens
from torchweave.log import Report
from torchweave.models import DecoderStep, UnsupportedModel, load, zoo
from torchweave.models.adapt import adapt, install, refuse_by_config
from torchweave.models.load import build_on_meta


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, zoo.VOCAB, (n,), generator=generator).tolist() for n in (3, 70, 21)]


@pytest.mark.parametrize("entry", zoo.SPECIMENS, ids=lambda entry: entry.name)
def test_tokens_equal_eager(entry: zoo.Specimen, tmp_path: Path) -> None:
    model = zoo.build(entry)
    expected = zoo.reference_tokens(model, prompts(), 8)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, torch.float32, max_model_len=entry.max_model_len)
    assert paged_tokens(loaded.module, prompts(), 8) == expected


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("llama", {"scale": 0.26}),
        ("mistral", {"window": 15}),
        ("mistral", {"window": 0}),
        ("llama4", {"chunk": 0}),
        ("gemma2", {"softcap": 0.0}),
        ("gemma2", {"window": 0}),
        ("gpt_oss", {"sinks": None}),
        ("gpt_neo", {"window": 0}),
        ("phimoe", {"window": 0}),
    ],
    ids=str,
)
def test_the_zoo_sees_a_mistake(name: str, spoil: dict[str, object]) -> None:
    model = zoo.build(zoo.specimen(name))
    expected = zoo.reference_tokens(model, prompts(), 8)
    specs = adapt(build_on_meta(zoo.specimen(name).config(), torch.float32), Report(show=False))
    install(model)
    step = DecoderStep(model, specs, zoo.VOCAB, 512)
    assert paged_tokens(step, prompts(), 8) == expected
    assert paged_tokens(step, prompts(), 8, spoil=spoil) != expected


@pytest.mark.parametrize("entry", zoo.REFUSED, ids=lambda entry: entry.name)
def test_refused_with_a_reason(entry: zoo.Specimen) -> None:
    config = entry.config()
    with pytest.raises(UnsupportedModel) as refusal:
        refuse_by_config(config)
        adapt(build_on_meta(config, torch.float32), Report(show=False))
    assert entry.model_type.replace("_", "") in str(refusal.value).lower().replace("_", "")
    assert str(refusal.value).endswith(".")


def test_there_are_enough() -> None:
    names = [entry.name for entry in zoo.SPECIMENS]
    assert len(set(names)) == len(names)
    assert len({entry.model_type for entry in zoo.SPECIMENS}) >= 60
