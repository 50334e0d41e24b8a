"""RWKV-4, whose sums run without a running maximum, and XLM: what equals transformers, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.paged import paged_tokens
from torchweave.models import load
from torchweave.models.attention import UnsupportedModel
from torchweave.models.hooks.positions import POSITION_HOOKS
from torchweave.models.hooks.recurrent import hook_recurrent_layers
from torchweave.verify import zoo


@pytest.fixture
def rwkv() -> Any:
    return zoo.build(zoo.zoo_model("rwkv"))


def in_float64(layer: nn.Module, hidden: Tensor) -> Tensor:
    """transformers' own layer."""
    return copy.deepcopy(layer).double()(hidden.double())[0]


@pytest.mark.parametrize("part", ["attention", "feed_forward"])
def test_layers_equal_float64(rwkv: Any, part: str) -> None:
    layer = getattr(rwkv.rwkv.blocks[1], part)
    hidden = torch.randn(1, 80, rwkv.config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = in_float64(layer, hidden)
    assert hook_recurrent_layers(rwkv) == ["RwkvFeedForward", "RwkvSelfAttention"]
    torch.testing.assert_close(layer(hidden)[0].double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("factor", "finite"), [(1.0, True), (40.0, True), (300.0, False), (-300.0, False)])
def test_keys_of_any_size_give_the_right_result_or_none(rwkv: Any, factor: float, finite: bool) -> None:
    """Weights are exponentials of keys: beyond float32's range the result is NaN, which ends a request with an error."""
    layer = rwkv.rwkv.blocks[0].attention
    layer.key.weight.zero_()
    layer.key.weight[:, 0] = factor / 4
    hidden = torch.randn(1, 30, rwkv.config.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden[..., 0] = torch.linspace(0.5, 1.0, 30) * 4
    expected = in_float64(layer, hidden)
    hook_recurrent_layers(rwkv)
    result = layer(hidden)[0].double()
    assert bool(result[0, -1].isfinite().all()) == finite
    right = result.isfinite()
    torch.testing.assert_close(result[right], expected[right], atol=1e-4, rtol=1e-4)


def test_rescaled_layers_give_the_same_tokens(tmp_path: Path) -> None:
    """transformers divides weights in place in its first forward, so the model is saved before."""
    model = zoo.build(zoo.ZooModel("rwkv", {"rescale_every": 1}))
    zoo.save(model, tmp_path)
    prompts = [[5, 9, 30, 7], list(range(3, 40))]
    expected = zoo.reference_tokens(model, prompts, 8)
    loaded = load(tmp_path, torch.float32)
    weights = [parameter.clone() for parameter in loaded.module.parameters()]
    assert [one_sequence(loaded.module, prompt, 8) for prompt in prompts] == expected
    assert all(torch.equal(*pair) for pair in zip(weights, loaded.module.parameters(), strict=True))


def one_sequence(module: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of a step module whose ops run without an engine: all tokens are one new sequence each time."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = module(torch.tensor(ids), torch.arange(len(ids)), torch.tensor([len(ids) - 1]))
        ids.append(int(logits[0].argmax()))
    return ids[len(prompt) :]


def test_xlm_gives_the_same_tokens(tmp_path: Path) -> None:
    model = zoo.build(zoo.zoo_model("xlm"))
    zoo.save(model, tmp_path)
    prompts = [[5, 9, 30, 7], list(range(3, 40))]
    assert paged_tokens(load(tmp_path, torch.float32).module, prompts, 8) == zoo.reference_tokens(model, prompts, 8)


@pytest.mark.parametrize(
    ("option", "why"), [({"n_langs": 2}, "language of each token"), ({"causal": False}, "attends to later tokens")]
)
def test_other_xlms_are_refused(option: dict[str, Any], why: str) -> None:
    config = zoo.ZooModel("xlm", zoo.zoo_model("xlm").options | option, shared=False).config()
    model = zoo.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match=why):
        POSITION_HOOKS["XLMModel"](model.transformer)
