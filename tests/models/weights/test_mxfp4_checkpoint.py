"""gpt-oss's checkpoints: experts in MXFP4 against the dequantized model in transformers, parts of ranks, and damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.paged import paged_tokens
from tests.models.parallel.test_parallel import part_of, prompts
from tests.models.weights.packings import change_config
from torchweave.models import load
from torchweave.models.load import model_facts
from torchweave.ops.quant.int_linear import dequantize_int
from torchweave.ops.quant.mxfp4 import MX_BLOCK
from torchweave.report import Report
from torchweave.verify import zoo

CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def packed(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales and values of `[E, in, out]`, as gpt-oss stores them: rows of outputs, 32 inputs in 16 bytes."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    scaled = groups / 2**exponent
    code = (scaled.abs()[..., None] - CODES).abs().argmin(-1)
    values = (CODES[code] * scaled.sign() * 2**exponent).flatten(2).transpose(1, 2)
    nibble = code + 8 * (scaled < 0)
    blocks = (nibble[..., ::2] + 16 * nibble[..., 1::2]).to(torch.uint8)
    return blocks, (exponent[..., 0] + 127).to(torch.uint8), values


def write(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    model = zoo.build(zoo.zoo_model("gpt_oss"))
    zoo.save(model, folder)
    file, values = folder / "model.safetensors", {}
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"], values[name] = packed(tensors.pop(name))
        model.get_parameter(name).data.copy_(values[name])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    change_config(folder, CONFIG)
    return model, values


def values_of(model: Any, name: str) -> Tensor:
    """The numbers `[E, in, out]` of a parameter."""
    owner, _, leaf = name.rpartition(".")
    scale = getattr(model.get_submodule(owner), f"{leaf}_scale")
    width = scale.shape[2] * MX_BLOCK
    experts = zip(model.get_parameter(name), scale, strict=True)
    return torch.stack([dequantize_int(w, s, None, width, MX_BLOCK, torch.float32).t() for w, s in experts])


def test_a_checkpoint_is_read(tmp_path: Path) -> None:
    model, values = write(tmp_path)
    report = Report(show=False)
    assert model_facts(tmp_path).quantization == "mxfp4"
    loaded = load(tmp_path, torch.float32, report=report)
    assert loaded.quantization == "mxfp4"
    for name, value in values.items():
        assert torch.equal(values_of(loaded.module.model, name), value), name
    assert report.select("quantized")[0]["parameters"] == sum(value.numel() for value in values.values())
    assert paged_tokens(loaded.module, prompts(), 6) == zoo.reference_tokens(model, prompts(), 6)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_cut_experts_by_rows_and_groups(expert_parallel: bool, tmp_path: Path) -> None:
    _, values = write(tmp_path)
    up, down = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
    if not expert_parallel:
        with pytest.raises(ValueError, match=r"down_proj has one scale per 32 inputs.*enable_expert_parallel"):
            part_of(tmp_path, 0)  # 96 inputs are three groups
        return
    parts = [part_of(tmp_path, rank, expert_parallel=True).module.model for rank in range(2)]
    for name in (up, down):
        assert torch.equal(torch.cat([values_of(part, name) for part in parts]), values[name])


def test_experts_are_rounded_at_load(tmp_path: Path) -> None:
    for name in ("gpt_oss", "qwen3_moe"):
        zoo.save(zoo.build(zoo.zoo_model(name)), tmp_path / name)
        plain, loaded = load(tmp_path / name), load(tmp_path / name, quantization="mxfp4")
        assert loaded.weight_bytes < plain.weight_bytes
        ids = torch.arange(3, 33)
        with torch.no_grad():
            one, two = (each.module(ids, torch.arange(30), torch.arange(30)) for each in (plain, loaded))
        assert 1e-3 < (one - two).norm() / one.norm() < 0.7, "random weights hide nothing"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"down_proj_scales": None}, "lacks model.layers.1.mlp.experts.down_proj_scales"),
        ({"down_proj_blocks": torch.zeros(4, 64, 3, 15, dtype=torch.uint8)}, "down_proj_blocks as U8 of shape"),
        ({"down_proj_scales": torch.zeros(4, 64, 3)}, "beside scales as F32"),
        (
            {"down_proj_scales": torch.full((4, 64, 3), 255, dtype=torch.uint8)},
            "scales of model.*down_proj that are not all",
        ),
        (
            {
                "down_proj_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8),
                "down_proj_scales": torch.zeros(4, 64, 2, dtype=torch.uint8),
            },
            r"down_proj of shape \[4, 64, 64\], expected \[4, 96, 64\]",
        ),
    ],
)
def test_damage_is_one_sentence(changed: dict[str, Tensor | None], said: str, tmp_path: Path) -> None:
    write(tmp_path)
    file, owner = tmp_path / "model.safetensors", "model.layers.1.mlp.experts"
    tensors = load_file(file)
    for leaf, tensor in changed.items():
        del tensors[f"{owner}.{leaf}"]
        if tensor is not None:
            tensors[f"{owner}.{leaf}"] = tensor
    save_file(tensors, file)
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


def test_another_config_than_the_weights(tmp_path: Path) -> None:
    zoo.save(zoo.build(zoo.zoo_model("gpt_oss")), tmp_path)
    change_config(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="has no packed experts, though its"):
        load(tmp_path)
