"""Checkpoints as people have them: tensors without a place, adapters, wrapped names, files of `torch.save`, broken code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchweave.config.model_source import resolve
from torchweave.models import load
from torchweave.models.generation import GenerationDefaults, checkpoint_defaults
from torchweave.models.parallel.pipeline_stages import PipelineStage
from torchweave.report import Report
from torchweave.tokenizer import Tokenizer
from torchweave.verify import zoo

Tensors = dict[str, Tensor]
Q_PROJ = "model.layers.0.self_attn.q_proj."
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build(zoo.zoo_model("llama"))


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path)
    return tmp_path


def stored(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: Tensors) -> None:
    save_file({name: each.clone() for name, each in tensors.items()}, folder / "model.safetensors")


def refused(folder: Path, *parts: str, **options: Any) -> None:
    with pytest.raises(ValueError) as error:
        load(folder, **options)
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    for part in parts:
        assert part in message, message


def assert_loaded(folder: Path, model: Any, **options: Any) -> None:
    loaded = load(folder, **options).module.model
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


# -- tensors that have no place in the model ---------------------------------------------------------------------------


def more_layers(tensors: Tensors) -> Tensors:
    last = max(int(name.split(".")[2]) for name in tensors if ".layers." in name)
    return {
        name.replace(f".layers.{last}.", f".layers.{last + 1}."): each
        for name, each in tensors.items()
        if f".layers.{last}." in name
    }


@pytest.mark.parametrize(
    ("extra", "likeness"),
    [
        ({Q_PROJ + "lora_A.weight": (4, 64), Q_PROJ + "lora_B.weight": (64, 4)}, "an adapter that is not merged"),
        ({f"base_model.model.{Q_PROJ}lora_A.default.weight": (4, 64)}, "an adapter that is not merged"),
        ({Q_PROJ + "lora_magnitude_vector": (64,)}, "an adapter that is not merged"),
        (more_layers, "more layers than the"),
        ({"model.layers.0.self_attn.q_norm.weight": (16,)}, "another architecture than llama"),
        ({"model.layers.0.mlp.shared_expert.up_proj.weight": (96, 64)}, "another architecture than llama"),
        ({"model.layers.0.self_attn.sinks": (4,)}, "another architecture than llama"),
        ({"model.layers.0.pre_feedforward_layernorm.weight": (64,)}, "another architecture than llama"),
        ({"model.embed_tokens_per_layer.weight": (8, 8)}, "a further part of a larger model"),
        ({"v_head.summary.weight": (1, 64), "v_head.summary.bias": (1,)}, "a head of another task"),
        ({"score.weight": (1, 64)}, "a head of another task"),
        ({"vision_tower.blocks.0.weight": (4, 4)}, "a further part of a larger model (vision_tower)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.__name__ if callable(value) else next(iter(value)),
)
def test_tensors_that_would_be_dropped_are_refused(extra: Any, likeness: str, folder: Path, model: Any) -> None:
    tensors = stored(folder)
    added = extra(tensors) if callable(extra) else {name: torch.ones(shape) for name, shape in extra.items()}
    store(folder, tensors | added)
    refused(folder, sorted(added)[0], likeness, "ignore_unused_weights=true")
    report = Report(show=False)
    assert_loaded(folder, model, ignore_unused_weights=True, report=report)
    (event,) = report.select("unused_weights")
    assert event["count"] == len(added)


def test_five_tensors_are_named(folder: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.{leaf}_norm.weight" for layer in range(2) for leaf in "abcd"]
    store(folder, stored(folder) | {name: torch.ones(4) for name in names})
    refused(folder, ", ".join(names[:5]) + " and 3 more tensors")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.cos_cached",
        "model.layers.0.self_attn.masked_bias",
        "model.layers.0.attn.causal_mask",
        "mtp.layers.0.weight",
        "model.mtp_layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_scale",
    ],
)
def test_what_is_computed_or_a_drafters_is_left_out(name: str, folder: Path, model: Any) -> None:
    store(folder, stored(folder) | {name: torch.ones(4)})
    assert_loaded(folder, model)


def test_names_that_transformers_declares_ignorable_are_left_out(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(folder, stored(folder) | {"model.layers.0.old_name.weight": torch.ones(4)})
    refused(folder, "old_name")
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"\.old_name\."])
    assert_loaded(folder, model)


def test_a_base_model_is_loaded_without_the_head_of_its_checkpoint(folder: Path) -> None:
    load(folder, runner="pooling")  # without lm_head
    store(folder, stored(folder) | {Q_PROJ + "lora_A.weight": torch.ones(4, 64)})
    refused(folder, "an adapter that is not merged", runner="pooling")


def test_the_conversion_of_transformers_drops_nothing_either(tmp_path: Path) -> None:
    model = zoo.build(zoo.zoo_model("phimoe"))
    model.save_pretrained(tmp_path)
    store(tmp_path, stored(tmp_path) | {"model.layers.0.self_attn.sinks": torch.ones(4)})
    refused(tmp_path, "model.layers.0.self_attn.sinks", "another architecture")


def test_a_stage_keeps_layers_that_no_stage_has(model: Any) -> None:
    stage = object.__new__(PipelineStage)
    for name, value in {"layers": "model.layers", "begin": 0, "end": 1, "num_layers": 2}.items():
        object.__setattr__(stage, name, value)
    names = [f"model.layers.{layer}.weight" for layer in range(3)]
    assert list(stage.filter_checkpoint(dict.fromkeys(names), (), ())) == [names[0], names[2]]


# -- adapters ----------------------------------------------------------------------------------------------------------


def add_adapter(folder: Path) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": "people/base", "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"base_model.model.{Q_PROJ}lora_A.weight": torch.ones(4, 64)}, folder / "adapter_model.safetensors")


def test_an_adapter_beside_the_model_is_not_left_out_silently(folder: Path, model: Any) -> None:
    add_adapter(folder)
    refused(folder, "an adapter (LORA) of people/base beside the model", "ignore_unused_weights=true")
    assert_loaded(folder, model, ignore_unused_weights=True)


@pytest.mark.parametrize("with_config", [False, True])
def test_the_folder_of_an_adapter(with_config: bool, folder: Path) -> None:
    add_adapter(folder)
    (folder / "model.safetensors").unlink()
    if not with_config:
        (folder / "config.json").unlink()
    refused(folder, "is an adapter (LORA) of people/base and no model")


def test_layers_that_an_adapter_wraps(folder: Path) -> None:
    tensors = stored(folder)
    store(folder, {name.replace("q_proj.weight", "q_proj.base_layer.weight"): each for name, each in tensors.items()})
    refused(folder, "lacks model.layers.0.self_attn.q_proj.weight", "an adapter that is not merged")


# -- names and files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix", ["base_model.model.", "_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."]
)
def test_names_of_wrappers_are_taken_off(prefix: str, folder: Path, model: Any) -> None:
    store(folder, {prefix + name: each for name, each in stored(folder).items()})
    assert_loaded(folder, model)


def test_names_of_wrapped_layers(folder: Path, model: Any) -> None:
    wrappers = "_orig_mod._fsdp_wrapped_module._checkpoint_wrapped_module."
    store(folder, {name.replace("layers.1.", f"layers.1.{wrappers}"): each for name, each in stored(folder).items()})
    assert_loaded(folder, model)


def test_one_tensor_under_two_names_of_wrappers(folder: Path) -> None:
    store(folder, stored(folder) | {"_orig_mod.model.norm.weight": torch.zeros(64)})
    refused(folder, "_orig_mod.model.norm.weight", "are one tensor")


def as_torch_file(folder: Path, name: str = "pytorch_model.bin", **options: Any) -> Path:
    tensors = stored(folder)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / name, **options)
    return folder / name


@pytest.mark.parametrize("is_zip", [True, False])
def test_files_of_torch_save(is_zip: bool, folder: Path, model: Any) -> None:
    as_torch_file(folder, _use_new_zipfile_serialization=is_zip)
    torch.save({"arguments": 1}, folder / "training_args.bin")
    assert_loaded(folder, model)


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_of_torch_save(with_index: bool, folder: Path, model: Any) -> None:
    tensors = stored(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    parts = {files[0]: names[: len(names) // 2], files[1]: names[len(names) // 2 :]}
    for file, part in parts.items():
        torch.save({name: tensors[name] for name in part}, folder / file)
    if with_index:
        weight_map = {name: file for file, part in parts.items() for name in part}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_loaded(folder, model)
    (folder / files[1]).unlink()
    refused(folder, "lacks")


def test_quantized_at_load_time_from_a_torch_file(folder: Path) -> None:
    as_torch_file(folder)
    assert load(folder, quantization="fp8_per_channel").quantization == "fp8_per_channel"


class _Code:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/nowhere/made-by-a-checkpoint",)


def _nested(folder: Path) -> None:
    torch.save({"state_dict": {}, "epoch": 3}, as_torch_file(folder))


def _cut(folder: Path) -> None:
    file = as_torch_file(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _fifo(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def _dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/nowhere/blob")


def _gguf(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: torch.save({"weight": _Code()}, as_torch_file(folder)), "may run code"),
        (_nested, "expected tensors by their names alone"),
        (_cut, "damaged or cut short"),
        (lambda folder: as_torch_file(folder).write_bytes(b""), "damaged or cut short"),
        (lambda folder: as_torch_file(folder).write_text(LFS), "pytorch_model.bin is a pointer of Git LFS"),
        (lambda folder: as_torch_file(folder, "consolidated.00.pth"), "consolidated.00.pth, whose names are not those"),
        (lambda folder: (folder / "model.safetensors").write_text(LFS), "model.safetensors is a pointer of Git LFS"),
        (lambda folder: (folder / "config.json").write_text(LFS), "config.json is a pointer of Git LFS"),
        (lambda folder: (folder / "tokenizer.json").write_text(LFS), "tokenizer.json is a pointer of Git LFS"),
        (_fifo, "model.safetensors is no regular file"),
        (lambda folder: os.mkfifo(folder / "chat_template.jinja"), "chat_template.jinja is no regular file"),
        (_dangling, "a link to a file that does not exist"),
        (_gguf, "is a model in GGUF"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_files_that_are_no_weights(change: Callable[[Path], Any], reason: str, folder: Path) -> None:
    change(folder)
    refused(folder, reason)


def test_a_pointer_beside_the_files_that_are_read_is_no_fault(folder: Path, model: Any) -> None:
    (folder / "pytorch_model.bin").write_text(LFS)
    assert_loaded(folder, model)
    assert Tokenizer.from_folder(folder) is None


def test_the_path_of_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="GGUF, which is not read"):
        resolve(file)


# -- code of a checkpoint ----------------------------------------------------------------------------------------------

CONFIGURATION = """
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
from .helper_own import VALUE
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import transformers.dynamic_module_utils as modules

    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(folder / "cache"))
    monkeypatch.syspath_prepend(folder / "cache")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING)
    (folder / "helper_own.py").write_text("VALUE = 1\n")
    return folder


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("modeling_own.py", "import a_package_that_is_not_installed\n", "a_package_that_is_not_installed"),
        ("modeling_own.py", "raise RuntimeError('broken')\n", "RuntimeError: broken"),
        ("modeling_own.py", "raise KeyError('broken')\n", "KeyError"),
        ("modeling_own.py", "import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("modeling_own.py", "def f(:\n", "SyntaxError"),
        ("modeling_own.py", "X = 1\n", "OwnForCausalLM"),
        ("modeling_own.py", None, "a file of the code is missing"),
        ("helper_own.py", None, "a file of the code is missing"),
        ("configuration_own.py", None, "a file of the code is missing"),
        ("configuration_own.py", "raise RuntimeError('broken')\n", "RuntimeError: broken"),
        ("configuration_own.py", "from transformers import OldConfig\n", "the version of transformers"),
        ("modeling_own.py", "from transformers.utils import is_old_thing_available\n", "the version of transformers"),
    ],
    ids=str,
)
def test_broken_code_of_a_checkpoint(file: str, text: str | None, reason: str, own_code: Path) -> None:
    if text is None:
        (own_code / file).unlink()
    else:
        (own_code / file).write_text(text)
    refused(own_code, "The Python code of", reason, trust_remote_code=True)


