"""Checkpoints with packed integers: every form against the dequantized model in transformers, parts of ranks, and damage."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.models.paged import paged_tokens
from tests.models.parallel.test_parallel import join_experts, part_of, prompts
from tests.models.weights.packings import CODES, FORMS, Form, change_config, tensors_and_values, write
from tests.ops.collectives.collective_cases import mirrored
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.engine.startup.compile_model import compile_model
from torchweave.models import load
from torchweave.models.load import model_facts
from torchweave.models.weights.int_linear import (
    MXFP4,
    NVFP4,
    Fp4Linear,
    Int8Linear,
    IntLinear,
    IntScheme,
    quantize_int_weight,
)
from torchweave.ops.quant.int_linear import dequantize_int
from torchweave.report import Report
from torchweave.verify import zoo

FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)


def values_of(module: Any) -> Tensor:
    """The numbers `[N, K]` of a linear's weight, columns as its inputs."""
    tensors = (module.weight, module.weight_scale, module.weight_zero)
    columns = dequantize_int(*tensors, module.in_features, module.group, torch.float32, module.row_scale)
    if module.input_order is None:
        return columns
    return torch.empty_like(columns).index_copy_(1, module.input_order.long(), columns)


@pytest.mark.parametrize("name", FORMS)
def test_a_checkpoint_is_read(name: str, tmp_path: Path) -> None:
    form, model = FORMS[name], zoo.build(zoo.zoo_model("llama"))
    values = write(model, form, tmp_path, zoo.save)
    report = Report(show=False)
    scheme = IntScheme(form.bits, max(form.group, 0), form.code)  # type: ignore[arg-type]
    assert model_facts(tmp_path).quantization == scheme.name
    loaded = load(tmp_path, torch.float32, report=report)
    assert loaded.quantization == scheme.name
    for weight, value in values.items():
        module = loaded.module.model.get_submodule(weight.removesuffix(".weight"))
        assert isinstance(module, IntLinear) and (module.weight_zero is None) == form.symmetric
        assert (module.input_order is not None) == form.ordered
        torch.testing.assert_close(values_of(module), value, rtol=2e-7, atol=0)  # 1 / (1 / s) of NVFP4 may round
        assert form.code == "nvfp4" or torch.equal(values_of(module), value), weight
    (event,) = report.select("quantized")
    assert event["source"] == "checkpoint" and event["linears"] == len(values) == 21
    progress = [event for event in report.select("progress") if event["title"] == "weights"][-1]
    assert progress["done"] == progress["total"] < 0.6 * sum(p.numel() * 4 for p in model.parameters())
    assert paged_tokens(loaded.module, prompts(), 6) == zoo.reference_tokens(model, prompts(), 6)


class RoundedTokens(nn.Module):
    """A linear of transformers' model whose input is rounded to 255 steps, token by token."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True) / 127.5
        return self.linear((x / step).round().clamp(-128, 127) * step)


def test_w8a8_rounds_tokens(tmp_path: Path) -> None:
    form, model = replace(FORMS["ct-int8-w8a8"], tokens=True), zoo.build(zoo.zoo_model("llama"))
    write(model, form, tmp_path, zoo.save)
    assert model_facts(tmp_path).quantization == "w8a8_int8"
    loaded = load(tmp_path, torch.float32)
    linears = [module for module in loaded.module.modules() if isinstance(module, IntLinear)]
    assert len(linears) == 21 and all(type(each) is Int8Linear for each in linears)
    for name, module in list(model.named_modules()):
        if name.endswith("proj"):
            model.set_submodule(name, RoundedTokens(module))
    assert paged_tokens(loaded.module, prompts(), 6) == zoo.reference_tokens(model, prompts(), 6)
    for name, module in loaded.module.model.named_modules():
        if isinstance(module, Int8Linear):
            x = torch.randn(5, module.in_features)
            torch.testing.assert_close(module(x), model.get_submodule(name)(x), rtol=1e-4, atol=1e-4)


class Fp4Activations(nn.Module):
    """A linear of transformers' model whose input is rounded to NVFP4 by the definition, with a scale of the whole tensor."""

    def __init__(self, linear: Any, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, 16))
        step = (blocks.abs().amax(-1) / 6 / self.scale).clamp(max=448).to(torch.float8_e4m3fn).float() * self.scale
        scaled = torch.where(step[..., None] > 0, blocks / step[..., None], 0.0)
        # Of two codes that are equally near, the even one comes first.
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        nearest = CODES[order][(scaled.abs()[..., None] - CODES[order]).abs().argmin(-1)]
        return self.linear((nearest * scaled.sign() * step[..., None]).flatten(-2))


