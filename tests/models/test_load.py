"""Loading from folders, and the errors for damaged or unsupported folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from torchweave.config.model_shapes import SHAPES
from torchweave.config.model_source import resolve
from torchweave.models import load
from torchweave.models.load import build_on_meta, model_facts, read_config
from torchweave.models.weights import read as weights_read
from torchweave.report import Report
from torchweave.verify import image_zoo, zoo


def save(name: str, folder: Path, **options: Any) -> Any:
    model = zoo.build(zoo.zoo_model(name))
    model.save_pretrained(folder, **options)
    return model


def logits_of(loaded: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return loaded.module(ids, torch.arange(len(ids)), torch.arange(len(ids)))


IDS = torch.arange(3, 33)


def test_shards_are_streamed_bit_equal_and_counted_in_bytes(tmp_path: Path) -> None:
    model = save("llama", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    report = Report(show=False)
    loaded = load(tmp_path, report=report)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.module.model.get_parameter(name), parameter), name
    progress = [event for event in report.select("progress") if event["title"] == "weights"]
    assert progress[-1]["done"] == progress[-1]["total"] == sum(p.numel() * 4 for p in model.parameters())
    assert not report.select("weights_converted")


def test_an_index_of_other_files_beside_the_file_of_the_model(tmp_path: Path) -> None:
    model = save("llama", tmp_path)
    old = {name: tensor * 0.5 for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(old, tmp_path / "old.safetensors")
    index = {"weight_map": dict.fromkeys(old, "old.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load(tmp_path).module.model.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 3, ["a"]], ids=str)
def test_an_index_names_files_of_its_folder_only(name: Any, tmp_path: Path) -> None:
    save("llama", tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="no file of its folder"):
        load(tmp_path)


@pytest.mark.parametrize("model_type", [[], {}, 3], ids=str)
def test_a_model_type_that_is_no_name(model_type: Any, tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="expected a name"):
        load(tmp_path)


@pytest.mark.parametrize("replaced", [False, True])
def test_weights_that_change_while_they_are_loaded(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("llama", tmp_path)
    file, set_tensor = tmp_path / "model.safetensors", weights_read.set_tensor

    def write(*args: Any) -> None:
        if replaced:
            (tmp_path / "new").write_bytes(file.read_bytes())
            (tmp_path / "new").replace(file)
        else:
            with file.open("r+b") as stream:
                stream.seek(-4, 2)
                stream.write(b"\0" * 4)
        set_tensor(*args)

    monkeypatch.setattr(weights_read, "set_tensor", write)
    with pytest.raises(ValueError, match="changed while it was loaded"):
        load(tmp_path)


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    save("llama-tied", tmp_path)
    model = load(tmp_path).module.model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_dtype_is_the_one_asked_for_and_frequencies_stay_float32(tmp_path: Path) -> None:
    save("llama", tmp_path)
    loaded = load(tmp_path, "bfloat16")
    assert {p.dtype for p in loaded.module.parameters()} == {torch.bfloat16}
    fresh = LlamaForCausalLM(zoo.zoo_model("llama").config())
    assert torch.equal(loaded.module.model.model.rotary_emb.inv_freq, fresh.model.rotary_emb.inv_freq)


def test_float32_parameters_stay_float32(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    gate = load(tmp_path, "bfloat16").module.model.model.layers[1].mlp.gate
    assert gate.e_score_correction_bias.dtype == torch.float32


def test_checkpoint_of_the_base_model_without_its_prefix(tmp_path: Path) -> None:
    model = save("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}, file)
    torch.testing.assert_close(logits_of(load(tmp_path), IDS), model(IDS[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_experts_are_merged_as_they_are_read(tmp_path: Path) -> None:
    model = save("qwen3_moe", tmp_path, max_shard_size="50KB")
    report = Report(show=False)
    loaded = load(tmp_path, report=report)
    assert report.select("weights_converted")[0]["by"] == "torchweave, while reading"
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.module.model.get_parameter(name), parameter), name
    progress = [event for event in report.select("progress") if event["title"] == "weights"]
    assert progress[-1]["done"] == progress[-1]["total"] == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize(
    ("leaf", "wrong", "said"),
    [
        ("experts.5.up_proj", None, "lacks 1 of the 16 matrices of .*gate_up_proj, such as those of expert 5"),
        ("experts.5.up_proj", torch.zeros(4, 64), r"shape \[4, 64\], expected one of 8 experts of shape \[32, 64\]"),
    ],
)
def test_experts_that_are_missing_or_odd(leaf: str, wrong: Any, said: str, tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.1.mlp.{leaf}.weight"
    del tensors[name]
    if wrong is not None:
        tensors[name] = wrong
    save_file(tensors, file)
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


@pytest.mark.parametrize("name", ["gpt_neox", "granitemoe"])
def test_tensors_that_transformers_only_renames_are_streamed(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) - set(model.state_dict()), "the checkpoint has names of its own"
    report = Report(show=False)
    loaded = load(tmp_path, report=report)
    assert not report.select("weights_converted")
    torch.testing.assert_close(logits_of(loaded, IDS), model(IDS[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_other_conversions_are_those_of_transformers(tmp_path: Path) -> None:
    """Experts of Qwen3-VL are stored transposed."""
    entry = image_zoo.zoo_entry("qwen3_vl_moe-images")
    assert isinstance(entry, image_zoo.ImageZooModel)
    model = entry.build()
    zoo.save(model, tmp_path)
    report = Report(show=False)
    loaded = load(tmp_path, torch.float32, report=report, images=True)
    assert report.select("weights_converted")[0]["by"] == "transformers"
    parameters: Any = dict(loaded.module.model.named_parameters())  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameters[name], parameter), name


def test_dummy_needs_a_config_only_and_gives_finite_logits(tmp_path: Path) -> None:
    zoo.zoo_model("llama-tied").config().save_pretrained(tmp_path)
    first, second = (load(tmp_path, load_format="dummy") for _ in range(2))
    assert first.module.model.lm_head.weight is first.module.model.model.embed_tokens.weight
    assert first.tokenizer is None
    assert torch.isfinite(logits_of(first, IDS)).all()
    assert torch.equal(logits_of(first, IDS), logits_of(second, IDS))


def test_config_dict_and_benchmark_shapes() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 96, "vocab_size": 99}
    assert load(config, load_format="dummy").module.vocab_size == 99
    facts = model_facts("shape:llama-8b")
    assert facts.max_model_len == SHAPES["shape:llama-8b"]["max_position_embeddings"]
    assert (facts.num_layers, facts.num_heads) == (32, 32)
    with pytest.raises(ValueError, match="load_format=dummy"):
        load("shape:llama-1b")
    with pytest.raises(ValueError, match="shape:llama-1b"):
        load("shape:llama-2b", load_format="dummy")


def _with_rope(**rope: Any) -> dict[str, Any]:
    parameters = {"rope_theta": 10000.0, "factor": 4.0, **rope}
    return zoo.zoo_model("llama").config().to_dict() | {"rope_parameters": parameters}


def test_scaled_rope_extends_max_model_len() -> None:
    """As Qwen's cards say: the scaling is added to config.json, and max_position_embeddings stays."""
    yarn = _with_rope(rope_type="yarn", original_max_position_embeddings=512)
    assert model_facts(yarn).max_model_len == load(yarn, load_format="dummy").max_model_len == 2048
    told = _with_rope(rope_type="yarn", original_max_position_embeddings=64)
    assert model_facts(told).max_model_len == 512
    refused(yarn, "2049", "2048", max_model_len=2049, load_format="dummy")  # type: ignore[arg-type]


