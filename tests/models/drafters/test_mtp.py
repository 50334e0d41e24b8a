"""MTP layers: published forms against transformers' `MtpModel`, quantized ones, tensors left out elsewhere, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from tests.models.drafters.mtp_checkpoints import (
    MODELS,
    needs_mtp,
    reference_drafts,
    transformers_models,
    write_checkpoint,
)
from torchweave.config.model_source import resolve
from torchweave.models.drafters.mtp import MtpHead, load_mtp_head
from torchweave.models.load import LoadedModel, load
from torchweave.models.weights.mtp_tensors import as_model_of_one_layer, split_mtp_tensors
from torchweave.models.weights.quantize import Fp8Linear
from torchweave.report import Report

TOKENS = [1, *range(20, 41), 57, 30]
CLOSE: Any = {"atol": 2e-5, "rtol": 1e-5}


def head_of(folder: Path, **options: Any) -> tuple[LoadedModel, MtpHead]:
    target = load(str(folder), torch.float32, "cpu", **options)
    return target, load_mtp_head(target, resolve(str(folder)), **options)


@torch.no_grad()
def draft_logits(target: LoadedModel, head: MtpHead) -> torch.Tensor:
    """Logits of the first draft behind TOKENS."""
    ids, positions, last = torch.tensor(TOKENS), torch.arange(len(TOKENS)), torch.tensor([len(TOKENS) - 2])
    _, hidden = target.module(ids, positions, last)
    logits, out = head(ids[1:], positions[:-1], last, hidden[:-1])
    assert out.shape == (1, head.input_hidden_size)
    return logits[0]


@needs_mtp
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, name)
    target, head = head_of(folder)
    model, mtp = transformers_models(folder)
    _, wanted = reference_drafts(model, mtp, TOKENS, 1)
    torch.testing.assert_close(draft_logits(target, head), wanted[0], **CLOSE)
    module: Any = target.module.model
    assert head.model.lm_head is module.lm_head and head.model.model.embed_tokens is module.model.embed_tokens  # type: ignore[union-attr]
    assert sum(tensor.nbytes for tensor in mtp.layers.state_dict().values()) <= head.num_bytes < target.weight_bytes


@needs_mtp
@pytest.mark.parametrize("name", MODELS)
def test_engines_without_mtp_leave_its_tensors_out(tmp_path: Path, name: str) -> None:
    """The model is as without them, and its experts are merged while they are read."""
    report = Report(show=False)
    loaded = load(str(write_checkpoint(tmp_path / "with", name)), torch.float32, "cpu", report=report)
    without = load(str(write_checkpoint(tmp_path / "without", name, layer=False)), torch.float32, "cpu")
    assert report.select("weights_converted")[0]["by"] == "torchweave, while reading"
    assert loaded.num_parameters == without.num_parameters and loaded.weight_bytes == without.weight_bytes
    ids, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS))
    with torch.no_grad():
        assert torch.equal(*(each.module(ids, positions, positions) for each in (loaded, without)))


@needs_mtp
def test_a_layer_in_fp8_with_scales_of_blocks(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: linears of the layer in FP8, its projection in 16 bits.

    Logits are compared with experts in FP8 alone: other FP8 linears round their activations.
    """
    config: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
    plain = write_checkpoint(tmp_path / "plain", "glm4_moe", **config)
    packed = write_checkpoint(tmp_path / "fp8", "glm4_moe", **config)
    raw = json.loads((packed / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (packed / "config.json").write_text(json.dumps(raw))
    stored = load_file(plain / "model.safetensors")
    for part in (".experts.", "_proj.weight"):
        rounded, means = dict(stored), dict(stored)
        for name in [name for name in stored if part in name and "eh_proj" not in name]:
            rounded[name] = stored[name].clamp(-1, 1).to(torch.float8_e4m3fn)
            scale = rounded[name + "_scale_inv"] = torch.rand([-(-size // 128) for size in stored[name].shape]) + 0.5
            rows, columns = stored[name].shape
            wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            means[name] = rounded[name].float() * wide
        save_file(means, plain / "model.safetensors")
        save_file(rounded, packed / "model.safetensors")
        target, head = head_of(packed)
        if part == ".experts.":
            torch.testing.assert_close(draft_logits(target, head), draft_logits(*head_of(plain)), rtol=1e-4, atol=1e-4)
            continue
        layer: Any = head.model.model.layers[0]  # type: ignore[union-attr]
        for name in ("self_attn.o_proj", "mlp.shared_experts.down_proj"):
            linear = layer.get_submodule(name)
            assert isinstance(linear, Fp8Linear)
            assert torch.equal(linear.weight.float(), rounded[f"model.layers.3.{name}.weight"].float())
        assert torch.equal(head.model.model.eh_proj.weight, stored["model.layers.3.eh_proj.weight"])  # type: ignore[union-attr]


@needs_mtp
def test_random_weights_leave_the_model_as_it_is(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "deepseek_v3", layer=False)
    target = load(str(folder), torch.float32, "cpu", load_format="dummy")
    before = {name: tensor.clone() for name, tensor in target.module.model.state_dict().items()}
    head = load_mtp_head(target, resolve(str(folder)), load_format="dummy")
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.module.model.state_dict().items())
    assert draft_logits(target, head).isfinite().all()


def test_tensors_are_split_by_the_layer_and_its_projection() -> None:
    stored: dict[str, int] = dict.fromkeys(
        ("model.layers.1.mlp.up_proj.weight", "model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight",
         "model.layers.2.shared_head.head.weight", "model.layers.2.self_attn.q_proj.weight", "model.layers.3.other.weight",
         "mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.k_proj.weight"), 0
    )  # fmt: skip
    own, mtp = split_mtp_tensors(stored, 2)
    assert list(own) == ["model.layers.1.mlp.up_proj.weight", "model.layers.3.other.weight"]
    assert set(as_model_of_one_layer(mtp)) == {
        "model.eh_proj.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
    }  # fmt: skip
    assert split_mtp_tensors(stored, 3)[1].keys() == {name for name in stored if name.startswith("mtp.")}


@needs_mtp
def test_layers_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, "glm4_moe")
    target, source = load(str(folder), torch.float32, "cpu"), resolve(str(folder))
    file = folder / "model.safetensors"
    stored = load_file(file)

    def refused(message: str, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> None:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | config))
        save_file(stored if tensors is None else tensors, file)
        with pytest.raises(ValueError, match=message):
            load_mtp_head(target, source)
        (folder / "config.json").write_text(json.dumps(raw))

    refused("has 2 MTP layers; checkpoints of one MTP layer are supported", num_nextn_predict_layers=2)
    second = {name.replace("layers.3.", "layers.4."): tensor.clone() for name, tensor in stored.items()}
    refused("has 2 MTP layers; checkpoints of one MTP layer are supported", stored | second)
    refused("has no MTP layer", {name: tensor for name, tensor in stored.items() if "layers.3." not in name})
    refused("lacks model.hnorm.weight", {name: tensor for name, tensor in stored.items() if "hnorm" not in name})
    monkeypatch.delattr(PreTrainedConfig, "get_mtp_config")
    refused("transformers .* has no MTP layers; update transformers")