@pytest.mark.parametrize(("name", "scale"), [("ct-nvfp4", 1 / 3), ("modelopt-nvfp4", 0.1)])
def test_w4a4_rounds_activations_where_it_is_requested(name: str, scale: float, tmp_path: Path) -> None:
    model = zoo.build(zoo.zoo_model("llama"))
    write(model, FORMS[name], tmp_path, zoo.save)
    loaded = load(tmp_path, torch.float32, quantization="nvfp4_w4a4")
    assert loaded.quantization == "nvfp4_w4a4"
    assert sum(type(module) is Fp4Linear for module in loaded.module.modules()) == 21
    in_16_bits = zoo.reference_tokens(model, prompts(), 6)
    for each, module in list(model.named_modules()):
        if each.endswith("proj"):
            model.set_submodule(each, Fp4Activations(module, scale))
    expected = zoo.reference_tokens(model, prompts(), 6)
    assert expected != in_16_bits, "rounding activations can be seen"
    assert paged_tokens(loaded.module, prompts(), 6) == expected


def test_w4a4_fuses_quantization_with_the_norm_behind_an_all_reduce(tmp_path: Path) -> None:
    entry = zoo.zoo_model("llama")
    model = zoo.build(replace(entry, options=entry.options | {"num_hidden_layers": 1}))
    write(model, FORMS["ct-nvfp4"], tmp_path, zoo.save)
    module = part_of(tmp_path, 0, quantization="nvfp4_w4a4").module
    report = Report(show=False)
    with mirrored("tp"):
        compiled = compile_model(module, FX, torch.device("cpu"), None, report)
        ids = torch.tensor([5, 6, 7])
        given = (ids, torch.arange(3), torch.tensor([2]))
        assert compiled(call_op, *given).equal(module(*given))
    fused = sum(
        each["matches"] * each["shared_by"] for each in report.select("pass") if each["name"] == "all_reduce_norm_fp4"
    )
    assert fused == 2, "both norms of the layer: ranks sum embeddings before the first"


