"""FP8 at load: quantized layers, rounding, order of loading, and FP8 checkpoints against dequantized ones."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torchweave.models import load
from torchweave.models.load import model_facts
from torchweave.models.weights import read as weights
from torchweave.models.weights.quantize import (
    DUMMY_INPUT_SCALE,
    Fp8Linear,
    Quantizer,
    QuantScheme,
    quantize_weight,
)
from torchweave.ops.quant.fp8 import FP8, GROUP
from torchweave.plug_points import QUANTIZATION_FORMATS
from torchweave.report import Report
from torchweave.verify import image_zoo, zoo

IDS = torch.arange(3, 33)
ONLINE = ("fp8", "fp8_per_channel", "fp8_per_block")


def logits_of(loaded: Any) -> Tensor:
    with torch.no_grad():
        return loaded.module(IDS, torch.arange(len(IDS)), torch.arange(len(IDS)))


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """The numbers that e4m3 `[N, K]` and scales stand for; scales as modules and as checkpoints have them."""
    if scale.ndim == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[: weight.shape[0], : weight.shape[1]]
    return weight.float() * (scale[:, None] if scale.ndim == 1 and scale.numel() > 1 else scale)


class Reference(nn.Module):
    """A linear that rounds its input to FP8 and back, and multiplies by the numbers that the weight stands for."""

    def __init__(self, module: Fp8Linear) -> None:
        super().__init__()
        self.weight, self.bias = dequantized(module.weight, module.weight_scale), module.bias
        self.group, self.given = module.group, module.input_scale

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.flatten(0, -2), x.shape[-1]
        size = self.group or width
        parts = rows.split(size, 1)
        scales = [self.given if self.given is not None else part.abs().amax(1, keepdim=True) / 448 for part in parts]
        rounded = [(part / s).clamp(-448, 448).to(FP8).float() * s for part, s in zip(parts, scales, strict=True)]
        return nn.functional.linear(torch.cat(rounded, 1).view(x.shape), self.weight, self.bias)


def check_against_dequantized(loaded: Any) -> None:
    """Every quantized linear, on what it reads in the model's own forward."""
    seen: list[Fp8Linear] = []

    def compare(module: Fp8Linear, inputs: tuple[Tensor], output: Tensor) -> None:
        torch.testing.assert_close(output, Reference(module)(inputs[0]), rtol=1e-4, atol=1e-4)
        seen.append(module)

    modules = [module for module in loaded.module.modules() if isinstance(module, Fp8Linear)]
    hooks = [module.register_forward_hook(compare) for module in modules]
    logits_of(loaded)
    for hook in hooks:
        hook.remove()
    assert modules and set(seen) == set(modules)


# -- while weights are loaded ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["tensor", "channel", "block"])
def test_a_weight_is_rounded_to_the_nearest_of_its_scale(how: Any) -> None:
    weight = torch.randn(144, 208) * torch.logspace(-2, 2, 144)[:, None]
    q, scale = quantize_weight(weight, QuantScheme(how))
    assert q.dtype == FP8 and q.shape == weight.shape and scale.dtype == torch.float32
    assert list(scale.shape) == ([2, 4] if how == "block" else [144]), "blocks of K are padded to four"
    assert scale.unique().numel() == {"tensor": 1, "channel": 144, "block": 5}[how]
    blocks = {"tensor": (144, 208), "channel": (1, 208), "block": (GROUP, GROUP)}[how]
    for row in range(0, 144, blocks[0]):
        for column in range(0, 208, blocks[1]):
            here = (slice(row, row + blocks[0]), slice(column, column + blocks[1]))
            assert q[here].float().abs().max() == 448
            amax = weight[here].abs().max()
            error = (dequantized(q, scale)[here] - weight[here]).abs()
            assert bool((error <= weight[here].abs() / 16 + amax / 448 * 2**-9).all())


