"""Other forms of quantized checkpoints: Model Optimizer's, FBGEMM's, weights of FP8 alone, bitsandbytes, mixtures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.paged import paged_tokens
from tests.models.weights.packings import CODES, FORMS, change_config, tensors_and_values
from torchweave import LLM, SamplingParams
from torchweave.models import load
from torchweave.models.load import model_facts
from torchweave.models.weights.int_linear import Fp4Linear, IntLinear
from torchweave.models.weights.quantize import Fp8Linear, QuantScheme, quantize_weight
from torchweave.report import Report
from torchweave.verify import zoo

PROMPTS = [[1, 5, 9], list(range(3, 30))]
GIVEN = 0.03
Packed = tuple[dict[str, Tensor], Tensor]
"""What a checkpoint stores of a linear, and the numbers that it stands for."""


def write(
    folder: Path, pack: Callable[[str, Tensor], Packed | None], config: Any = None
) -> tuple[Any, dict[str, Tensor]]:
    """A tiny checkpoint whose projections are packed; the model with the numbers that they stand for, and these."""
    model, values = zoo.build(zoo.zoo_model("llama")), {}
    zoo.save(model, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        owner = name.removesuffix(".weight")
        packed = pack(owner, tensors[name].float())
        if packed is not None:
            del tensors[name]
            tensors |= packed[0]
            values[name] = packed[1]
            model.get_parameter(name).data.copy_(packed[1])
    save_file({name: each.clone() for name, each in tensors.items()}, file)
    if config is not None:
        change_config(folder, config)
    return model, values


def fp8(owner: str, weight: Tensor) -> Packed:
    q, scale = quantize_weight(weight, QuantScheme("channel"))
    return {f"{owner}.weight": q, f"{owner}.weight_scale": scale[:, None]}, q.float() * scale[:, None]


def fp8_static(owner: str, weight: Tensor) -> Packed:
    q, scale = quantize_weight(weight, QuantScheme("tensor"))
    stored = {
        f"{owner}.weight": q,
        f"{owner}.weight_scale": scale[0].clone(),
        f"{owner}.input_scale": torch.tensor(GIVEN),
    }
    return stored, q.float() * scale[0]


def assert_numbers(loaded: Any, values: dict[str, Tensor], kind: type[nn.Module] = nn.Linear) -> None:
    assert values
    for name, value in values.items():
        module = loaded.module.model.get_submodule(name.removesuffix(".weight"))
        assert type(module) is kind
        weight = module.weight.float() * module.weight_scale[:, None] if kind is Fp8Linear else module.weight
        torch.testing.assert_close(weight, value, rtol=1e-6, atol=0)


# -- Model Optimizer and FBGEMM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["file", "config", "nested"])
def test_the_file_of_model_optimizer(where: str, tmp_path: Path) -> None:
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    whole = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": inner}
    config = {"file": None, "config": {"quant_method": "modelopt", **inner}, "nested": whole}[where]
    _, values = write(tmp_path, fp8_static, config)
    if where == "file":
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(whole))
    facts = model_facts(tmp_path)
    assert (facts.quantization, facts.kv_cache_dtype) == ("fp8_per_tensor_static", "fp8_e4m3")
    loaded = load(tmp_path)
    assert_numbers(loaded, values, Fp8Linear)
    assert float(loaded.module.model.model.layers[0].mlp.up_proj.input_scale) == pytest.approx(GIVEN)


@pytest.mark.parametrize("content", [{"quantization": {"quant_algo": None}}, {"quantization": {}}, {}], ids=str)
def test_a_file_of_model_optimizer_without_an_algorithm(content: Any, tmp_path: Path) -> None:
    zoo.save(zoo.build(zoo.zoo_model("llama")), tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    if content.get("quantization") == {}:
        with pytest.raises(ValueError, match="algorithm None"):
            load(tmp_path)
    else:
        assert load(tmp_path).quantization is None


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, {}),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, {"input_scale_ub": torch.tensor([1200.0])}),
    ],
    ids=lambda each: str(each.get("quant_method")),
)
def test_fp8_by_channel(config: Any, extra: dict[str, Tensor], tmp_path: Path) -> None:
    def pack(owner: str, weight: Tensor) -> Packed:
        stored, numbers = fp8(owner, weight)
        return stored | {f"{owner}.{leaf}": each.clone() for leaf, each in extra.items()}, numbers

    _, values = write(tmp_path, pack, config)
    loaded = load(tmp_path)
    assert loaded.quantization == "fp8_per_channel"
    assert_numbers(loaded, values, Fp8Linear)


def test_blocks_of_model_optimizer_keep_their_dimensions(tmp_path: Path) -> None:
    def pack(owner: str, weight: Tensor) -> Packed:
        q, _ = quantize_weight(weight, QuantScheme("block"))
        blocks = [-(-length // 128) for length in weight.shape]
        scale = torch.rand(blocks[0], 1, blocks[1], 1) + 0.5
        by_row = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return {f"{owner}.weight": q, f"{owner}.weight_scale": scale}, q.float() * by_row[: q.shape[0], : q.shape[1]]

    _, values = write(tmp_path, pack, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"})
    loaded = load(tmp_path)
    assert loaded.quantization == "fp8_per_block"
    for name, value in values.items():
        module = loaded.module.model.get_submodule(name.removesuffix(".weight"))
        rows = module.weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(module.weight.float() * rows[: value.shape[0], : value.shape[1]], value)


# -- forms that are dequantized ----------------------------------------------------------------------------------------


def weights_only(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_fp8_weights_whose_activations_keep_16_bits(strategy: str, tmp_path: Path) -> None:
    def pack(owner: str, weight: Tensor) -> Packed:
        if strategy == "channel":
            return fp8(owner, weight)
        q, scale = quantize_weight(weight, QuantScheme("tensor"))
        stored = {f"{owner}.weight": q, f"{owner}.weight_scale": scale[:1] if strategy == "tensor" else scale[:1, None]}
        return stored, q.float() * scale[0]

    model, values = write(tmp_path, pack, weights_only(strategy, block_structure=[128, 128]))
    report = Report(show=False)
    loaded = load(tmp_path, torch.float32, report=report)
    assert loaded.quantization == "fp8_weights_only"
    assert report.select("dequantized")[0]["weights"] == len(values)
    assert_numbers(loaded, values)
    assert paged_tokens(loaded.module, PROMPTS, 6) == zoo.reference_tokens(model, PROMPTS, 6)


NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""bitsandbytes' codes."""
FP4 = [0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25]