def test_w4a4_needs_scales_of_activations(tmp_path: Path) -> None:
    model = zoo.build(zoo.zoo_model("llama"))
    for form in (FORMS["ct-mxfp4"], FORMS["awq"], None):
        zoo.save(model, tmp_path) if form is None else write(model, form, tmp_path, zoo.save)
        with pytest.raises(ValueError, match="no NVFP4 checkpoint with scales of FP4 activations"):
            load(tmp_path, torch.float32, quantization="nvfp4_w4a4")
    write(model, FORMS["ct-nvfp4"], tmp_path, zoo.save)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(each for each in tensors if each.endswith("input_global_scale"))
    save_file(tensors | {name: torch.tensor([0.0])}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has inf as input scale of .*expected a finite number above 0"):
        load(tmp_path, torch.float32, quantization="nvfp4_w4a4")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks .*input_global_scale"):
        load(tmp_path, torch.float32, quantization="nvfp4_w4a4")
    load(tmp_path, torch.float32)


@pytest.mark.parametrize("name", ["qwen2", "llama-tied", "phi3", "gemma2"])
@pytest.mark.parametrize("form", ["ct-int4-group-asymmetric", "awq", "gptq-int4-desc-act", "ct-nvfp4"])
def test_other_models(form: str, name: str, tmp_path: Path) -> None:
    """Biases, a tied head, projections that are one linear, other norms."""
    model = zoo.build(zoo.zoo_model(name))
    write(model, FORMS[form], tmp_path, zoo.save)
    loaded = load(tmp_path, torch.float32)
    assert sum(isinstance(module, IntLinear) for module in loaded.module.modules()) >= 12
    assert paged_tokens(loaded.module, prompts(), 6) == zoo.reference_tokens(model, prompts(), 6)


def test_parts_of_a_weight_in_several_files(tmp_path: Path) -> None:
    model = zoo.build(zoo.zoo_model("llama"))
    values = write(model, FORMS["gptq-int4"], tmp_path, zoo.save)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for number in range(3):
        part = {name: tensors[name] for name in sorted(tensors)[number::3]}
        save_file(part, tmp_path / f"model-{number + 1:05}-of-00003.safetensors")
    loaded = load(tmp_path, torch.float32)
    weight, value = next(iter(values.items()))
    assert torch.equal(values_of(loaded.module.model.get_submodule(weight.removesuffix(".weight"))), value)


# -- parts of ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FORMS if not FORMS[name].ordered])
def test_ranks_cut_packed_weights(name: str, tmp_path: Path) -> None:
    entry = replace(zoo.zoo_model("llama"), options={"intermediate_size": 128})
    values = write(zoo.build(entry), FORMS[name], tmp_path, zoo.save)
    reports = [Report(show=False) for _ in range(2)]
    parts = [part_of(tmp_path, rank, report=reports[rank]).module.model for rank in range(2)]
    for leaf, dim in (("self_attn.q_proj", 0), ("self_attn.v_proj", 0), ("self_attn.o_proj", 1), ("mlp.down_proj", 1)):
        owner = f"model.layers.1.{leaf}"
        got = torch.cat([values_of(part.get_submodule(owner)) for part in parts], dim)
        torch.testing.assert_close(got, values[f"{owner}.weight"], rtol=2e-7, atol=0)
    bytes_read = [[e for e in report.select("progress") if e["title"] == "weights"][-1]["total"] for report in reports]
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert bytes_read[0] == bytes_read[1] < 0.7 * stored


def test_ranks_that_would_split_a_group_are_refused(tmp_path: Path) -> None:
    write(zoo.build(zoo.zoo_model("llama")), FORMS["awq"], tmp_path, zoo.save)
    with pytest.raises(
        ValueError, match=r"down_proj.weight has one scale per 32 inputs, and the parts of ranks would split"
    ):
        part_of(tmp_path, 0)


def test_ranks_that_would_split_ordered_groups_are_refused(tmp_path: Path) -> None:
    entry = replace(zoo.zoo_model("llama"), options={"intermediate_size": 128})
    write(zoo.build(entry), FORMS["gptq-int4-desc-act"], tmp_path, zoo.save)
    with pytest.raises(ValueError, match="order of their activations"):
        part_of(tmp_path, 0)


# -- damage, and what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("awq", {"qzeros": None}, "lacks model.layers.1.mlp.up_proj.qzeros"),
        ("ct-int4-group", {"weight_packed": None}, "lacks model.layers.1.mlp.up_proj.weight_packed"),
        ("gptq-int4", {"scales": torch.ones(1, 96).half()}, r"scales of shape \[1, 96\], expected \[2, 96\] for int4_g32"),
        ("gptq-int4", {"qweight": torch.ones(8, 95, dtype=torch.int32)}, "up_proj.scales of shape"),
        ("gptq-int4", {"qweight": torch.ones(8, 96)}, "up_proj.qweight as F32, expected I32"),
        ("awq", {"scales": torch.full((2, 96), torch.nan).half()}, "up_proj.weight that are not all finite"),
        ("ct-int4-group", {"weight_shape": torch.tensor([96, 99])}, r"=\[96, 99\] beside packed weights for \[96, 64\]"),
        ("ct-int4-group", {"weight_zero_point": torch.zeros(12, 2, dtype=torch.int32)}, "declares symmetric weights"),
        ("ct-int4-group", {"weight": torch.ones(96, 64)}, r"up_proj.weight as F32 beside model.layers.1.mlp.up_proj.weight_"),
        ("gptq-int4-desc-act", {"g_idx": torch.zeros(64, dtype=torch.int32)}, "groups of model.layers.1.mlp.up_proj.weight"),
        ("ct-int8-w8a8", {"weight": torch.ones(96, 64)}, "up_proj.weight as F32 beside model.layers.1.mlp.up_proj.weight_scale"),
        ("gptq-int4", {"bias": torch.ones(96)}, "up_proj.bias, which LlamaForCausalLM does not use"),
        ("ct-nvfp4", {"weight_global_scale": None}, "lacks model.layers.1.mlp.up_proj.weight_global_scale"),
        ("ct-nvfp4", {"weight_global_scale": torch.zeros(1)}, "up_proj.weight that are not all finite"),
        ("ct-nvfp4", {"weight_scale": torch.ones(96, 4)}, r"weight_scale as F32, expected F8_E4M3"),
        ("ct-mxfp4", {"weight_scale": torch.full((96, 2), 255, dtype=torch.uint8)}, "up_proj.weight that are not all finite"),
        ("ct-mxfp4", {"weight_scale": torch.zeros(96, 4, dtype=torch.uint8)}, r"expected \[96, 2\] for mxfp4"),
        ("modelopt-nvfp4", {"weight_scale_2": torch.ones(96)}, r"weight_scale_2 of shape \[96\], expected \[\] for nvfp4"),
    ],
)  # fmt: skip
def test_damage_is_one_sentence(form: str, change: dict[str, Tensor | None], said: str, tmp_path: Path) -> None:
    write(zoo.build(zoo.zoo_model("llama")), FORMS[form], tmp_path, zoo.save)
    file, owner = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = load_file(file) | {f"{owner}.{leaf}": tensor for leaf, tensor in change.items() if tensor is not None}
    save_file(
        {name: each for name, each in tensors.items() if change.get(name.removeprefix(f"{owner}."), 0) is not None},
        file,
    )
    with pytest.raises(ValueError, match=said) as caught:
        load(tmp_path)
    assert str(caught.value).count(". ") <= 1 and "\n" not in str(caught.value)


