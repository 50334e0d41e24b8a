"""Requirements of a model on the engine, found by tracing it, and the rejected ones."""

from __future__ import annotations

import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, masking_utils

from tests.models.paged import paged_tokens
from torchweave.models import UnsupportedModel, load
from torchweave.models.adapt import adapt, install_ops
from torchweave.models.attention import attention_forward
from torchweave.models.decoder import DecoderStep
from torchweave.models.hooks import recurrent
from torchweave.models.hooks.rope import freeze_rope
from torchweave.models.load import build_on_meta
from torchweave.report import Report
from torchweave.verify import zoo


def examined(name: str) -> list[Any]:
    return adapt(build_on_meta(zoo.zoo_model(name).config(), torch.float32), Report(show=False)).attention


def test_layer_specs_describe_the_kv_cache_of_each_layer() -> None:
    gemma = examined("gemma2")
    assert [spec.window for spec in gemma] == [16, 0, 16]
    assert gemma[0].softcap == 1.5
    latent = examined("deepseek_v3")[0]
    assert (latent.num_heads, latent.num_kv_heads, latent.head_dim, latent.value_dim) == (4, 4, 48, 32)
    assert [spec.chunk for spec in examined("llama4")] == [32, 32, 32, 0]
    assert examined("gpt_oss")[0].sinks
    assert (examined("llama")[0].num_heads, examined("llama")[0].num_kv_heads) == (4, 2)


class Layer(nn.Module):
    layer_idx = 0


def call(**options: Any) -> None:
    q = torch.zeros(1, 2, 5, 4)
    attention_forward(Layer(), q, q, q, options.pop("attention_mask", None), **options)


def test_unsupported_attention_arguments_are_rejected() -> None:
    call(dropout=0.0, output_attentions=False, position_ids=None)
    for options, part in (
        ({"attention_mask": torch.zeros(5, 5)}, "own attention mask"),
        ({"is_causal": False}, "not causal"),
        ({"position_bias": torch.zeros(5)}, "position_bias"),
    ):
        with pytest.raises(UnsupportedModel, match=part):
            call(**options)