def test_sound_code_of_a_checkpoint(own_code: Path) -> None:
    assert load(own_code, trust_remote_code=True).architecture == "OwnForCausalLM"


# -- generation_config.json --------------------------------------------------------------------------------------------


def defaults_of(folder: Path, model: Any, **values: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True} | values))
    return checkpoint_defaults(folder, model.config)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_new_tokens": 7}, {"max_new_tokens": 7}),
        ({"do_sample": False, "temperature": 0.6, "max_new_tokens": 7}, {"temperature": None, "max_new_tokens": 7}),
        ({"top_k": 50.0}, {"top_k": 50, "temperature": 1.0}),
        ({"top_p": 0.0, "top_k": 50}, {"top_p": None, "top_k": 1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"eos_token_id": 2.0}, {"eos_token_ids": (2,)}),
        ({"eos_token_id": -1}, {"eos_token_ids": ()}),
        ({"eos_token_id": []}, {"eos_token_ids": ()}),
        ({"eos_token_id": None, "temperature": None, "top_k": None}, {"eos_token_ids": (), "top_k": None}),
        ({"do_sample": None, "temperature": 0.6}, {"temperature": None}),
    ],
    ids=str,
)
def test_generation_defaults(values: Any, expected: Any, tmp_path: Path, model: Any) -> None:
    defaults = defaults_of(tmp_path, model, **values)
    assert {name: getattr(defaults, name) for name in expected} == expected


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "0.6"},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"max_new_tokens": 0},
        {"max_new_tokens": True},
        {"eos_token_id": ["2"]},
    ],
    ids=str,
)
def test_invalid_generation_defaults_name_the_file(values: Any, tmp_path: Path, model: Any) -> None:
    (name,) = values
    with pytest.raises(ValueError, match=rf"generation_config\.json of this model has {name}="):
        defaults_of(tmp_path, model, **values)