def bitsandbytes_4bit(kind: str, nested: bool, block: int = 64) -> Callable[[str, Tensor], Packed]:
    """Written element by element as bitsandbytes packs: blocks of the flattened weight, two numbers a byte."""
    codes = torch.tensor(NF4 if kind == "nf4" else FP4 + [-each for each in FP4])

    def pack(owner: str, weight: Tensor) -> Packed:
        blocks = weight.flatten().split(block)
        absmax = torch.stack([each.abs().max() for each in blocks])
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "float32",
            "shape": list(weight.shape),
        }
        stored = {f"{owner}.weight.quant_map": codes}
        if nested:
            offset = float(absmax.mean())
            table = torch.linspace(-1, 1, 256)
            outer = torch.stack([each.abs().max() for each in (absmax - offset).split(16)])
            by = outer.repeat_interleave(16)[: len(absmax)]
            indices = ((absmax - offset) / by)[:, None].sub(table).abs().argmin(1)
            stored |= {
                f"{owner}.weight.absmax": indices.to(torch.uint8),
                f"{owner}.weight.nested_absmax": outer,
                f"{owner}.weight.nested_quant_map": table,
            }
            state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
            absmax = table[indices] * by + offset
        else:
            stored[f"{owner}.weight.absmax"] = absmax
        numbers = torch.cat(
            [(each / by)[:, None].sub(codes).abs().argmin(1) for each, by in zip(blocks, absmax, strict=True)]
        )
        values = torch.cat([codes[part] * by for part, by in zip(numbers.split(block), absmax, strict=True)])
        stored[f"{owner}.weight"] = (numbers[0::2] << 4 | numbers[1::2]).to(torch.uint8)[:, None]
        text = json.dumps(state).encode()
        stored[f"{owner}.weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        return stored, values.view(weight.shape)

    return pack


def bitsandbytes_8bit(owner: str, weight: Tensor) -> Packed:
    absmax = weight.abs().amax(1)
    q = (weight / absmax[:, None] * 127).round().to(torch.int8)
    stored = {
        f"{owner}.weight": q,
        f"{owner}.SCB": absmax,
        f"{owner}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return stored, q.float() * (absmax / 127)[:, None]


def in_4_bits(kind: str, nested: bool) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
    }


@pytest.mark.parametrize("form", ["nf4", "nf4-nested", "fp4", "int8"])
def test_bitsandbytes(form: str, tmp_path: Path) -> None:
    kind, nested = form.partition("-")[0], "nested" in form
    if form == "int8":
        pack, config = bitsandbytes_8bit, {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    else:
        pack, config = bitsandbytes_4bit(kind, nested), in_4_bits(kind, nested)
    left = "model.layers.1.mlp.up_proj"  # llm_int8_skip_modules
    model, values = write(tmp_path, lambda owner, weight: None if owner == left else pack(owner, weight), config)
    loaded = load(tmp_path, torch.float32)
    assert loaded.quantization == f"bitsandbytes_{kind}"
    assert_numbers(loaded, values)
    assert paged_tokens(loaded.module, PROMPTS, 6) == zoo.reference_tokens(model, PROMPTS, 6)


STATE = "quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("leaf", "change", "said"),
    [
        ("absmax", None, "do not fit together"),
        ("absmax", lambda _: torch.ones(2), "do not fit together"),
        ("absmax", lambda absmax: absmax * torch.inf, "not finite"),
        (STATE, lambda _: torch.zeros(9, dtype=torch.uint8), "quant_state"),
        (STATE, None, "mlp.up_proj.weight"),
    ],
)
def test_damaged_weights_of_bitsandbytes(leaf: str, change: Any, said: str, tmp_path: Path) -> None:
    write(tmp_path, bitsandbytes_4bit("nf4", False), in_4_bits("nf4", False))
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.weight.{leaf}"
    old = tensors.pop(name)
    if change is not None:
        tensors[name] = change(old)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


def test_weights_that_a_config_only_declares(tmp_path: Path) -> None:
    zoo.save(zoo.build(zoo.zoo_model("llama")), tmp_path)
    change_config(tmp_path, in_4_bits("nf4", False))
    with pytest.raises(ValueError, match="has no weights of bitsandbytes_nf4"):
        load(tmp_path)


def test_ranks_keep_their_parts_of_dequantized_weights() -> None:
    from torchweave.models.weights.methods.dequantized import FP8_WEIGHTS_ONLY, DequantizedCheckpoint
    from torchweave.models.weights.read import CheckpointTensor
    from torchweave.models.weights.shards import TensorShard

    stored, numbers = fp8("a", torch.randn(32, 16))
    leaves = ("weight", "weight_scale")
    parts = {leaf: CheckpointTensor(Path("f"), f"a.{leaf}", (32, 16), 0, "") for leaf in leaves}
    shards, renamed = {"model.a.weight": TensorShard((32, 16), 1, ((8, 16),))}, {"a.weight": "model.a.weight"}
    checkpoint = DequantizedCheckpoint(FP8_WEIGHTS_ONLY, {"a.weight": parts})
    reader = checkpoint.reader(None, {}, renamed, shards)  # type: ignore[arg-type]
    cpu = torch.device("cpu")
    assert reader.add("a.weight", _Slice(stored["a.weight"]), torch.float32, cpu) is None
    part = reader.add("a.weight_scale", _Slice(stored["a.weight_scale"]), torch.float32, cpu)
    assert part is not None and torch.equal(part, numbers[:, 8:])


class _Slice:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


# -- several forms in one checkpoint -----------------------------------------------------------------------------------

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


def groups(*entries: tuple[list[str], dict[str, Any], Any, str]) -> dict[str, Any]:
    listed = {
        f"group_{number}": {"targets": targets, "weights": weights, "input_activations": inputs, "format": form}
        for number, (targets, weights, inputs, form) in enumerate(entries)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": listed,
        "ignore": ["lm_head"],
    }


def is_down(owner: str) -> bool:
    return owner.endswith("down_proj")


def test_int4_beside_fp8(tmp_path: Path) -> None:
    config = groups(
        (["re:.*down_proj"], FP8, TOKENS, "float-quantized"),
        (["re:.*(q|k|v|o|gate|up)_proj"], INT4, None, "pack-quantized"),
    )
    form = FORMS["ct-int4-group"]
    _, values = write(
        tmp_path, lambda owner, w: fp8(owner, w) if is_down(owner) else tensors_and_values(owner, w, form), config
    )
    assert model_facts(tmp_path).quantization == "fp8_per_channel+int4_g32"
    report = Report(show=False)
    loaded = load(tmp_path, torch.float32, report=report, quantization="fp8_per_channel+int4_g32")
    down = {name: each for name, each in values.items() if is_down(name.removesuffix(".weight"))}
    assert_numbers(loaded, down, Fp8Linear)
    packed = [module for module in loaded.module.modules() if isinstance(module, IntLinear)]
    assert len(packed) == len(values) - len(down)
    assert {event["scheme"]: event["linears"] for event in report.select("quantized")} == {
        "fp8_per_channel": len(down),
        "int4_g32": len(packed),
    }


def test_int4_beside_int8_of_which_one_group_names_the_class(tmp_path: Path) -> None:
    """The expression decides over the class, in whatever order; a linear in 16 bits that the class matches stays."""
    config = groups((["Linear"], INT4, None, "pack-quantized"), (["re:.*down_proj$"], INT8, None, "pack-quantized"))
    forms = {True: FORMS["ct-int8-channel"], False: FORMS["ct-int4-group"]}
    left = "model.layers.0.self_attn.o_proj"
    model, values = write(
        tmp_path,
        lambda owner, w: None if owner == left else tensors_and_values(owner, w, forms[is_down(owner)]),
        config,
    )
    loaded = load(tmp_path, torch.float32)
    assert loaded.quantization == "int4_g32+int8_per_channel"
    bits = {name: loaded.module.model.get_submodule(name.removesuffix(".weight")).weight.dtype for name in values}
    assert all((dtype == torch.int8) == is_down(name.removesuffix(".weight")) for name, dtype in bits.items())
    assert paged_tokens(loaded.module, PROMPTS, 6) == zoo.reference_tokens(model, PROMPTS, 6)


def test_mixed_precision_of_model_optimizer(tmp_path: Path) -> None:
    nvfp4, listed = FORMS["modelopt-nvfp4"], {}

    def pack(owner: str, weight: Tensor) -> Packed:
        listed[owner] = {"quant_algo": "FP8" if is_down(owner) else "NVFP4"}
        return fp8_static(owner, weight) if is_down(owner) else tensors_and_values(owner, weight, nvfp4)

    _, values = write(tmp_path, pack)
    change_config(tmp_path, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed})
    loaded = load(tmp_path, torch.float32)
    assert loaded.quantization == "fp8_per_tensor_static+nvfp4"
    assert_numbers(loaded, {name: each for name, each in values.items() if "down_proj" in name}, Fp8Linear)
    assert sum(isinstance(module, IntLinear) for module in loaded.module.modules()) == 18
    assert CODES.numel() == 8