def test_a_kind_of_layer_that_is_not_known_is_refused() -> None:
    config = zoo.zoo_model("qwen3").config()
    config.layer_types = ["full_attention", "sparse_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="sparse_attention"):
        adapt(build_on_meta(config, torch.float32), Report(show=False))


@pytest.mark.parametrize("name", ["llama", "mixtral", "starcoder2"])
def test_kinds_of_layers_that_the_models_code_does_not_know(name: str, tmp_path: Path) -> None:
    """A config may name kinds for another engine's sake; transformers' class has one attention in all layers."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    options = zoo.zoo_model(name).options | {"layer_types": kinds, "sliding_window": 8}
    model = zoo.build(zoo.ZooModel(name, options))
    zoo.save(model, tmp_path)
    prompts = [list(range(3, 53)), list(range(9, 30))]
    expected = zoo.reference_tokens(model, prompts, 8)
    assert paged_tokens(load(tmp_path).module, prompts, 8) == expected


@pytest.mark.skipif("deepseek_v32" not in CONFIG_MAPPING, reason="this transformers has no model that reads a mask")
def test_unknown_mask_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweave.models.adapt.hook_indexers", lambda model: [])
    config = zoo.zoo_model("deepseek_v32").config()
    with pytest.raises(UnsupportedModel, match=r"it reads an attention mask, and the engine builds none\.$"):
        adapt(build_on_meta(config, torch.float32), Report(show=False))


def test_bidirectional_masks_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers 5.17, whose decoders of MegatronBERT build the mask of an encoder and call themselves causal."""
    model = build_on_meta(zoo.zoo_model("megatron-bert").config(), torch.float32)
    code = sys.modules[type(model).__module__]
    monkeypatch.setattr(code, "create_causal_mask", masking_utils.create_bidirectional_mask, raising=False)
    with pytest.raises(UnsupportedModel, match="it is not causal: tokens attend to later tokens"):
        adapt(model, Report(show=False))
    assert code.create_causal_mask is masking_utils.create_bidirectional_mask, "the replacement is undone"


def test_masks_of_other_threads_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model of the program may run while an engine starts."""
    model = build_on_meta(zoo.zoo_model("llama").config(), torch.float32)
    ends: list[str] = []

    def create(**options: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            mask = masking_utils.create_bidirectional_mask
            pool.submit(mask, config=model.config, inputs_embeds=torch.zeros(1, 3, 64), attention_mask=None).result()
        ends.append("returned")
        return masking_utils.create_causal_mask(**options)

    monkeypatch.setattr(sys.modules[type(model).__module__], "create_causal_mask", create)
    adapt(model, Report(show=False))
    assert ends


def test_changes_of_a_causal_mask_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_on_meta(zoo.zoo_model("llama").config(), torch.float32)

    def prefix_mask(**options: Any) -> Any:
        return masking_utils.create_causal_mask(**options, or_mask_function=lambda _batch, _head, _query, key: key < 4)

    monkeypatch.setattr(sys.modules[type(model).__module__], "create_causal_mask", prefix_mask)
    with pytest.raises(UnsupportedModel, match="changes its causal mask"):
        adapt(model, Report(show=False))


def test_phimoe_computes_no_frequencies_in_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be computed on the CPU and copied in each step, which a CUDA graph cannot record."""
    model = zoo.build(zoo.zoo_model("phimoe"))
    rope, x, positions = model.model.rotary_emb, torch.zeros(1, 7, 64), torch.arange(7)[None]
    expected = rope(x, positions)
    install_ops(model)
    monkeypatch.setattr(rope, "rope_init_fn", None)
    for part, right in zip(rope(x, positions), expected, strict=True):
        assert torch.equal(part, right)


def test_kv_cache_scales_of_recurrent_models_are_rejected(tmp_path: Path) -> None:
    """Scales name layers of the model, the KV cache numbers attention layers alone."""
    zoo.save(zoo.build(zoo.zoo_model("lfm2")), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.1.self_attn.k_scale": torch.ones(1)}, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match="KV-cache scales by layer"):
        load(tmp_path)


def test_unverified_recurrent_layers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweave.models.adapt.VERIFIED", frozenset())
    model = build_on_meta(zoo.zoo_model("lfm2").config(), torch.float32)
    with pytest.raises(UnsupportedModel, match="lfm2 has layers with a recurrent state that were not verified"):
        adapt(model, Report(show=False))


def test_recurrent_layers_without_a_hook_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "_REPLACEMENTS", {})
    model = build_on_meta(zoo.zoo_model("lfm2").config(), torch.float32)
    with pytest.raises(UnsupportedModel, match="lfm2 has layers of kind conv, whose recurrent state"):
        adapt(model, Report(show=False))


def test_positions_from_token_ids_without_a_hook_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweave.models.adapt.is_position_hooked", lambda module: False)
    config = zoo.zoo_model("roberta").config()
    with pytest.raises(UnsupportedModel, match="positions start after its padding token's id"):
        adapt(build_on_meta(config, torch.float32), Report(show=False))


def test_long_rope_is_frozen_for_the_longest_sequence() -> None:
    entry = zoo.zoo_model("phi3-longrope")
    model = zoo.build(entry)
    ids = torch.arange(3, 203)  # beyond the original 128: transformers takes the long factors
    expected = model(input_ids=ids[None], use_cache=False).logits[0]
    install_ops(model)
    report = Report(show=False)
    freeze_rope(model, 512, report)
    assert report.select("rope_frozen")[0]["max_model_len"] == 512
    assert "set max_model_len to at most 128" in report.select("warning")[0]["why"]
    step = DecoderStep(model, [], 1, 1)
    got = step(ids, torch.arange(200), torch.arange(200))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    # A short sequence does not change what a long one computed.
    first = step(ids[:9], torch.arange(9), torch.arange(9))
    torch.testing.assert_close(first, expected[:9], atol=1e-4, rtol=1e-4)
    within = Report(show=False)
    freeze_rope(model, 128, within)
    assert not within.select("warning")


def _phimoe() -> Any:
    rope = {"long_mscale": 1.3, "short_mscale": 1.1, **zoo.zoo_model("phi3-longrope").options["rope_parameters"]}
    return zoo.build(zoo.ZooModel("phimoe", zoo.zoo_model("phimoe").options | {"rope_parameters": rope}))


@pytest.mark.parametrize(("tokens", "max_model_len"), [(90, 128), (200, 512)])
def test_long_rope_whose_scale_is_in_the_forward(tokens: int, max_model_len: int, tmp_path: Path) -> None:
    model = _phimoe()
    zoo.save(model, tmp_path)
    # transformers takes the long scale beyond the original 128, but the short factors at any length; published were both.
    rotary = model.model.rotary_emb
    rotary.rope_init_fn = functools.partial(rotary.rope_init_fn, seq_len=max_model_len)
    prompts = [list(range(begin, begin + tokens)) for begin in (3, 40)]
    expected = zoo.reference_tokens(model, prompts, 8)
    assert paged_tokens(load(tmp_path, max_model_len=max_model_len).module, prompts, 8) == expected


def test_dynamic_rope_grows_with_the_length_that_is_served() -> None:
    config = zoo.zoo_model("llama-rope-dynamic").config().to_dict() | {"max_position_embeddings": 64}
    short, long = load(config, load_format="dummy"), zoo.build(zoo.zoo_model("llama-rope-dynamic"))
    install_ops(long)
    before = long.model.rotary_emb.inv_freq.clone()
    freeze_rope(long, 512, Report(show=False))
    assert torch.equal(before, long.model.rotary_emb.inv_freq)  # 512 is its own limit
    freeze_rope(long, 1024, Report(show=False))
    assert (long.model.rotary_emb.inv_freq[1:] < before[1:]).all()
    assert short.max_model_len == 64


@pytest.mark.parametrize("name", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_rope_that_is_called_dynamic_and_is_fixed(name: str, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}
    model = zoo.build(zoo.ZooModel(name, zoo.zoo_model(name).options | {"rope_parameters": rope}))
    zoo.save(model, tmp_path)
    prompts = [list(range(3, 73)), list(range(9, 30))]
    expected = zoo.reference_tokens(model, prompts, 8)
    assert paged_tokens(load(tmp_path).module, prompts, 8) == expected


def test_padded_logits_index_and_positions_are_taken_as_given() -> None:
    loaded = load(zoo.zoo_model("llama").config().to_dict(), load_format="dummy")
    ids, positions = torch.arange(5, 15), torch.arange(10)
    whole = loaded.module(ids, positions, torch.arange(10))
    torch.testing.assert_close(loaded.module(ids, positions, torch.tensor([9, 0, 0])), whole[[9, 0, 0]])
    doubled = loaded.module(ids, positions * 2, torch.arange(10))
    assert (doubled - whole)[1:].abs().max() > 1e-3
