"""EAGLE-3 heads: both published forms, against plain torch in float64, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.drafters.eagle_heads import demo_model, hidden_states_of, random_head, reference_drafts, write_head
from torchweave.models.drafters.eagle import default_taken, load_eagle_head, read_eagle_config
from torchweave.models.load import LoadedModel, load

TOKENS = [1, *range(20, 41), 57, 30]
CLOSE: Any = {"atol": 1e-4, "rtol": 1e-4}  # norms and rotations of transformers' models are computed in float32


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load("demo", torch.float64, "cpu")


CASES = {
    "speculators": ("speculators", None, {}),
    "speculators, part of the vocabulary": ("speculators", 61, {"norm_before_residual": True}),
    "eagle": ("eagle", 61, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_head_computes_what_plain_torch_does(target: LoadedModel, tmp_path: Path, case: str) -> None:
    form, predicted, options = CASES[case]
    weights = random_head(192, target.module.vocab_size, predicted)
    head = load_eagle_head(write_head(tmp_path, weights, form, **options), target.module, torch.float64, 64)
    model = demo_model()
    embedding, states = model.get_input_embeddings().weight.detach(), hidden_states_of(model, TOKENS)
    ids, positions, last = torch.tensor(TOKENS), torch.arange(len(TOKENS)), torch.tensor([len(TOKENS) - 2])
    with torch.no_grad():
        logits, hidden = target.module(ids, positions, last)
        torch.testing.assert_close(logits, model(input_ids=ids[None]).logits[0, last], **CLOSE)
        combined = states @ weights["fc.weight"].double().T
        torch.testing.assert_close(hidden, combined, **CLOSE)
        drafted, own = head(ids[1:], positions[:-1], last, hidden[:-1])
    assert own.shape == (1, 192)
    _, wanted = reference_drafts(weights, embedding, states[:-1], TOKENS, 1, bool(options))
    torch.testing.assert_close(drafted[0], wanted[0], **CLOSE)
    assert head.embed_tokens.weight.data_ptr() == target.module.model.get_input_embeddings().weight.data_ptr()  # type: ignore[operator]


def test_hidden_states_are_collected_in_the_order_of_the_head(target: LoadedModel, tmp_path: Path) -> None:
    """The default of a model of five layers names the second three times; a second head replaces the first."""
    weights = random_head(192, target.module.vocab_size)
    model, ids = demo_model(), torch.tensor(TOKENS)
    for ids_of_head, taken in ((None, (2, 2, 2)), ([4, 1, 2], (4, 1, 2))):
        folder = write_head(tmp_path, weights, eagle_aux_hidden_state_layer_ids=ids_of_head)
        load_eagle_head(folder, target.module, torch.float64, 64)
        with torch.no_grad():
            _, hidden = target.module(ids, torch.arange(len(TOKENS)), torch.tensor([0]))
        wanted = hidden_states_of(model, TOKENS, taken) @ weights["fc.weight"].double().T
        torch.testing.assert_close(hidden, wanted, **CLOSE)
    assert default_taken(32) == (2, 16, 29)


def test_weights_in_the_old_format_and_own_embeddings(target: LoadedModel, tmp_path: Path) -> None:
    weights = random_head(192, target.module.vocab_size)
    weights["embed_tokens.weight"] = torch.randn(target.module.vocab_size, 192)
    folder = write_head(tmp_path, weights, "eagle")
    stored = folder / "model.safetensors"
    torch.save(load_file(stored), folder / "pytorch_model.bin")
    stored.unlink()
    head = load_eagle_head(folder, target.module, torch.float64, 64)
    torch.testing.assert_close(head.embed_tokens.weight, weights["embed_tokens.weight"].double())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no head": (
        {"speculators_model_type": None, "architectures": ["LlamaForCausalLM"]},
        "is no EAGLE-3 head, but has Llama",
    ),
    "other head": ({"speculators_model_type": "mtp"}, "is no EAGLE-3 head, but has mtp"),
    "other layer": ({"transformer_layer_config": {"model_type": "gemma2"}}, "has a layer of gemma2"),
    "two layers": ({"transformer_layer_config": {"num_hidden_layers": 2}}, "has 2 layers"),
    "norm": ({"fc_norm": True}, "has fc_norm=True, which is not supported"),
    "layers": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"after layers \[1, 2, 9\], but the model has 5"),
    "number": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2]},
        "takes 576 channels, but 2 hidden states of the model have 384",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_are_refused(target: LoadedModel, tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    folder = write_head(tmp_path, random_head(192, target.module.vocab_size))
    config = json.loads((folder / "config.json").read_text())
    layer = config["transformer_layer_config"] | changes.get("transformer_layer_config", {})
    changes = changes | {"transformer_layer_config": layer}
    config = {name: value for name, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_eagle_head(folder, target.module, torch.float32, 64)


def test_weights_that_do_not_fit_are_refused(target: LoadedModel, tmp_path: Path) -> None:
    vocab_size = target.module.vocab_size

    def refused(message: str, weights: dict[str, torch.Tensor]) -> None:
        with pytest.raises(ValueError, match=message):
            load_eagle_head(write_head(tmp_path, weights), target.module, torch.float32, 64)

    refused("takes 1536 channels, but 3 hidden states of the model have 576", random_head(512, vocab_size))
    refused("needs embeddings of 104 tokens with 128 channels", random_head(128, vocab_size, width=192))
    refused("predicts 103 of 104 tokens, but has no d2t", random_head(192, 103))
    refused("d2t of the head .* does not map its 60 tokens", random_head(192, 300, 60))
    weights = random_head(192, vocab_size)
    refused("lacks fc.weight", {name: tensor for name, tensor in weights.items() if name != "fc.weight"})
    del weights["layers.0.hidden_norm.weight"]
    refused("lacks layers.0.hidden_norm.weight", weights)


def test_ids_nested_as_sglang_does_name_the_layer_whose_output_is_taken(tmp_path: Path) -> None:
    weights = random_head(192, 104)
    assert read_eagle_config(write_head(tmp_path, weights, "eagle")).taken == (1, 3, 4)
    assert read_eagle_config(write_head(tmp_path, weights)).taken == (1, 3, 4)
