"""Memory-bandwidth lower bound of a decode step (roofline)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchweave.bench.roofline import decode_bytes
from torchweave.models import load
from torchweave.verify import zoo


def fake_llm(name: str) -> Any:
    loaded = load(zoo.zoo_model(name).config().to_dict(), load_format="dummy")
    return SimpleNamespace(engine=SimpleNamespace(loaded=loaded))


def test_moe_step_reads_only_the_routed_experts() -> None:
    """The example model has 8 experts; each token selects 2."""
    llm = fake_llm("qwen3_moe")
    loaded = llm.engine.loaded
    experts = sum(weight.numel() * 4 for weight in loaded.module.parameters() if weight.ndim == 3)
    table = loaded.module.model.get_input_embeddings().weight
    every = loaded.weight_bytes - table.numel() * 4
    for batch_size, read in ((1, 1 / 4), (2, 7 / 16), (64, 1.0)):
        assert decode_bytes(llm, batch_size, 0) == pytest.approx(every - (1 - read) * experts, rel=1e-6)


def test_dense_step_reads_weights_once_and_kv_cache_per_request() -> None:
    llm = fake_llm("llama-tied")
    loaded = llm.engine.loaded
    layer = loaded.module.attention_layers[0]
    rows = 5 * 100 * len(loaded.module.attention_layers) * layer.bytes_per_token(loaded.dtype)
    assert decode_bytes(llm, 5, 100) == loaded.weight_bytes + rows