def test_a_cut_file_is_one_sentence(tmp_path: Path) -> None:
    write(zoo.build(zoo.zoo_model("llama")), FORMS["awq"], tmp_path, zoo.save)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="damaged or cut short"):
        load(tmp_path)


def test_another_config_than_the_weights(tmp_path: Path) -> None:
    model = zoo.build(zoo.zoo_model("llama"))
    write(model, FORMS["gptq-int4"], tmp_path, zoo.save)
    change_config(tmp_path, FORMS["gptq-int8"].config)
    with pytest.raises(ValueError, match="expected"):
        load(tmp_path)
    change_config(tmp_path, FORMS["ct-int4-group"].config)
    with pytest.raises(ValueError, match=r"has no packed weights, though its config\.json declares compressed-tensors"):
        load(tmp_path)
    change_config(tmp_path, {})
    with pytest.raises(ValueError, match=r"by unknown|lacks"):
        load(tmp_path)
    change_config(tmp_path, FORMS["gptq-int4"].config)
    with pytest.raises(ValueError, match="quantization=int4 contradicts"):
        load(tmp_path, quantization="int4")


def test_biases_of_zeros_beside_linears_without_one(tmp_path: Path) -> None:
    """AutoGPTQ stores them for every linear."""
    model = zoo.build(zoo.zoo_model("llama"))
    write(model, FORMS["gptq-int4"], tmp_path, zoo.save)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.1.mlp.up_proj.bias": torch.zeros(96).half()}, file)
    assert paged_tokens(load(tmp_path, torch.float32).module, prompts(), 3) == zoo.reference_tokens(model, prompts(), 3)


def test_linears_that_a_checkpoint_ignores_stay(tmp_path: Path) -> None:
    model = zoo.build(zoo.zoo_model("llama"))
    kept = model.model.layers[1].mlp.up_proj.weight.clone()
    write(model, FORMS["awq"], tmp_path, zoo.save)
    file, owner = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(owner)}
    save_file(tensors | {f"{owner}.weight": kept}, file)
    model.model.layers[1].mlp.up_proj.weight.data.copy_(kept)
    report = Report(show=False)
    loaded = load(tmp_path, torch.float32, report=report)
    assert type(loaded.module.model.get_submodule(owner)) is nn.Linear
    assert report.select("quantized")[0]["excluded"]["not quantized in the checkpoint"] == [
        "model.layers.*.mlp.up_proj"
    ]
    assert paged_tokens(loaded.module, prompts(), 3) == zoo.reference_tokens(model, prompts(), 3)


def change(form: str, **settings: Any) -> dict[str, Any]:
    return FORMS[form].config | settings


