"""Image-text models with quantized weights; the oracle is transformers' eager model with the numbers that the weights stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.weights.packings import FORMS, change_config, write
from tests.models.weights.test_quantize import BLOCKS, Reference
from torchweave import LLM, SamplingParams
from torchweave.config import EngineConfig, TorchCompileConfig
from torchweave.engine.startup.image_encoder import compile_layers
from torchweave.images import EncodedPrompt
from torchweave.models.load import LoadedModel, load
from torchweave.models.multimodal.image_encoder import ImageEncoder
from torchweave.models.multimodal.image_step import ImageDecoderStep
from torchweave.models.multimodal.support import decoder_of
from torchweave.models.weights.int_linear import IntLinear
from torchweave.models.weights.quantize import Fp8Linear, QuantScheme, quantize_weight
from torchweave.ops.quant.fp8 import GROUP
from torchweave.ops.quant.int_linear import dequantize_int
from torchweave.report import Report
from torchweave.verify import image_zoo, zoo

NUM_TOKENS = 6
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias={image_zoo.IMAGE_TOKEN: -100.0}
)
EAGER = TorchCompileConfig(enable_fullgraph=False)
COMPILED = TorchCompileConfig(enable_inductor=False, compile_cache=False)


def in_decoder(name: str) -> bool:
    return name.endswith("proj.weight") and not re.search("expert|visual|vision|merger|projector", name)


def in_tower_too(name: str) -> bool:
    return name.endswith("proj.weight") and not re.search("expert|patch_embed", name)


def image_model(name: str) -> tuple[image_zoo.ImageZooModel, Any]:
    entry = image_zoo.zoo_entry(f"{name}-images")
    assert isinstance(entry, image_zoo.ImageZooModel)
    return entry, entry.build()


def expected_tokens(entry: image_zoo.ImageZooModel, model: Any) -> tuple[list[EncodedPrompt], list[list[int]]]:
    prompts = image_zoo.image_prompts(entry, model)
    answers = image_zoo.image_reference_answers(entry, model, prompts, NUM_TOKENS)
    return prompts, [answer.tokens for answer in answers]


def tokens_of(loaded: LoadedModel, prompts: list[EncodedPrompt], compile_config: TorchCompileConfig) -> list[list[int]]:
    config = EngineConfig(
        model=loaded.name, dtype="float32", device="cpu", num_kv_blocks=64, torch_compile_config=compile_config
    )
    with LLM.from_loaded(loaded, config, Report(show=False)) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize(
    ("name", "form", "packs", "compile_config"),
    [
        ("gemma3", "gptq-int4", in_decoder, EAGER),
        ("llava_next", "awq", in_decoder, EAGER),
        ("mistral3", "ct-nvfp4", in_decoder, EAGER),
        ("qwen2_5_vl", "awq", in_tower_too, EAGER),
        ("qwen3_vl", "ct-int4-group-asymmetric", in_tower_too, COMPILED),
        ("qwen3_5", "ct-int8-channel", in_decoder, EAGER),
        ("idefics3", "ct-mxfp4", in_tower_too, EAGER),
    ],
)
def test_packed_checkpoints(
    name: str, form: str, packs: Callable[[str], bool], compile_config: TorchCompileConfig, tmp_path: Path
) -> None:
    """Published names of Gemma 3, LLaVA-Next, Mistral 3 and Qwen2.5-VL are not those of their classes."""
    entry, model = image_model(name)
    values = write(model, FORMS[form], tmp_path, zoo.save, packs)
    prompts, expected = expected_tokens(entry, model)
    loaded = load(tmp_path, torch.float32, images=True)
    assert isinstance(loaded.module, ImageDecoderStep) and not loaded.no_images
    packed = [module for module in loaded.module.modules() if isinstance(module, IntLinear)]
    inside = [module for module in decoder_of(loaded.module.model).modules() if isinstance(module, IntLinear)]  # type: ignore[arg-type]
    assert len(packed) == len(values) > 10 and (len(packed) > len(inside)) == (packs is in_tower_too)
    assert tokens_of(loaded, prompts, compile_config) == expected


def test_layers_of_a_packed_tower_are_compiled(tmp_path: Path) -> None:
    entry, model = image_model("qwen3_vl")
    write(model, FORMS["gptq-int4"], tmp_path, zoo.save, in_tower_too)
    loaded = load(tmp_path, torch.float32, images=True)
    assert isinstance(loaded.module, ImageDecoderStep)
    prompts = image_zoo.image_prompts(entry, model)
    encoder, images = ImageEncoder(loaded.module), list(prompts[2].images)
    expected, report = [encoder.features(image) for image in images], Report(show=False)
    compile_layers(encoder, images, COMPILED, None, report)
    assert report.select("image_encoder")[0]["compiled"] == 2
    for image, features in zip(images, expected, strict=True):
        torch.testing.assert_close(encoder.features(image), features, rtol=1e-4, atol=1e-4)


def test_fp8_checkpoint(tmp_path: Path) -> None:
    """Blocks of 128 x 128 with `weight_scale_inv`, as Qwen publishes them, without the tower."""
    entry, model = image_model("qwen2_5_vl")
    zoo.save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if in_decoder(name)]:
        tensors[name], scale = quantize_weight(tensors[name], QuantScheme("block"))
        tensors[f"{name}_scale_inv"] = scale[:, : -(-tensors[name].shape[1] // GROUP)].contiguous()
    save_file(tensors, file)
    change_config(tmp_path, BLOCKS | {"modules_to_not_convert": ["visual", "lm_head"]})
    loaded = load(tmp_path, torch.float32, images=True)
    quantized = {name: each for name, each in loaded.module.model.named_modules() if isinstance(each, Fp8Linear)}  # type: ignore[union-attr]
    assert len(quantized) == 14
    for name, module in quantized.items():
        model.set_submodule(name, Reference(module))
    prompts, expected = expected_tokens(entry, model)
    assert tokens_of(loaded, prompts, EAGER) == expected


@pytest.mark.parametrize(("quantization", "name"), [("fp8", "llava"), ("int4", "gemma3"), ("int4", "qwen3_vl_moe")])
def test_the_tower_keeps_its_weights_at_load(quantization: str, name: str, tmp_path: Path) -> None:
    entry, model = image_model(name)
    zoo.save(model, tmp_path)
    report = Report(show=False)
    loaded = load(tmp_path, torch.float32, images=True, quantization=quantization, report=report)
    (event,) = report.select("quantized")
    tower = [names for why, names in event["excluded"].items() if why.startswith("the vision tower")]
    assert tower and not any("language_model" in name for name in tower[0])
    inner: Any = loaded.module.model
    kinds = (Fp8Linear, IntLinear)
    assert not any(isinstance(each, kinds) for key, each in inner.named_modules() if "language_model" not in key)
    quantized = {key: each for key, each in inner.named_modules() if isinstance(each, kinds)}
    assert len(quantized) == event["linears"] >= 8
    for key, module in quantized.items():
        weight: Any = model.get_submodule(key)
        if isinstance(module, Fp8Linear):
            model.set_submodule(key, Reference(module))
        else:
            tensors = (module.weight, module.weight_scale, module.weight_zero, module.in_features, module.group)
            weight.weight = nn.Parameter(dequantize_int(*tensors, torch.float32), requires_grad=False)
    if name != "qwen3_vl_moe":  # its experts are quantized too
        prompts, expected = expected_tokens(entry, model)
        assert tokens_of(loaded, prompts, EAGER) == expected


def test_dummy_weights_with_a_tower() -> None:
    entry, _ = image_model("qwen3_vl")
    loaded = load(json.loads(entry.config().to_json_string()), load_format="dummy", images=True, quantization="int4")
    assert isinstance(loaded.module, ImageDecoderStep) and loaded.quantization == "int4_g128"
