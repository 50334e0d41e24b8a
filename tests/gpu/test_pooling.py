"""Embeddings and scores on a GPU, in recorded steps, equal transformers' eager float32 model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.test_pooling import PROMPTS, classifier, hidden_states, saved, start
from torchweave.verify import zoo

pytestmark = pytest.mark.gpu
OPTIONS = {"device": "cuda", "dtype": "float32", "num_kv_blocks": 64, "max_model_len": 128}


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_embeddings_are_hidden_states_of_the_base_model(name: str, pooling: str, tmp_path: Path) -> None:
    folder = saved(zoo.build(zoo.zoo_model(name)), tmp_path)
    pooler = {"pooling_type": pooling, "normalize": False}
    expected = [states[-1] if pooling == "last" else states.mean(0) for states in hidden_states(folder)]
    with start(folder, fullgraph=True, task="embed", pooler_config=pooler, **OPTIONS) as llm:
        for _ in range(2):  # the second time behind prefix hits
            for output, right in zip(llm.embed(PROMPTS), expected, strict=True):
                torch.testing.assert_close(torch.tensor(output.outputs.embedding), right, atol=2e-4, rtol=1e-3)
        counts = llm.manager.counts
        assert counts.get("plain", 0) == 0 and sum(counts.values()) > 0, counts


def test_classes(tmp_path: Path) -> None:
    folder, model = classifier("llama", tmp_path, num_labels=3)
    with start(folder, fullgraph=True, runner="pooling", **OPTIONS) as llm:
        outputs = llm.classify(PROMPTS)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        right = model(input_ids=torch.tensor([prompt])).logits[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), right, atol=1e-4, rtol=1e-3)