def test_dynamic_rope_extends_to_an_explicit_max_model_len() -> None:
    """Unasked it stays as it is: a longer sequence's frequencies are others for short ones, too."""
    config = _with_rope(rope_type="dynamic")
    facts = model_facts(config)
    assert (facts.max_model_len, facts.longest_model_len) == (512, 2048)
    ids = torch.arange(700) % zoo.VOCAB
    loaded = load(config, load_format="dummy", max_model_len=700)
    model = LlamaForCausalLM(LlamaConfig.from_dict(config)).eval()
    model.load_state_dict(loaded.module.model.state_dict())
    torch.testing.assert_close(logits_of(loaded, ids), model(ids[None]).logits[0], atol=1e-4, rtol=1e-4)
    refused(config, "2049", "2048", max_model_len=2049, load_format="dummy")  # type: ignore[arg-type]


def test_the_shape_of_qwen3_30b_is_the_published_one() -> None:
    config = read_config(resolve("shape:qwen3-30b-a3b"))
    model = build_on_meta(config, torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == 30_532_122_624
    assert model_facts("shape:qwen3-30b-a3b").max_model_len == 40960


def test_generation_defaults(tmp_path: Path) -> None:
    save("llama", tmp_path)
    defaults = {"eos_token_id": [2, 7], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    generation = load(tmp_path).generation
    assert generation.eos_token_ids == (2, 7)
    assert (generation.temperature, generation.top_p, generation.top_k) == (0.6, 0.9, None)
    greedy = {"do_sample": False, "repetition_penalty": 1.3}  # which transformers applies however tokens are chosen
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults | greedy))
    generation = load(tmp_path).generation
    assert (generation.temperature, generation.repetition_penalty) == (None, 1.3)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("eos_token_id", "</s>", "a whole number"),
        ("eos_token_id", [[2]], "a whole number"),
        ("temperature", "0.6", "a number"),
        ("top_k", 50.5, "a whole number"),
    ],
)
def test_generation_defaults_that_are_no_numbers(name: str, value: Any, expected: str, tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, name: value}))
    refused(tmp_path, f"generation_config.json of this model has {name}=", f"expected {expected}; correct it.")