def test_a_mixture_of_which_the_checkpoint_has_nothing(tmp_path: Path) -> None:
    config = groups((["re:.*down_proj"], FP8, TOKENS, ""), (["re:.*up_proj"], INT4, None, "pack-quantized"))
    zoo.save(zoo.build(zoo.zoo_model("llama")), tmp_path)
    change_config(tmp_path, config)
    with pytest.raises(ValueError, match="has no quantized weights"):
        load(tmp_path)


def test_a_group_of_a_mixture_that_is_not_supported(tmp_path: Path) -> None:
    config = groups((["re:.*down_proj"], FP8, TOKENS, ""), (["Linear"], INT4 | {"num_bits": 3}, None, "pack-quantized"))
    zoo.save(zoo.build(zoo.zoo_model("llama")), tmp_path)
    change_config(tmp_path, config)
    with pytest.raises(ValueError, match="int3"):
        load(tmp_path)


# -- options of an engine ----------------------------------------------------------------------------------------------


def test_fp4_activations_are_taken_by_the_options_of_an_engine(tmp_path: Path) -> None:
    form = FORMS["modelopt-nvfp4"]
    write(tmp_path, lambda owner, weight: tensors_and_values(owner, weight, form), form.config)
    options: dict[str, Any] = {"enforce_eager": True, "device": "cpu", "num_kv_blocks": 16, "max_batch_size": 2}
    with LLM(str(tmp_path), quantization="nvfp4_w4a4", max_num_tokens=32, **options) as llm:
        assert llm.plan.quantization == "nvfp4_w4a4"
        assert sum(type(each) is Fp4Linear for each in llm.engine.loaded.module.modules()) == 21
        (answer,) = llm.generate([{"prompt_token_ids": [1, 5, 9]}], SamplingParams(temperature=0.0, max_tokens=2))
        assert len(answer.outputs[0].token_ids) == 2
    with pytest.raises(ValueError, match="contradicts"):
        LLM(str(tmp_path), quantization="int4", **options)