@pytest.mark.parametrize("quantization", ONLINE)
def test_linears_become_fp8_and_others_stay(quantization: str, tmp_path: Path) -> None:
    zoo.save(zoo.build(zoo.zoo_model("llama")), tmp_path)
    report = Report(show=False)
    plain, loaded = load(tmp_path), load(tmp_path, quantization=quantization, report=report)
    assert loaded.quantization == QUANTIZATION_FORMATS.get(quantization).scheme.name
    assert loaded.weight_bytes < plain.weight_bytes / 2
    model = loaded.module.model
    quantized = [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
    assert len(quantized) == 7 * len(model.model.layers) and type(model.lm_head) is nn.Linear
    (event,) = report.select("quantized")
    assert event["linears"] == len(quantized) and event["excluded"] == {
        "the output layer: its logits decide": ["lm_head"]
    }
    error = (logits_of(loaded) - logits_of(plain)).norm() / logits_of(plain).norm()
    assert 1e-3 < error < 0.4, "random weights hide nothing"
    check_against_dequantized(loaded)


def test_no_whole_model_is_ever_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a weight arrives, those before it are in FP8 already."""
    wide: list[int] = []

    class Spy(Quantizer):
        def set_tensor(self, model: nn.Module, name: str, tensor: Tensor) -> None:
            super().set_tensor(model, name, tensor)
            linears = [model.get_submodule(each) for each in self.linears]
            wide.append(sum(not each.weight.is_meta and each.weight.dtype != FP8 for each in linears))

    monkeypatch.setattr(sys.modules["torchweave.models.weights.quantize"], "Quantizer", Spy)
    load("demo", quantization="fp8")
    assert len(wide) > 35 and max(wide) == 0


def test_biases_and_a_bfloat16_model(tmp_path: Path) -> None:
    model = zoo.build(zoo.zoo_model("qwen2"))
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, "bfloat16", quantization="fp8_per_channel")
    attention = loaded.module.model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, Fp8Linear) and attention.q_proj.bias.dtype == torch.bfloat16
    assert torch.equal(attention.q_proj.bias.float(), model.model.layers[0].self_attn.q_proj.bias.bfloat16().float())
    assert logits_of(loaded).dtype == torch.bfloat16


def test_dummy_weights_are_quantised_too() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    config |= {"intermediate_size": 96}
    loaded = load(config, load_format="dummy", quantization="fp8_per_block")
    assert isinstance(loaded.module.model.model.layers[1].mlp.down_proj, Fp8Linear)
    assert torch.isfinite(logits_of(loaded)).all()


@pytest.mark.parametrize("quantization", ["fp8", "int4", "nvfp4"])
def test_a_mixture_keeps_its_router(quantization: str, tmp_path: Path) -> None:
    zoo.save(zoo.build(zoo.zoo_model("qwen2_moe")), tmp_path)
    report = Report(show=False)
    plain, loaded = load(tmp_path), load(tmp_path, quantization=quantization, report=report)
    excluded = report.select("quantized")[0]["excluded"]
    experts = loaded.module.model.model.layers[0].mlp.experts
    assert experts.down_proj.dtype == (FP8 if quantization == "fp8" else torch.int32), (
        "experts are rounded with linears"
    )
    error = (logits_of(loaded) - logits_of(plain)).norm() / logits_of(plain).norm()
    assert 1e-3 < error < 0.6 and "experts of a mixture" not in excluded
    assert any("shared_expert_gate" in names[0] for names in excluded.values())
    if quantization == "fp8":
        check_against_dequantized(loaded)


def test_a_model_without_linears_is_refused() -> None:
    with pytest.raises(ValueError, match="no linear layer"):
        load(zoo.zoo_model("gpt2").config().to_dict(), load_format="dummy", quantization="fp8")
    with pytest.raises(ValueError, match=r"unknown quantization format .int8.; available: .*fp8"):
        load("demo", quantization="int8")


# -- checkpoints that are FP8 ------------------------------------------------------------------------------------------


def compressed_tensors(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | weights,
        "input_activations": None if inputs is None else numbers | inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FORMS: dict[str, tuple[dict[str, Any], QuantScheme]] = {
    "ct-tensor": (
        compressed_tensors({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
        QuantScheme("tensor", static=True),
    ),
    "ct-channel": (
        compressed_tensors({"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
        QuantScheme("channel"),
    ),
    "ct-block": (
        compressed_tensors(
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
        ),
        QuantScheme("block"),
    ),
    "hf-block": (BLOCKS, QuantScheme("block")),
    "hf-tensor": (
        BLOCKS | {"activation_scheme": "static", "weight_block_size": None},
        QuantScheme("tensor", static=True),
    ),
    "autofp8": ({"quant_method": "fp8", "activation_scheme": "static"}, QuantScheme("tensor", static=True)),
}


_GIVEN = 0.03


def write(form: str, folder: Path) -> dict[str, Tensor]:
    """A tiny checkpoint in one form; returns the numbers that its weights stand for."""
    config, how = FORMS[form]
    zoo.save(zoo.build(zoo.zoo_model("llama")), folder)
    file = folder / "model.safetensors"
    tensors, means = load_file(file), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        q, scale = quantize_weight(tensors[name], how)
        means[name] = dequantized(q, scale)
        if how.weights == "block":
            scale = scale[:, : -(-q.shape[1] // GROUP)].contiguous()
        elif how.weights == "tensor":
            scale = scale[0].clone()
        else:
            scale = scale[:, None].bfloat16() if form == "ct-channel" else scale[:, None]
            means[name] = q.float() * scale.float()
        tensors[name] = q
        tensors[name + ("_scale_inv" if form in ("hf-block", "hf-tensor") else "_scale")] = scale
        if how.static:
            ending, shape = ("activation_scale", []) if form == "hf-tensor" else ("input_scale", [1])
            tensors[name.replace("weight", ending)] = torch.full(shape, _GIVEN)
    if form == "ct-tensor":
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, file)
    change_config(folder, config)
    return means


def change_config(folder: Path, quantization: dict[str, Any]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_is_read(form: str, tmp_path: Path) -> None:
    means, how = write(form, tmp_path), FORMS[form][1]
    report = Report(show=False)
    assert model_facts(tmp_path).quantization == how.name
    loaded = load(tmp_path, report=report)
    assert loaded.quantization == how.name
    model = loaded.module.model
    assert means
    for name, mean in means.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        assert isinstance(module, Fp8Linear)
        assert torch.equal(dequantized(module.weight, module.weight_scale), mean), name
        assert (module.input_scale is not None) == how.static
        assert module.input_scale is None or module.input_scale.tolist() == [pytest.approx(_GIVEN)]
        assert module.group == how.group
    assert report.select("quantized")[0]["source"] == "checkpoint"
    check_against_dequantized(loaded)


CACHE_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}


def test_a_checkpoint_brings_scales_of_its_kv_cache(tmp_path: Path) -> None:
    """compressed-tensors' `kv_cache_scheme` with and without quantized linears, and the names that scales had before."""
    write("ct-tensor", tmp_path)
    ct = FORMS["ct-tensor"][0]
    file, layer = tmp_path / "model.safetensors", "model.layers.{}.self_attn."
    tensors = load_file(file)
    plain = {name: tensor for name, tensor in tensors.items() if "proj" not in name and not name.endswith("k_scale")}
    plain |= {name: tensors[name].float() for name in tensors if name.endswith("proj.weight")}
    scales = {
        layer.format(0) + "k_scale": torch.tensor([0.5]),
        layer.format(0) + "v_scale": torch.tensor(0.25).bfloat16(),
        layer.format(1) + "kv_scale": torch.tensor([2.0]),
    }
    save_file(plain | scales, file)
    change_config(tmp_path, ct | {"config_groups": {}, "kv_cache_scheme": CACHE_SCHEME})
    facts, loaded = model_facts(tmp_path), load(tmp_path)
    assert (facts.quantization, facts.kv_cache_dtype) == (None, "fp8_e4m3")
    found = [(spec.k_scale, spec.v_scale) for spec in loaded.module.attention_layers]
    assert found[:2] == [(0.5, 0.25), (2.0, 2.0)] and set(found[2:]) <= {(1.0, 1.0)}

    older = {layer.format(1) + "k_proj.output_scale": torch.tensor([3.0])}
    save_file(tensors | older, file)
    change_config(tmp_path, ct | {"kv_cache_scheme": CACHE_SCHEME | {"strategy": "attn_head"}})
    assert model_facts(tmp_path).kv_cache_dtype is None
    found = [(spec.k_scale, spec.v_scale) for spec in load(tmp_path).module.attention_layers]
    assert found[:2] == [(1.0, 1.0), (3.0, 1.0)]

    save_file(tensors | {layer.format(1) + "k_scale": torch.tensor([0.0])}, file)
    with pytest.raises(ValueError, match="finite number above 0"):
        load(tmp_path)


def test_dummy_weights_of_a_static_checkpoint(tmp_path: Path) -> None:
    write("ct-tensor", tmp_path)
    loaded = load(tmp_path, load_format="dummy")
    assert loaded.module.model.model.layers[0].mlp.up_proj.input_scale.tolist() == pytest.approx([DUMMY_INPUT_SCALE])


def test_layers_that_a_checkpoint_ignores_stay(tmp_path: Path) -> None:
    write("hf-block", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].float()
    del tensors[name + "_scale_inv"]
    save_file(tensors, file)
    report = Report(show=False)
    assert type(load(tmp_path, report=report).module.model.model.layers[1].mlp.up_proj) is nn.Linear
    excluded = report.select("quantized")[0]["excluded"]["not quantized in the checkpoint"]
    assert excluded == ["model.layers.*.mlp.up_proj"]


TRANSFORMS = {
    "config_groups": {
        "R1": {"type": "hadamard", "apply": [{"targets": ["re:.*o_proj$"], "location": "weight_output"}]},
        "R4": {
            "type": "hadamard",
            "apply": [{"targets": ["re:.*down_proj$"], "location": place} for place in ("input", "weight_input")],
        },
    }
}
"""SpinQuant as llm-compressor writes it: R4 is also to be done to what `down_proj` reads."""


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "awq"}, "by awq"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "by modelopt"),
        (compressed_tensors({"strategy": "group", "num_bits": 4, "type": "int"}, None), "int4"),
        (compressed_tensors({"strategy": "channel", "type": "int"}, {"strategy": "token", "type": "int"}), "int8 by channel"),
        (compressed_tensors({"strategy": "block", "block_structure": [64, 64]}, {"strategy": "token", "dynamic": True}), "block"),
        (BLOCKS | {"weight_block_size": [64, 64]}, r"blocks of \[64, 64\]"),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
        (BLOCKS | {"weight_block_size": 128}, "blocks of 128"),
        (FORMS["ct-channel"][0] | {"config_groups": ["FP8"]}, r"config_groups=\['FP8'\]: expected a JSON object"),
        (FORMS["ct-channel"][0] | {"config_groups": {"group_0": "FP8"}}, "group_0='FP8': expected a JSON object"),
        (compressed_tensors({"strategy": "channel"}, {}) | {"config_groups": {"g": {"weights": 8}}}, "weights=8"),
        (FORMS["ct-channel"][0] | {"transform_config": TRANSFORMS}, "online transforms of input"),
    ],
)  # fmt: skip
def test_unsupported_checkpoints_are_rejected_with_a_reason(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    zoo.zoo_model("llama").config().save_pretrained(tmp_path)
    change_config(tmp_path, config)
    for read in (model_facts, lambda folder: load(folder, load_format="dummy")):
        with pytest.raises(ValueError, match=said):
            read(tmp_path)


def test_damaged_checkpoints(tmp_path: Path) -> None:
    write("ct-channel", tmp_path)
    with pytest.raises(ValueError, match="fp8_per_channel already"):
        load(tmp_path, quantization="fp8_per_block")
    assert load(tmp_path, quantization="fp8_per_channel").quantization == "fp8_per_channel"
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name + "_scale": torch.ones(3)}, file)
    with pytest.raises(ValueError, match=r"scales of shape \[3\]"):
        load(tmp_path)
    save_file({key: value for key, value in tensors.items() if key != name + "_scale"}, file)
    with pytest.raises(ValueError, match="without a scale"):
        load(tmp_path)
    save_file(tensors, file)
    change_config(tmp_path, {})
    with pytest.raises(ValueError, match="without a scale"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("ending", "scale", "said"),
    [
        ("weight_scale", torch.tensor(torch.nan), "not all finite"),
        ("weight_scale", torch.tensor(-0.1), "not all finite and at least 0"),
        ("weight_scale", torch.tensor(torch.inf), "not all finite and at least 0"),
        ("weight_scale", torch.ones(0), r"scales of shape \[0\]"),
        ("weight_scale", torch.tensor(1, dtype=torch.uint8), "up_proj.weight in uint8, expected floating-point"),
        (
            "input_scale",
            torch.tensor([torch.nan]),
            "nan as input scale of model.layers.1.mlp.up_proj: expected one finite",
        ),
        ("input_scale", torch.zeros(1), r"has 0\.0 as input scale"),
        ("input_scale", torch.ones(2), r"a tensor of shape \[2\] as input scale of"),
    ],
)
def test_invalid_scales_are_rejected(ending: str, scale: Tensor, said: str, tmp_path: Path) -> None:
    write("ct-tensor", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {f"model.layers.1.mlp.up_proj.{ending}": scale}, file)
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("llama", "model.layers.0.mlp.up_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w2.weight"),
        ("gpt_neox", "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"),  # read by transformers
    ],
)
def test_fp8_values_without_scales_are_never_used_as_weights(name: str, weight: str, tmp_path: Path) -> None:
    """A config.json without its `quantization_config`, on every way of reading weights."""
    zoo.save(zoo.build(zoo.zoo_model(name)), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for dtype, said in ((FP8, "F8_E4M3 without a scale"), (torch.int8, "I8, expected floating-point numbers")):
        save_file(tensors | {weight: tensors[weight].to(dtype)}, file)
        with pytest.raises(ValueError, match=f"{re.escape(weight)} as {said}"):
            load(tmp_path)


def test_linears_and_experts_in_fp8(tmp_path: Path) -> None:
    """They take the products that `quantization` selects at load; one expert in FP8 beside others that are not is rejected."""
    zoo.save(zoo.build(zoo.zoo_model("mixtral")), tmp_path)
    online = load(tmp_path, quantization="fp8_per_channel")
    file = tmp_path / "model.safetensors"
    weights, linears, experts = load_file(file), {}, {}
    for name in [name for name in weights if "self_attn" in name or ".experts." in name]:
        value, scale = quantize_weight(weights[name], QuantScheme("channel"))
        (linears if "self_attn" in name else experts).update({name: value, name + "_scale": scale[:, None]})
    save_file(weights | linears | experts, file)
    change_config(tmp_path, FORMS["ct-channel"][0])
    assert torch.equal(logits_of(load(tmp_path)), logits_of(online))

    expert = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    save_file(weights | linears | {expert: experts[expert]}, file)
    with pytest.raises(ValueError, match="F8_E4M3 without a scale"):
        load(tmp_path)
    save_file(weights | linears | {name: experts[name] for name in (expert, expert + "_scale")}, file)
    with pytest.raises(ValueError, match=r"has no scale of .*experts.*unlike of other experts"):
        load(tmp_path)


_WIDE_EXPERTS = {
    "hidden_size": 192,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize("how", ["tensor", "channel", "block"])
def test_experts_in_fp8_are_merged_with_their_scales(how: Any, tmp_path: Path) -> None:
    """Experts come one by one; their activations keep their dtype, so tokens are those of the dequantized experts."""
    entry = zoo.ZooModel("wide", _WIDE_EXPERTS, base="qwen3_moe")
    model = zoo.build(entry)
    zoo.save(model, tmp_path)
    file, plain = tmp_path / "model.safetensors", tmp_path / "plain"
    tensors = load_file(file)
    means = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name], scale = quantize_weight(tensors[name], QuantScheme(how))
        means[name] = dequantized(tensors[name], scale)
        if how == "block":
            tensors[name + "_scale_inv"] = scale[:, : -(-means[name].shape[1] // GROUP)].contiguous()
        else:
            tensors[name + "_scale"] = scale[0].clone() if how == "tensor" else scale[:, None].contiguous()
    zoo.save(model, plain)
    save_file(means, plain / "model.safetensors")
    save_file(tensors, file)
    forms = {"tensor": "autofp8", "channel": "ct-channel", "block": "hf-block"}
    change_config(tmp_path, FORMS[forms[how]][0] | ({"activation_scheme": "dynamic"} if how == "tensor" else {}))
    report = Report(show=False)
    loaded = load(tmp_path, report=report)
    experts = loaded.module.model.model.layers[1].mlp.experts
    assert experts.gate_up_proj.dtype == experts.down_proj.dtype == FP8
    assert list(experts.gate_up_proj_scale.shape) == ([4, 2, 2] if how == "block" else [4, 256, 1])
    torch.testing.assert_close(logits_of(loaded), logits_of(load(plain)), rtol=1e-4, atol=1e-4)
    assert "experts of a mixture" not in report.select("quantized")[0]["excluded"]

    first = next(name for name in tensors if name.endswith(("weight_scale", "weight_scale_inv")))
    for scale, said in (
        (torch.full_like(tensors[first], torch.nan), "not all finite"),
        (torch.ones(3, 5), "expected one scale, or"),
    ):
        save_file(tensors | {first: scale}, file)
        with pytest.raises(ValueError, match=said):
            load(tmp_path)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_cut_fp8_experts_with_their_scales(expert_parallel: bool, tmp_path: Path) -> None:
    from tests.models.parallel.test_parallel import join_experts, part_of

    zoo.save(zoo.build(zoo.zoo_model("qwen3_moe")), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name], scale = quantize_weight(tensors[name], QuantScheme("channel"))
        tensors[name + "_scale"] = scale[:, None].contiguous()
    save_file(tensors, file)
    change_config(tmp_path, FORMS["ct-channel"][0])

    def values(model: Any, leaf: str) -> Tensor:
        experts = model.model.layers[1].mlp.experts
        return getattr(experts, leaf).float() * getattr(experts, f"{leaf}_scale")

    whole = load(tmp_path).module.model
    parts = [part_of(tmp_path, rank, expert_parallel=expert_parallel).module.model for rank in range(2)]
    for leaf in ("gate_up_proj", "down_proj"):
        joined = join_experts([values(part, leaf) for part in parts], leaf, expert_parallel)
        assert torch.equal(joined, values(whole, leaf)), leaf


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize(
    ("name", "tensor", "model_tensor"),
    [
        ("llama", "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.experts.gate_up_proj"),
    ],
)
def test_nan_in_fp8_weights_is_refused(name: str, tensor: str, model_tensor: str, byte: int, tmp_path: Path) -> None:
    """Kernels of experts in bfloat16 multiply both bytes as 480."""
    zoo.save(zoo.build(zoo.zoo_model(name)), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for each in [each for each in tensors if each.endswith("proj.weight")]:
        tensors[each], scale = quantize_weight(tensors[each], QuantScheme("channel"))
        tensors[each + "_scale"] = scale[:, None].contiguous()
    tensors[tensor].view(torch.uint8)[5, 7] = byte
    save_file(tensors, file)
    change_config(tmp_path, FORMS["ct-channel"][0])
    with pytest.raises(ValueError, match=f"has NaN in {re.escape(model_tensor)}, in bytes of e4m3"):
        load(tmp_path)


def test_ranks_refuse_scales_of_another_shape(tmp_path: Path) -> None:
    from tests.models.parallel.test_parallel import part_of

    write("hf-block", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj.weight_scale_inv"
    for scale in (torch.ones(0), torch.ones(2, 3)):
        save_file(load_file(file) | {name: scale}, file)
        with pytest.raises(ValueError, match=rf"down_proj has scales of shape {re.escape(str(list(scale.shape)))}"):
            part_of(tmp_path, 0)


def test_an_fp8_checkpoint_that_transformers_would_have_to_read(tmp_path: Path) -> None:
    entry = image_zoo.zoo_entry("qwen3_vl_moe-images")
    assert isinstance(entry, image_zoo.ImageZooModel)
    zoo.save(entry.build(), tmp_path)
    change_config(tmp_path, FORMS["ct-channel"][0])
    with pytest.raises(ValueError, match="needs conversion to the tensors of Qwen3VLMoeForConditionalGeneration"):
        load(tmp_path, images=True)


def test_a_tensor_setter_receives_every_tensor() -> None:
    """`weights.init_random_weights` hands each tensor to the placer, and none is left on the meta device."""
    loaded = load("demo", load_format="dummy", quantization="fp8")
    assert not any(tensor.is_meta for tensor in weights.loadable_tensors(loaded.module).values())
