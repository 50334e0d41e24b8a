"""Every architecture of the zoo, loaded from disk, over a paged KV cache: tokens of transformers' eager model."""

from __future__ import annotations

from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.models.paged import paged_tokens
from torchweave.models import DecoderStep, UnsupportedModel, experts, load
from torchweave.models.adapt import adapt, check_config, install_ops
from torchweave.models.load import build_on_meta
from torchweave.report import Report
from torchweave.verify import zoo


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, zoo.VOCAB, (n,), generator=generator).tolist() for n in (3, 70, 21)]


@torch.no_grad()
def is_greedy(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token of an answer has the largest logit of transformers' model behind the tokens before it.

    One forward over prompt and answer in place of one for each token.
    """
    logits = model(input_ids=torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist() == answer


SAME_CODE = {
    "ministral3", "vaultgemma", "olmo", "olmo3", "gpt_neox_japanese", "codegen", "gpt_bigcode", "opt-post-norm",
    "biogpt", "falcon-new", "starcoder2", "stablelm", "persimmon", "granite", "smollm3", "glm", "nemotron",
    "ernie4_5", "exaone4", "helium", "seed_oss", "arcee", "apertus", "hunyuan_v1_dense", "jais2", "cwm",
    "hyperclovax", "nanochat", "granite_swa", "youtu", "minicpm3", "qwen2_moe", "olmoe", "flex_olmo", "granitemoe",
    "granitemoeshared", "glm4_moe_lite", "ernie4_5_moe", "dots1", "hunyuan_v1_moe", "solar_open", "bitnet",
    "exaone_moe", "mimo_v2_flash", "falcon_mamba", "bamba", "lfm2_moe", "lfm3", "emu3", "mllama", "git", "trocr",
    "whisper", "electra", "roc_bert", "xmod", "aria_text", "beam", "cohere2_moe", "cohere_compass_text", "flint",
    "granitemoe_swa", "hy_v3", "internlm3", "iquestcoder", "gpt-sw3", "kolibri1", "mellum", "laguna", "moshi",
    "dots3_note", "zaya-sliding", "gemma4_unified_text", "fuyu", "gemma3-multimodal", "gemma4_unified", "got_ocr2",
    "llama4-multimodal", "moss_transcribe_diarize", "phi4_multimodal", "qwen3_5-multimodal",
    "qwen3_5_moe-multimodal",
}  # fmt: skip
"""Models whose layers run the same code here as those of another model in the list."""


def test_models_of_the_same_code_are_in_the_zoo() -> None:
    assert {entry.name for entry in zoo.ZOO_MODELS} > SAME_CODE


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.name, marks=[pytest.mark.whole] if entry.name in SAME_CODE else [])
        for entry in zoo.ZOO_MODELS
    ],
)
def test_tokens_equal_eager(entry: zoo.ZooModel, tmp_path: Path) -> None:
    model = zoo.build(entry)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, torch.float32, max_model_len=entry.max_model_len)
    answers = paged_tokens(loaded.module, prompts(), 8)
    if not all(
        map(is_greedy, repeat(model), prompts(), answers)
    ):  # else names the token; rotary scales may depend on lengths
        assert answers == zoo.reference_tokens(model, prompts(), 8)


def test_greedy_tokens_are_told_from_others() -> None:
    model = zoo.build(zoo.zoo_model("llama"))
    for prompt, answer in zip(prompts(), zoo.reference_tokens(model, prompts(), 8), strict=True):
        assert is_greedy(model, prompt, answer)
        for at in range(8):
            wrong = [*answer[:at], (answer[at] + 1) % zoo.VOCAB, *answer[at + 1 :]]
            assert not is_greedy(model, prompt, wrong)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("llama", {"scale": 0.26}),
        ("mistral", {"window": 15}),
        ("mistral", {"window": 0}),
        ("llama4", {"chunk": 0}),
        ("gemma2", {"softcap": 0.0}),
        ("gemma2", {"window": 0}),
        ("gpt_oss", {"sinks": None}),
        ("gpt_neo", {"window": 0}),
        ("phimoe", {"window": 0}),
    ],
    ids=str,
)
def test_zoo_models_detect_a_wrong_mask_or_norm(name: str, spoil: dict[str, object]) -> None:
    model = zoo.build(zoo.zoo_model(name))
    expected = zoo.reference_tokens(model, prompts(), 8)
    specs = adapt(build_on_meta(zoo.zoo_model(name).config(), torch.float32), Report(show=False)).attention
    install_ops(model)
    step = DecoderStep(model, specs, zoo.VOCAB, 512)
    assert paged_tokens(step, prompts(), 8) == expected
    assert paged_tokens(step, prompts(), 8, spoil=spoil) != expected


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("qwen3_next", "causal_conv"),
        ("qwen3_next", "gated_delta"),
        ("mamba2", "ssd"),
        ("jamba", "selective_scan"),
        ("lfm2", "causal_conv"),
        ("minimax", "ssd"),
        ("kimi_linear", "gated_delta"),
        ("recurrent_gemma", "rg_lru"),
    ],
)
def test_zoo_models_detect_a_lost_state(name: str, lost: str) -> None:
    model = zoo.build(zoo.zoo_model(name))
    expected = zoo.reference_tokens(model, prompts(), 6)
    on_meta = build_on_meta(zoo.zoo_model(name).config(), torch.float32)
    layers = adapt(on_meta, Report(show=False))
    install_ops(model, like=on_meta)
    step = DecoderStep(model, layers.attention, zoo.VOCAB, 512, layers.recurrent)
    assert paged_tokens(step, prompts(), 6) == expected
    assert paged_tokens(step, prompts(), 6, lost=lost) != expected


def test_zoo_models_detect_a_wrong_selection_of_keys() -> None:
    model: Any = zoo.build(zoo.zoo_model("glm_moe_dsa"))
    expected = zoo.reference_tokens(model, prompts(), 8)
    specs = adapt(build_on_meta(model.config, torch.float32), Report(show=False)).attention
    assert [(spec.sparse, spec.index_keys) for spec in specs] == [(True, False)] * 3 + [(False, True)] * 2
    install_ops(model)
    step = DecoderStep(model, specs, zoo.VOCAB, 512)
    assert paged_tokens(step, prompts(), 8) == expected
    model.model.layers[0].self_attn.indexer.index_topk = 512  # all keys
    assert paged_tokens(step, prompts(), 8) != expected


class _AllRows(LlamaForCausalLM):
    """As code that comes with a checkpoint often is: `logits_to_keep` is swallowed, and every token has its logits."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))


class _NamesThemInVain(_AllRows):
    def forward(self, input_ids: Any = None, logits_to_keep: Any = 0, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, **kwargs)


def _on_meta(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    with torch.device("meta"):
        return kind(zoo.zoo_model("llama").config()).eval()


def test_logits_rows_are_selected_after_a_forward_that_computes_all() -> None:
    model = zoo.build(zoo.zoo_model("llama"))
    expected = zoo.reference_tokens(model, prompts(), 8)
    report = Report(show=False)
    specs = adapt(_on_meta(_AllRows), report).attention
    assert "every token" in report.select("warning")[0]["why"]
    own = _AllRows(model.config).eval().requires_grad_(False)
    own.load_state_dict(model.state_dict())
    install_ops(own)
    assert paged_tokens(DecoderStep(own, specs, zoo.VOCAB, 512), prompts(), 8) == expected


def test_forward_that_ignores_logits_to_keep_is_rejected() -> None:
    with pytest.raises(UnsupportedModel, match=r"logits of 3 tokens .* returns \[53, 256\]\.$"):
        adapt(_on_meta(_NamesThemInVain), Report(show=False))


@pytest.mark.parametrize("entry", zoo.REFUSED_MODELS, ids=lambda entry: entry.name)
def test_refused_with_a_reason(entry: zoo.ZooModel) -> None:
    config = entry.config()
    with pytest.raises(UnsupportedModel) as refusal:
        check_config(config)
        adapt(build_on_meta(config, torch.float32), Report(show=False))
    assert entry.model_type.replace("_", "") in str(refusal.value).lower().replace("_", "")
    assert str(refusal.value).endswith(".")


def test_zoo_covers_enough_architectures() -> None:
    names = [entry.name for entry in zoo.ZOO_MODELS]
    assert len(set(names)) == len(names)
    assert len({entry.model_type for entry in zoo.ZOO_MODELS}) >= 60


@pytest.mark.parametrize("activation", ["gelu_new", "relu6"])
def test_unsupported_expert_form_uses_grouped_mm(activation: str, tmp_path: Path) -> None:
    entry = zoo.ZooModel("mixtral", zoo.zoo_model("mixtral").options | {"hidden_act": activation})
    model = zoo.build(entry)
    expected = zoo.reference_tokens(model, prompts(), 8)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, torch.float32)
    assert experts.count_experts(loaded.module) == {"op": 0, "grouped_mm": 3}
    assert paged_tokens(loaded.module, prompts(), 8) == expected


def test_experts_with_a_functional_activation() -> None:
    attention = {"layer_types": ["full_attention"] * 3, "num_dense_layers": 1}
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = zoo.build(zoo.ZooModel("lfm2_moe", options | attention))
    expected = zoo.reference_tokens(model, prompts(), 8)
    specs = adapt(build_on_meta(model.config, torch.float32), Report(show=False)).attention
    install_ops(model)
    assert experts.count_experts(model) == {"op": 2, "grouped_mm": 0}
    assert paged_tokens(DecoderStep(model, specs, zoo.VOCAB, 512), prompts(), 8) == expected


def test_experts_that_need_bfloat16_on_a_gpu() -> None:
    config = zoo.zoo_model("mixtral").config().to_dict() | {"hidden_act": "relu6"}
    with pytest.raises(UnsupportedModel, match="use dtype=bfloat16"):
        load(config, torch.float16, device="cuda", load_format="dummy")
