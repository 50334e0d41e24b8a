"""Adapters as PEFT writes them: what is read of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torchweave.models.weights.peft_adapter import CONFIG, TENSORS, LowRankPair, read_adapter
from torchweave.models.weights.shards import TensorShard, even_shard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o_proj(self.q_proj(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def saved(folder: Path, **options: Any) -> tuple[nn.Module, Model]:
    """PEFT's model with random matrices, saved to a folder, and its base."""
    torch.manual_seed(0)
    base = Model().requires_grad_(False)
    whole = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]} | options))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    whole.eval().save_pretrained(str(folder))
    return whole, base


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {
            "target_modules": ["q_proj", "o_proj"],
            "rank_pattern": {"o_proj": 2},
            "alpha_pattern": {r"layers\.1\.q_proj": 3},
        },
        {"target_modules": r".*\.[01]\.o_proj", "use_rslora": True, "rank_pattern": {r"layers\.0.*": 3}},
        {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
        {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    ],
    ids=["list", "rslora", "patterns", "regex", "all-linear", "layers"],
)
def test_pairs_add_what_peft_adds(options: dict[str, Any], tmp_path: Path) -> None:
    whole, base = saved(tmp_path, **options)
    pairs = read_adapter(str(tmp_path), 8).pairs
    assert pairs
    x = torch.randn(3, 6)
    expected = whole(x)
    plain = Model().requires_grad_(False)
    names = {
        name.replace(".base_layer", ""): tensor for name, tensor in base.state_dict().items() if "lora_" not in name
    }
    plain.load_state_dict(names)
    for name, pair in pairs.items():
        plain.get_submodule(name).weight.data += pair.b @ pair.a
    torch.testing.assert_close(plain(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"use_dora": True}, "use_dora=True, which is not supported: DoRA scales"),
        ({"bias": "lora_only"}, "bias='lora_only', which is not supported"),
        ({"lora_bias": True}, "lora_bias=True, which is not supported"),
        ({"modules_to_save": ["o_proj"]}, "modules_to_save=.*which is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which may change"),
        ({"r": 16}, "rank 16 for layers.0.q_proj, above max_lora_rank=8; raise the option"),
        ({"rank_pattern": {"2.q_proj": 9}}, "rank 9 for layers.2.q_proj, above max_lora_rank=8"),
    ],
    ids=["dora", "bias", "lora_bias", "modules_to_save", "pissa", "rank", "rank of a pattern"],
)
def test_what_is_not_supported_is_refused_by_name(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    saved(tmp_path, **options)
    with pytest.raises(ValueError, match=why):
        read_adapter(str(tmp_path), 8)


def edit(folder: Path, tensors: dict[str, Tensor | None] | None = None, **config: Any) -> None:
    written = json.loads((folder / CONFIG).read_text()) | config
    (folder / CONFIG).write_text(json.dumps(written))
    if tensors is not None:
        stored = load_file(folder / TENSORS) | tensors
        save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, folder / TENSORS)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    first = "base_model.model.layers.0.q_proj."
    cases: list[tuple[dict[str, Any], str]] = [
        ({"peft_type": "IA3"}, "type 'IA3'; only LORA"),
        ({"a_new_method": {"x": 1}}, "a_new_method=.*the field is not known"),
        ({"r": 0}, "r=0: expected a number above 0"),
        ({"lora_alpha": None}, "lora_alpha=None: expected"),
        ({"r": 5}, "rank 4 for layers.0.q_proj, but its config says 5"),
        ({"tensors": {first + "lora_A.weight": None}}, "no tensor lora_A for layers.0.q_proj"),
        ({"tensors": {first + "lora_A.weight": torch.zeros(3, 6)}}, r"shapes \[3, 6\] and \[8, 4\]"),
        (
            {"tensors": {first + "lora_magnitude_vector": torch.zeros(8)}},
            "lora_magnitude_vector, for which there is no place",
        ),
        ({"tensors": {"layers.0.o_proj.lora_A.weight": torch.zeros(4, 8)}}, "the tensor layers.0.o_proj.*no place"),
        ({"tensors": {"base_model.model.e.lora_embedding_A": torch.zeros(4, 8)}}, "lora_embedding_A, for which"),
    ]
    for number, (changes, why) in enumerate(cases):
        folder = tmp_path / str(number)
        saved(folder)
        edit(folder, **changes)
        with pytest.raises(ValueError, match=why):
            read_adapter(str(folder), 8)
    with pytest.raises(ValueError, match=r"lacks adapter_config\.json"):
        read_adapter(str(tmp_path), 8)
    (folder / TENSORS).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"damaged or cut short"):
        read_adapter(str(folder), 8)
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"lacks adapter_model\.safetensors; its weights are in a file of pickles"):
        read_adapter(str(folder), 8)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_ranks_are_those_of_the_weight(dim: int, transposed: bool) -> None:
    torch.manual_seed(0)
    pair = LowRankPair(torch.randn(3, 8), torch.randn(12, 3))
    whole = pair.b @ pair.a
    whole = whole.t() if transposed else whole
    for rank in range(2):
        shard = even_shard(whole.shape, dim, rank, 2, parts=2)
        part = pair.part(shard, transposed)
        assert shard is not None
        delta = part.b @ part.a
        torch.testing.assert_close(delta.t() if transposed else delta, shard.extract(whole))
    padded = TensorShard((5, 8), 0, ((4, 5),), pad=2)
    assert LowRankPair(pair.a, torch.randn(5, 3)).part(padded, False).b.shape == (3, 3)