def weights_of(**settings: Any) -> dict[str, Any]:
    """compressed-tensors with other settings of its weights."""
    config = FORMS["ct-int4-group"].config
    config["config_groups"]["group_0"]["weights"] |= settings
    return config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (change("awq", version="gemv"), "by awq in the version gemv to 4 bits"),
        (change("awq", bits=3), "to 3 bits"),
        (change("awq", zero_point=False), "zero_point=False"),
        (change("awq", group_size="128"), "by awq in groups of 128"),
        (change("gptq-int4", bits=3), "by gptq in the format gptq to 3 bits"),
        (change("gptq-int4", checkpoint_format="marlin"), "in the format marlin"),
        (change("gptq-int4", dynamic={"+:.*down.*": {"bits": 8}}), r"other settings for '\+:\.\*down"),
        (change("gptq-int4", dynamic=[1]), "dynamic=.1.: expected a JSON object"),
        (weights_of(num_bits=2), "to int2 by group"),
        (change("ct-int4-group", format="int-quantized"), "in the format int-quantized"),
        (weights_of(strategy="tensor"), "to int4 by tensor"),
        (weights_of(group_size=None), "in groups of None"),
        (change("ct-int4-group", format="marlin-24"), "in the format marlin-24"),
        (change("ct-nvfp4", format="mxfp4-pack-quantized"), "to float4 by tensor_group in groups of 16 in the format mxfp4"),
        (change("modelopt-nvfp4", quant_algo="W4A8_AWQ"), "by modelopt with the algorithm W4A8_AWQ"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_by_name(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    zoo.zoo_model("llama").config().save_pretrained(tmp_path)
    change_config(tmp_path, config)
    with pytest.raises(ValueError, match=said):
        load(tmp_path, load_format="dummy")


# -- experts -----------------------------------------------------------------------------------------------------------


def write_mixture(form: Form, folder: Path, name: str = "qwen3_moe") -> tuple[Any, dict[str, Tensor]]:
    """Save a mixture with packed linears and experts; returns transformers' model of their numbers, and those by tensor."""
    zoo.save(zoo.build(zoo.zoo_model(name)), folder)
    file, values = folder / "model.safetensors", {}
    tensors = load_file(file)
    for weight in [each for each in tensors if each.endswith("proj.weight") or ".experts." in each]:
        made = tensors_and_values(weight.removesuffix(".weight"), tensors.pop(weight).float(), form)
        tensors |= made[0]
        values[weight] = made[1]
    plain = folder / "plain"
    shutil.copytree(folder, plain)
    save_file(load_file(file) | values, plain / "model.safetensors")
    save_file(tensors, file)
    change_config(folder, form.config)
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager"), values


def expert_values(model: Any, layer: int, leaf: str) -> Tensor:
    """The numbers `[E, rows, width]` of a rank's experts."""
    block = model.model.layers[layer].mlp.experts
    w, scale, zero, rows = (getattr(block, f"{leaf}{kind}") for kind in ("", "_scale", "_zero", "_row_scale"))
    group = block.weight_group
    width = block.down_proj.shape[1] if leaf == "gate_up_proj" else block.gate_up_proj.shape[1] // 2
    parts = (
        dequantize_int(w[e], scale[e], None if zero is None else zero[e], width, group or width, torch.float32, each)
        for e, each in enumerate([None] * len(w) if rows is None else rows)
    )
    return torch.stack(list(parts))


@pytest.mark.parametrize("form", ["ct-int4-group", "awq", "gptq-int4", "gptq-int8", "ct-nvfp4"])
def test_packed_experts(form: str, tmp_path: Path) -> None:
    model, values = write_mixture(FORMS[form], tmp_path)
    report = Report(show=False)
    loaded = load(tmp_path, torch.float32, report=report)
    got, owner = loaded.module.model, "model.layers.1.mlp.experts"
    up = [torch.cat([values[f"{owner}.{e}.{leaf}.weight"] for leaf in ("gate_proj", "up_proj")]) for e in range(4)]
    torch.testing.assert_close(expert_values(got, 1, "gate_up_proj")[:4], torch.stack(up), rtol=2e-7, atol=0)
    assert "experts of a mixture" not in report.select("quantized")[0]["excluded"]
    assert loaded.weight_bytes < 0.6 * sum(p.numel() * 4 for p in model.parameters())
    assert paged_tokens(loaded.module, prompts(), 6) == zoo.reference_tokens(model, prompts(), 6)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_cut_packed_experts(expert_parallel: bool, tmp_path: Path) -> None:
    write_mixture(FORMS["ct-int4-group-asymmetric" if expert_parallel else "ct-int4-channel-asymmetric"], tmp_path)
    whole = load(tmp_path, torch.float32).module.model
    parts = [part_of(tmp_path, rank, expert_parallel=expert_parallel).module.model for rank in range(2)]
    for leaf in ("gate_up_proj", "down_proj"):
        joined = join_experts([expert_values(part, 1, leaf) for part in parts], leaf, expert_parallel)
        assert torch.equal(joined, expert_values(whole, 1, leaf)), leaf


def test_experts_that_are_refused(tmp_path: Path) -> None:
    write_mixture(FORMS["gptq-int4-desc-act"], tmp_path / "ordered")
    with pytest.raises(ValueError, match="order of their activations, which is not supported for experts"):
        load(tmp_path / "ordered")
    _, values = write_mixture(FORMS["awq"], tmp_path / "mixed")
    file, owner = tmp_path / "mixed" / "model.safetensors", "model.layers.1.mlp.experts.2.up_proj"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(owner)}
    save_file(tensors | {f"{owner}.weight": values[f"{owner}.weight"]}, file)
    with pytest.raises(
        ValueError, match=r"packed beside model.layers.1.mlp.experts.2.up_proj.weight as F32.*all of its experts"
    ):
        load(tmp_path / "mixed")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"lacks 1 of the .* matrices of model.layers.1.mlp.experts.gate_up_proj"):
        load(tmp_path / "mixed")


