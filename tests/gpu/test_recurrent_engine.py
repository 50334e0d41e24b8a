"""Recurrent layers in a whole engine on a GPU: chunked prefill, CUDA graphs, and slots that serve several requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_recurrent_speculation import check_states_of_kept_tokens
from tests.verify.test_zoo import prompts
from torchweave import LLM, SamplingParams
from torchweave.verify import zoo
from torchweave.verify.verify import verify

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon_h1", "jamba", "lfm2", "minimax", "kimi_linear"])
def test_tokens_equal_eager(name: str, tmp_path: Path) -> None:
    model = zoo.build(zoo.zoo_model(name))
    zoo.save(model, tmp_path)
    expected = zoo.reference_tokens(model.to("cuda"), prompts(), 8)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    options = {"max_batch_size": 4, "max_num_tokens": 64, "num_kv_blocks": 64, "max_model_len": 256}
    with LLM(str(tmp_path), dtype="float32", device="cuda", **options) as llm:
        for _ in range(2):  # the second time in slots that hold states
            answers = [list(output.outputs[0].token_ids) for output in llm.generate(prompts(), greedy)]
            assert answers == expected


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon_h1", "jamba", "lfm2", "minimax", "recurrent_gemma"])
def test_states_are_those_of_the_tokens_that_were_kept(name: str, tmp_path: Path) -> None:
    """Recorded steps of several requests, whose drafts are kept at random."""
    zoo.save(zoo.build(zoo.zoo_model(name)), tmp_path)
    check_states_of_kept_tokens(tmp_path, "cuda")


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "kimi_linear", "recurrent_gemma"])
def test_speculation_changes_no_token(name: str) -> None:
    row = verify([name], device="cuda", num_speculative_tokens=3)["results"][0]
    assert row["passed"], row["reason"]
