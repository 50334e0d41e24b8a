"""Architectures of the zoo on a GPU give the tokens of transformers: indexers, recurrent layers, experts, images."""

from __future__ import annotations

import pytest

from torchweave.verify.verify import verify

pytestmark = pytest.mark.gpu

MODELS = [
    "bloom", "mpt", "roberta", "minimax_m3_vl_text", "glm_moe_dsa", "zamba", "zaya", "inkling_text", "kimi_linear", "dbrx",
    "qwen3_vl-images", "llava-images",
]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_eager(name: str) -> None:
    row = verify([name], device="cuda")["results"][0]
    assert row["passed"], row["reason"]