@pytest.mark.parametrize("form", ["tokenizer.json", "added_tokens_decoder", "nowhere"])
def test_eos_token_from_the_tokenizer(form: str, tmp_path: Path) -> None:
    """Fine-tunes end turns with <|im_end|> while config.json still names the base model's EOS token."""
    save("llama", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config: dict[str, Any] = {"eos_token": {"content": "<|im_end|>", "special": True}}
    tokenizer: dict[str, Any] = {"added_tokens": [{"id": 2, "content": "</s>"}], "model": {"vocab": {"[": 0}}}
    if form == "added_tokens_decoder":
        config |= {"eos_token": "<|im_end|>", "added_tokens_decoder": {"200": {"content": "<|im_end|>"}}}
    elif form == "tokenizer.json":
        tokenizer["added_tokens"].append({"id": 200, "content": "<|im_end|>"})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load(tmp_path).generation.eos_token_ids == ((2,) if form == "nowhere" else (2, 200))


def test_the_file_may_change_after_loading(tmp_path: Path) -> None:
    save("llama", tmp_path)
    loaded = load(tmp_path)
    before = logits_of(loaded, IDS)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(b"\xff" * 4096)
    assert torch.equal(logits_of(loaded, IDS), before)


def test_other_models_of_the_process_stay_as_they_are(tmp_path: Path) -> None:
    model = save("falcon", tmp_path)
    forward = type(model.transformer.h[0].self_attention).forward
    expected = model(IDS[None]).logits
    load(tmp_path)
    assert type(model.transformer.h[0].self_attention).forward is forward
    assert torch.equal(model(IDS[None]).logits, expected)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(again(IDS[None]).logits, expected)


def test_text_part_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    model = save("gemma3", tmp_path)
    edit(tmp_path, lambda tensors: [tensors.update({_multimodal(n): tensors.pop(n)}) for n in list(tensors)])
    edit(tmp_path, lambda tensors: tensors.update({"vision_tower.patch.weight": torch.zeros(3, 3)}))
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    )
    loaded = load(tmp_path)
    assert loaded.architecture == "Gemma3ForCausalLM"
    torch.testing.assert_close(logits_of(loaded, IDS), model(IDS[None]).logits[0], atol=1e-4, rtol=1e-4)


def _multimodal(name: str) -> str:
    return f"language_model.{name}"


def _with_images(folder: Path, text: str, name: str, **outer: Any) -> None:
    """Make a decoder's folder that of a model of a larger one, whose config is the outer one, and `text` stands in its names."""
    edit(
        folder, lambda tensors: [tensors.update({n.replace("model.", text, 1): tensors.pop(n)}) for n in list(tensors)]
    )
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    outer = {"model_type": name, "text_config": config, "vision_config": {}} | outer
    (folder / "config.json").write_text(json.dumps(outer))