# -- at load -----------------------------------------------------------------------------------------------------------


def test_weights_are_rounded_to_the_nearest_of_their_group() -> None:
    weight = torch.randn(16, 300) * torch.logspace(-2, 2, 16)[:, None]
    packed = quantize_int_weight(weight, IntScheme())
    values = dequantize_int(packed.w, packed.scale, packed.zero, 300, packed.group, torch.float32)
    scale = packed.scale.repeat_interleave(128, 1)[:, :300]
    assert packed.scale.shape == (16, 3)
    inside = weight <= 7 * scale  # the largest positive number of a group is one step too large
    assert bool(((values - weight).abs() <= scale * 0.5001)[inside].all())
    assert bool(((values - weight).abs() <= scale * 0.51).all())


@pytest.mark.parametrize("scheme", [MXFP4, NVFP4], ids=lambda scheme: scheme.code)
def test_weights_are_rounded_to_e2m1(scheme: IntScheme) -> None:
    weight = torch.randn(16, 320) * torch.logspace(-2, 0, 16)[:, None]
    packed = quantize_int_weight(weight, scheme)
    values = dequantize_int(packed.w, packed.scale, None, 320, packed.group, torch.float32, packed.row_scale)
    assert packed.scale.shape == (16, 320 // scheme.group)
    groups, error = weight.unflatten(1, (-1, scheme.group)), (values - weight).abs().unflatten(1, (-1, scheme.group))
    size = groups.abs().amax(2, keepdim=True)
    assert bool((error <= size * (0.26 if scheme is MXFP4 else 0.18)).all()), (
        "half of the distance of 4 and 6, or of 6 and 8"
    )
    padded = quantize_int_weight(weight[:, :296], scheme)
    assert padded.w.shape == (16, 48) and padded.scale.shape == (16, -(-296 // scheme.group))


@pytest.mark.parametrize(("quantization", "name"), [("int4", "int4_g128"), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4")])
def test_linears_are_quantised_at_load(quantization: str, name: str, tmp_path: Path) -> None:
    zoo.save(zoo.build(zoo.zoo_model("llama")), tmp_path)
    report = Report(show=False)
    plain, loaded = load(tmp_path), load(tmp_path, quantization=quantization, report=report)
    assert loaded.quantization == name and loaded.weight_bytes < plain.weight_bytes
    (event,) = report.select("quantized")
    assert event["linears"] == 21 and event["source"] == "weights as they were loaded"
    assert type(loaded.module.model.lm_head) is nn.Linear
    ids = torch.arange(3, 33)
    with torch.no_grad():
        one, two = (each.module(ids, torch.arange(30), torch.arange(30)) for each in (plain, loaded))
    assert 1e-3 < (one - two).norm() / one.norm() < 0.6, "random weights hide nothing"
    dummy = load(zoo.zoo_model("llama").config().to_dict(), load_format="dummy", quantization=quantization)
    assert isinstance(dummy.module.model.model.layers[0].mlp.up_proj, IntLinear)


def test_forms_are_documented() -> None:
    """docs/how-to/quantize.md lists every form that is tested here."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "quantize.md").read_text()
    assert [name for name in FORMS if f"`{name}`" not in page] == []


def test_forms_are_twelve() -> None:
    assert (
        len(
            {
                (form.method, form.bits, form.group, form.symmetric, form.ordered, form.version)
                for form in FORMS.values()
            }
        )
        >= 12
    )
    assert Form("ct").config["config_groups"]
