"""Models on a GPU: loading, tokens over the paged KV cache, and dummy weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.paged import paged_tokens
from tests.verify.test_zoo import prompts
from torchweave.models import load
from torchweave.verify import zoo

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "name", ["llama-tied", "gemma3", "gpt_oss", "deepseek_v3", "llama4", "falcon-new", "phi3-longrope"]
)
def test_tokens_equal_eager(name: str, tmp_path: Path) -> None:
    entry = zoo.zoo_model(name)
    model = zoo.build(entry)
    expected_tokens = zoo.reference_tokens(model, prompts(), 8)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, torch.float32, "cuda", max_model_len=entry.max_model_len)
    tensors = (*loaded.module.parameters(), *loaded.module.buffers())
    assert {tensor.device.type for tensor in tensors} == {"cuda"}
    assert paged_tokens(loaded.module, prompts(), 8, device="cuda") == expected_tokens


def test_dummy_weights_are_made_on_the_device() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load("shape:llama-1b", "bfloat16", "cuda", "dummy")
    assert torch.cuda.max_memory_allocated() - before < loaded.weight_bytes * 1.3
    step = loaded.module
    ids = torch.arange(20, device="cuda")
    logits = step(ids, ids, torch.tensor([3, 19], device="cuda"))
    assert logits.shape == (2, 128256)
    assert torch.isfinite(logits).all()
