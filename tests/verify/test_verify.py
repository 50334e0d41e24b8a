"""`models verify`: its output for equal tokens, different tokens, and rejected models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import run_ranks
from torchweave.images import EncodedPrompt
from torchweave.report import Report
from torchweave.verify import verify as module
from torchweave.verify import zoo
from torchweave.verify.ranks import RankResult, generate
from torchweave.verify.verify import _config, prompts, table, verify


def test_architectures_pass_in_the_whole_engine() -> None:
    report = Report(show=False)
    result = verify(["gemma2", "qwen3_moe"], report)
    assert (result["passed"], result["total"]) == (2, 2)
    gemma = result["results"][0]
    assert gemma["how"] == "captured"
    assert 0 < gemma["distinct_pieces"] <= gemma["pieces"] == 4
    assert len(report.select("verified")) == 2


def test_ranks_answer_each_prompt_again_from_the_prefix_cache(tmp_path: Path) -> None:
    entry = zoo.zoo_model("llama-tied")
    zoo.save(zoo.build(entry), tmp_path)
    encoded = [EncodedPrompt(np.array(prompt)) for prompt in prompts()]
    for result in run_ranks(generate, 2, _config(entry, str(tmp_path), None, "cpu"), encoded, 4):
        tokens = [answer.tokens for answer in result.answers]
        assert len(tokens) == 2 * len(prompts()) and tokens[: len(prompts())] == tokens[len(prompts()) :]
        assert result.num_cached_tokens > 0


@pytest.mark.whole
def test_architectures_pass_on_two_ranks_and_the_page_has_a_column_for_them() -> None:
    result = verify(["falcon-alibi", "llama-tied", "gemma3-images"], ranks=(2,))
    falcon, llama, gemma = result["results"]
    assert gemma["passed"], gemma["reason"]
    assert not falcon["passed"] and "ALiBi" in falcon["reason"], "a refusal is a row, and the ranks go on"
    assert llama["passed"] and (llama["distinct_pieces"], llama["pieces"]) == (3, 4)
    alone = [row | {"ranks": 1} for row in (falcon, llama)]
    page = table(result | {"results": [*alone, falcon, llama], "refused": []})
    assert "(transformers" in page and ", and 1 of 2 sharded over 2 ranks." in page
    assert "| llama-tied | LlamaForCausalLM | yes | yes | 3 / 4 |" in page
    assert "--all --tensor_parallel_size 1,2 --write" in page
    codegen = llama | {"name": "codegen", "architecture": "CodeGenForCausalLM", "ranks": 1}
    part = table(result | {"results": [*alone, codegen, llama], "refused": []})
    assert "--all --write" in part and "| codegen | CodeGenForCausalLM | yes |  | 3 / 4 |" in part


@pytest.fixture(scope="module")
def served() -> RankResult:
    """What the engine answers for Llama, for tests of the comparison."""
    results, serve = list[RankResult](), module._serve
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_serve", lambda *given: results.append(serve(*given)) or results[-1])
        assert verify(["llama"])["passed"] == 1
    return results[0]


@pytest.mark.parametrize(
    ("field", "by", "named"),
    [
        ("tokens", 1, "prompt of 70 tokens: token 5 is"),
        ("logprobs", 2e-3, "prompt of 70 tokens: token 5 has the log-probability"),
    ],
)
def test_a_wrong_token_or_log_probability_is_named(
    field: str, by: float, named: str, served: RankResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = module.zoo.reference_answers

    def wrong(*args: Any) -> list[module.zoo.Answer]:
        answers = right(*args)
        getattr(answers[1], field)[5] += by
        return answers

    monkeypatch.setattr(module.zoo, "reference_answers", wrong)
    monkeypatch.setattr(module, "_serve", lambda *_: served)
    result = verify(["llama"])
    assert result["passed"] == 0
    assert named in result["results"][0]["reason"]
    assert "**no**" in table(result | {"refused": [{"name": "x", "reason": "a | b"}]})


def test_model_error_is_a_row_and_unknown_name_an_error() -> None:
    result = verify(["falcon-alibi"])
    assert result["passed"] == 0
    assert "ALiBi" in result["results"][0]["reason"]
    with pytest.raises(ValueError, match="did you mean llama"):
        verify(["lama"])
    with pytest.raises(ValueError, match="tensor_parallel_size is 0: expected numbers of at least 1"):
        verify(["llama"], ranks=(0,))
    with pytest.raises(ValueError, match="pipeline_parallel_size is 0: expected at least 1"):
        verify(["llama"], stages=0)
