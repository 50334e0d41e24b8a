"""Architectures of the zoo on a GPU give the tokens of transformers: indexers, recurrent layers, experts, images."""

from __future__ import annotations

import pytest

from torchweave.verify.verify import verify

pytestmark = pytest.mark.gpu

MODELS = [
    "bloom", "mpt", "roberta", "glm_moe_dsa", "zamba", "zaya", "inkling_text", "kimi_linear", "qwen3_vl-images", "llava-images",
    "phimoe",
]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_eager(name: str) -> None:
    row = verify([name], device="cuda")["results"][0]
    assert row["passed"], row["reason"]


@pytest.mark.parametrize("name", ["dbrx", "minimax_m3_vl_text"])
def test_experts_that_need_a_grouped_product_in_bfloat16(name: str) -> None:
    row = verify([name], device="cuda")["results"][0]
    assert "cannot be served in float32 on a GPU: its experts need" in row["reason"]