def test_lm_head_tied_by_a_multimodal_config(tmp_path: Path) -> None:
    model = save("llama-tied", tmp_path)
    _with_images(tmp_path, "model.language_model.", "mistral3", tie_word_embeddings=True)
    torch.testing.assert_close(logits_of(load(tmp_path), IDS), model(IDS[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_text_part_that_is_called_text_model(tmp_path: Path) -> None:
    model = save("llama", tmp_path)
    _with_images(tmp_path, "model.text_model.", "idefics3")
    torch.testing.assert_close(logits_of(load(tmp_path), IDS), model(IDS[None]).logits[0], atol=1e-4, rtol=1e-4)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def refused(folder: Path | str, *parts: str, **options: Any) -> None:
    with pytest.raises(ValueError) as error:
        load(folder, **options)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 500
    for part in parts:
        assert part in message, message


def test_missing_folder(tmp_path: Path) -> None:
    refused(str(tmp_path / "nothing"), "nothing", "expected a folder")


def test_invalid_folder_name() -> None:
    refused("x" * 300, "cannot be read (File name too long)", "give the path of a model folder")


def test_text_config_that_is_no_mapping_is_ignored(tmp_path: Path) -> None:
    """A text_config that is no mapping is ignored, also for the quantization config."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "text_config": "x"}')
    refused(tmp_path, "has no weights")


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    save("llama", tmp_path)
    refused(tmp_path / "model.safetensors", "model.safetensors", "folder")


def test_hub_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    refused("organisation/model", "organisation/model", "unreachable")


def test_folder_without_config(tmp_path: Path) -> None:
    refused(tmp_path, "no config.json")


def test_config_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json", "not valid JSON")


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ({"num_attention_heads": "4"}, ("not a valid llama config", "num_attention_heads", "expected int")),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, ("build a llama model", "mrope")),
        ({"hidden_act": "sulu"}, ("build a llama model", "sulu")),
    ],
)
def test_config_values_that_transformers_rejects(value: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | value
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, *parts)


def test_folder_without_weights(tmp_path: Path) -> None:
    zoo.zoo_model("llama").config().save_pretrained(tmp_path)
    refused(tmp_path, "no weights", "load_format=dummy")


def test_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "blahblah"}))
    refused(tmp_path, "'blahblah'", "docs/reference/models.md")


@pytest.mark.parametrize("size", [4, 100, 50_000])
def test_truncated_file(tmp_path: Path, size: int) -> None:
    save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refused(tmp_path, str(file), "download")


def test_missing_shard(tmp_path: Path) -> None:
    save("llama", tmp_path, max_shard_size="100KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    refused(tmp_path, gone.name)


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_tensor(tmp_path: Path) -> None:
    save("llama", tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(tmp_path, "lacks model.layers.1.mlp.up_proj.weight")


def test_text_part_under_names_that_are_not_known(tmp_path: Path) -> None:
    save("llama", tmp_path)
    _with_images(tmp_path, "model.words.", "idefics3")
    refused(tmp_path, "has model.words.embed_tokens.weight where", "text part are unknown")
    mixture = tmp_path / "mixture"
    save("mixtral", mixture)
    _with_images(mixture, "model.words.", "llava")
    refused(mixture, "has model.words.embed_tokens.weight where", "text part are unknown")


def test_missing_expert(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path)
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1.mlp.experts" in name])
    refused(tmp_path, "lacks model.layers.1.mlp.experts")


def test_tensor_that_the_config_would_ignore(tmp_path: Path) -> None:
    save("llama", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    refused(tmp_path, "model.layers.0.self_attn.q_proj.bias")


def test_tensors_of_absent_modules_are_ignored(tmp_path: Path) -> None:
    save("llama", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"mtp.layers.0.weight": torch.zeros(4)}))
    assert torch.isfinite(logits_of(load(tmp_path), IDS)).all()


def test_tensor_of_another_shape(tmp_path: Path) -> None:
    save("llama", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    refused(tmp_path, "model.norm.weight", "[63]", "[64]")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5", "d_model": 64}, "encoder-decoder"),
        ({"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}, "not causal"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized by gptq"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_models_other_than_decoders_are_rejected(config: dict[str, Any], reason: str) -> None:
    refused(config, reason, load_format="dummy")  # type: ignore[arg-type]


def test_options_out_of_range(tmp_path: Path) -> None:
    save("llama", tmp_path)
    refused(tmp_path, "513", "512", max_model_len=513)
    refused(tmp_path, "int8", "bfloat16", dtype="int8")
    refused(tmp_path, "gguf", load_format="gguf")


def test_llama_config_of_transformers_is_read_as_it_is(tmp_path: Path) -> None:
    LlamaConfig(vocab_size=77, hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    assert load(tmp_path, load_format="dummy").config["vocab_size"] == 77


def test_positions_after_the_padding_token_shorten_the_longest_sequence(tmp_path: Path) -> None:
    save("roberta", tmp_path)
    report = Report(show=False)
    loaded = load(tmp_path, report=report)
    assert loaded.max_model_len == model_facts(tmp_path).max_model_len == 512 - 2
    assert logits_of(loaded, torch.full((510,), 5)).shape == (510, zoo.VOCAB)
    assert "does not count the padding token 1" in report.select("warning")[0]["why"]
    with pytest.raises(ValueError, match="the model supports 510 tokens"):
        load(tmp_path, max_model_len=511)


def test_renaming_that_hits_a_name_of_the_model(tmp_path: Path) -> None:
    """transformers' renaming of `.norm.` for DeepSeek-V4's compressor hits the last norm of a saved folder."""
    model = save("deepseek_v4-sliding", tmp_path)
    assert torch.equal(load(tmp_path).module.model.model.norm.weight, model.model.norm.weight)
