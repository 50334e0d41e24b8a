"""Embeddings, classes and scores, against transformers' eager float32 model of the same class."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

import torchweave
from tests.engine.captured import CAPTURED
from torchweave import LLM, SamplingParams
from torchweave.models import load
from torchweave.models.materialize import quiet_transformers
from torchweave.report import Report
from torchweave.verify import zoo

DEMO = Path(torchweave.__file__).parent / "models" / "demo"
PROMPTS = [np.random.default_rng(0).integers(3, 250, size).tolist() for size in (1, 5, 70, 33, 100, 17)]


def start(folder: Path | str, fullgraph: bool = False, **options: Any) -> LLM:
    """An engine with steps of 32 tokens, so that most prompts take several, and four slots."""
    sizes = {
        "max_num_tokens": 32,
        "max_batch_size": 4,
        "device": "cpu",
        "block_size": 8,
        "torch_compile_config": replace(CAPTURED, enable_fullgraph=fullgraph),
    }
    return LLM(str(folder), report=Report(show=False), **(sizes | options))


def saved(model: PreTrainedModel, folder: Path, architecture: str | None = None, **modules: Any) -> Path:
    """A checkpoint; `modules` are those of sentence-transformers, with the content of `1_Pooling/config.json`."""
    zoo.save(model, folder)
    if architecture is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture]}))
    if modules:
        prefix = "sentence_transformers.models."
        listed = [("", f"{prefix}Transformer")]
        listed += [(f"{at}_{kind}", prefix + kind) for at, kind in enumerate(modules, start=1)]
        (folder / "modules.json").write_text(json.dumps([{"path": path, "type": kind} for path, kind in listed]))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modules["Pooling"]))
    return folder


@torch.no_grad()
def hidden_states(folder: Path) -> list[torch.Tensor]:
    """transformers' last hidden states of each prompt alone."""
    with quiet_transformers():
        base = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [base(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def classifier(name: str, folder: Path, **options: Any) -> tuple[Path, PreTrainedModel]:
    config = zoo.zoo_model(name).config()
    for key, value in options.items():
        setattr(config, key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation="eager")
        zoo.perturb_weights(model)
    return saved(model.eval().requires_grad_(False), folder), model


def assert_rows(rows: Sequence[Sequence[float]], expected: Sequence[torch.Tensor]) -> None:
    for got, want in zip(rows, expected, strict=True):
        torch.testing.assert_close(torch.tensor(got), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
def test_embeddings_are_the_hidden_states_of_the_base_model(name: str, tmp_path: Path) -> None:
    """By the last token, in chunks of prompts of different lengths, with the prompts' prefixes cached at the second call."""
    folder = saved(zoo.build(zoo.zoo_model(name)), tmp_path)
    hidden = hidden_states(folder)
    fullgraph = name == "qwen3"  # a capture takes seconds
    with start(folder, fullgraph, runner="pooling") as llm:
        assert llm.plan.fullgraph == fullgraph
        first, outputs = llm.embed(PROMPTS), llm.embed(PROMPTS)
        for each in (first, outputs):
            assert_rows(
                [output.outputs.embedding for output in each],
                [torch.nn.functional.normalize(states[-1], dim=0) for states in hidden],
            )
        assert outputs[2].num_cached_tokens == 64 or name in ("mistral", "gemma2")  # windows keep less
        cut = llm.embed(PROMPTS[0], dimensions=16)[0].outputs.embedding
        assert_rows([cut], [torch.nn.functional.normalize(hidden[0][-1, :16], dim=0)])
        assert [output.prompt_token_ids for output in outputs] == PROMPTS
        llm.engine.scheduler.check()


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_mean_is_over_all_tokens_of_all_chunks(policy: str, tmp_path: Path) -> None:
    """A prompt that is read again, after a pause or with its beginning known, adds no token twice."""
    folder = saved(zoo.build(zoo.zoo_model("qwen3")), tmp_path)
    pooler = {"pooling_type": "mean", "normalize": False}
    options = {"capacity_scheduler_policy": policy, "num_kv_blocks": 16, "max_model_len": 104}
    with start(folder, task="embed", pooler_config=pooler, **options) as llm:
        llm.embed(PROMPTS)
        outputs = llm.embed(PROMPTS)
        assert_rows([each.outputs.embedding for each in outputs], [states.mean(0) for states in hidden_states(folder)])
        assert {output.num_cached_tokens for output in outputs} == {0}


@pytest.mark.parametrize(
    ("problem", "num_labels", "activation"),
    [
        (None, 3, lambda logits: logits.softmax(-1)),
        (None, 1, torch.sigmoid),
        ("multi_label_classification", 3, torch.sigmoid),
        ("regression", 2, lambda logits: logits),
    ],
)
def test_classes_are_those_of_the_unmodified_class(
    problem: str | None, num_labels: int, activation: Any, tmp_path: Path
) -> None:
    folder, model = classifier(
        "qwen3" if problem is None else "llama", tmp_path, num_labels=num_labels, problem_type=problem
    )
    prompts = [*PROMPTS, [5, 6, 0, 0]]  # ends with padding tokens, which the class ignores
    logits = [model(input_ids=torch.tensor([prompt])).logits[0] for prompt in prompts]
    with start(folder, fullgraph=num_labels == 1) as llm:
        assert llm.plan.fullgraph == (num_labels == 1)
        assert_rows([each.outputs.probs for each in llm.classify(prompts)], [activation(row) for row in logits])
        assert_rows([each.outputs.probs for each in llm.classify(prompts, use_activation=False)], logits)
        with pytest.raises(ValueError, match="classification head and returns no embeddings"):
            llm.embed(PROMPTS)


def test_sentence_transformers_checkpoint_is_detected_and_scores_by_cosine(tmp_path: Path) -> None:
    """A base model without a language-model head in the checkpoint; the text goes through the model's tokenizer."""
    with quiet_transformers():
        base = AutoModel.from_pretrained(DEMO, dtype=torch.float32)
    folder = saved(base, tmp_path, Pooling={"pooling_mode_mean_tokens": True}, Normalize={})
    for file in DEMO.glob("token*"):
        shutil.copy(file, folder)
    texts = ["sort: pear fig", "sort: fig pear apple", "3+4="]
    with start(folder) as llm:
        assert llm.plan.pooling == "mean"
        ids = [llm.get_tokenizer().encode(text) for text in texts]
        with torch.no_grad():
            means = [base(input_ids=torch.tensor([each])).last_hidden_state[0].mean(0) for each in ids]
        assert_rows(
            [output.outputs.embedding for output in llm.embed(texts)],
            [torch.nn.functional.normalize(mean, dim=0) for mean in means],
        )
        pooled = llm.encode(texts, pooling_task="embed")
        assert [each.outputs.data.tolist() for each in pooled] == [each.outputs.embedding for each in llm.embed(texts)]
        with pytest.warns(DeprecationWarning, match=r"get_tokenizer\(\)\.encode\(text\) for token ids") as caught:
            assert llm.encode(texts[0]) == ids[0]
        assert caught[0].filename == __file__
        with pytest.raises(ValueError, match="needs pooling_task, which is embed or classify"):
            llm.encode(texts)
        with pytest.raises(ValueError, match=r"pooling_task='token_embed' is not supported: .*use embed or classify"):
            llm.encode(texts, pooling_task="token_embed")
        with pytest.raises(ValueError, match="no classification head"):
            llm.encode(texts, pooling_task="classify")
        scores = [output.outputs.score for output in llm.score(texts[0], texts[1:])]
        expected = [float(torch.cosine_similarity(means[0], mean, dim=0)) for mean in means[1:]]
        assert scores == pytest.approx(expected, abs=1e-5)
        with pytest.raises(ValueError, match=r"computes embeddings, no text; use LLM\.embed"):
            llm.generate("3+4=")
        with pytest.raises(ValueError, match="text_1 has 2 and text_2 has 3"):
            llm.score(texts[:2], texts)
        with pytest.raises(ValueError, match="dimensions must be from 1 to"):
            llm.embed(texts, dimensions=0)
        with pytest.raises(ValueError, match="no classification head"):
            llm.classify(texts)


def test_longest_prompt_has_max_model_len_tokens(tmp_path: Path) -> None:
    folder = saved(zoo.build(zoo.zoo_model("llama")), tmp_path, "LlamaModel")
    with start(folder, max_model_len=64) as llm:
        assert len(llm.embed([[7] * 64])[0].outputs.embedding) == 64
        with pytest.raises(ValueError, match="65 tokens, but max_model_len is 64"):
            llm.embed([[7] * 65])


@pytest.mark.parametrize("name", ["gpt2", "openai-gpt"])
def test_models_with_a_head_that_are_named_like_base_models_generate(name: str, tmp_path: Path) -> None:
    """GPT2LMHeadModel ends with "Model" as base models do."""
    folder = saved(zoo.build(zoo.zoo_model(name)), tmp_path)
    assert json.loads((folder / "config.json").read_text())["architectures"][0].endswith("LMHeadModel")
    assert load(folder, torch.float32).module.pooling is None


def test_generating_engine_refuses_to_pool() -> None:
    with start("demo-draft") as llm:
        with pytest.raises(ValueError, match="generates text; for embeddings"):
            llm.embed("3+4=")
        assert llm.generate("3+4=", SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].text


@pytest.mark.parametrize(
    ("modules", "options", "sentence"),
    [
        ({"Pooling": {"pooling_mode_mean_tokens": True}, "Dense": {}}, {}, "has a module Dense"),
        ({"Pooling": {"pooling_mode_cls_token": True}}, {}, "has pooling_mode_cls_token; pooling by the last token"),
        ({}, {"pooler_config": {"pooling_type": "mean"}}, "pooler_config has no effect on a model that generates"),
        (
            {},
            {"runner": "pooling", "speculative_config": {"method": "ngram"}},
            "speculative_config.method=ngram has no effect",
        ),
        (
            {},
            {"runner": "pooling", "pooler_config": {"pooling_type": "cls"}},
            "pooler_config.pooling_type='cls' is not known",
        ),
    ],
)
def test_unsupported_pooling_is_refused(
    modules: dict[str, Any], options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    folder = saved(zoo.build(zoo.zoo_model("llama")), tmp_path, **modules)
    with pytest.raises(ValueError, match=sentence):
        start(folder, **options)
