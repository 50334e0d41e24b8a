"""MTP layers in a whole engine on a CPU: drafts are those of transformers' `MtpModel`, and tokens those without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.captured import CAPTURED
from tests.engine.test_eagle import record_drafts
from tests.models.drafters.mtp_checkpoints import (
    MODELS,
    needs_mtp,
    reference_drafts,
    transformers_models,
    write_checkpoint,
)
from tests.parameters import few
from tests.ranks import run_torchrun_ranks
from torchweave import LLM, SamplingParams, TorchCompileConfig
from torchweave.compiler.explain.facts import explain
from torchweave.report import Report
from torchweave.verify import zoo

pytestmark = needs_mtp
MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_k=40, seed=5, max_tokens=24)
PENALTY = SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.2)
PROMPTS = [[5, 9, 4, 3, 7, 6], list(range(3, 60)), [8, 8, 8, 8], [200, 3, 17, 90, 41, 33, 2, 250], [7]]


FUSED = TorchCompileConfig(enable_inductor=False, compile_cache=False)
EAGER = TorchCompileConfig(enable_fullgraph=False)
"""For tests of the scheduler and the tokens, since a capture takes seconds; drafts are those of a captured model and layer."""


def engine(
    folder: Path,
    speculative_config: dict[str, Any] | None,
    compile_config: TorchCompileConfig = EAGER,
    **options: Any,
) -> LLM:
    sizes: dict[str, Any] = {"block_size": 4, "max_num_tokens": 24, "max_model_len": 128, "max_batch_size": 6}
    return LLM(
        str(folder),
        device="cpu",
        report=Report(show=False),
        speculative_config=speculative_config,
        torch_compile_config=compile_config,
        **sizes | options,
    )


@pytest.fixture(scope="module", params=few(MODELS, ("deepseek_v3",)))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_checkpoint(tmp_path_factory.mktemp("mtp") / request.param, request.param)


def tokens(llm: LLM, params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def test_drafts_are_those_of_transformers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decoding rows, prefix hits, rows without drafts, catching up, and texts with accepted drafts.

    Drafts are accepted at random, so that the layer takes several tokens of a row at once.
    """
    config = MTP | {"synthetic_acceptance": 0.6, "disable_by_batch_size": 4}
    with engine(checkpoint, config, FUSED if checkpoint.name == "glm4_moe" else CAPTURED) as llm:
        seen = record_drafts(llm, monkeypatch)
        for prompts in (PROMPTS, PROMPTS, PROMPTS[:2]):
            llm.generate(prompts, [GREEDY, GREEDY, PENALTY, SEEDED, SEEDED][: len(prompts)])
        assert llm.engine.scheduler.speculation.num_accepted_tokens > 20
    model, mtp = transformers_models(checkpoint)
    distinct = {(tuple(text), tuple(drafts)) for text, drafts in seen}
    assert len(distinct) > 20
    for text, drafts in sorted(distinct)[::2]:
        assert reference_drafts(model, mtp, list(text), len(drafts))[0] == list(drafts), text


def test_tokens_are_those_of_transformers_and_without_speculation(checkpoint: Path) -> None:
    """Greedy, seeded and penalized rows in chunks, and once more behind prefix hits."""
    params = [replace(each, max_tokens=20) for each in (GREEDY, SEEDED, GREEDY, PENALTY, SEEDED)]
    found = []
    for config in (None, MTP):
        with engine(checkpoint, config) as llm:
            found.append([tokens(llm, params), tokens(llm, params)])
            assert (llm.engine.scheduler.speculation.num_drafts > 0) == (config is not None)
    assert found[1] == found[0]
    model, _ = transformers_models(checkpoint)
    wanted = zoo.reference_tokens(model, [PROMPTS[0], PROMPTS[2]], 20)
    assert [found[1][0][0], found[1][0][2]] == wanted


def test_pauses_and_adaptive_drafts(tmp_path: Path) -> None:
    """Paused rows start again with the hidden states of their blocks, and steps differ in their numbers of drafts."""
    folder, found = write_checkpoint(tmp_path, "glm4_moe"), []
    greedy, seeded = (replace(params, max_tokens=20) for params in (GREEDY, SEEDED))
    options: dict[str, Any] = {"num_kv_blocks": 24, "capacity_scheduler_policy": "max_utilization", "max_model_len": 96}
    for config in (None, MTP, MTP | {"adaptive": True, "num_speculative_tokens": 4}):
        with engine(folder, config, **options) as llm:
            found.append([tokens(llm, [greedy, seeded, greedy, seeded, greedy]) for _ in range(2)])
            scheduler = llm.engine.scheduler
            scheduler.check()
            assert scheduler.paused_total > 0 and scheduler.kv.num_free == scheduler.kv.num_blocks
            assert (scheduler.speculation.num_drafts > 0) == (config is not None)
    assert found[1] == found[0] and found[2] == found[0]


def _tokens_and_drafts(folder: Path, **options: Any) -> tuple[list[list[int]], list[Any]]:
    with (
        engine(folder, MTP, dtype="float32", cpu_kv_cache_gib=0.02, **options) as llm,
        pytest.MonkeyPatch.context() as patch,
    ):
        seen = record_drafts(llm, patch)
        return tokens(llm, [GREEDY, SEEDED, GREEDY, SEEDED, GREEDY]), sorted(seen)


def _serve_on_two_ranks(folder: Path) -> tuple[list[list[int]], list[Any]]:
    return _tokens_and_drafts(folder, tensor_parallel_size=2, executor="torchrun")


@pytest.mark.whole
def test_every_rank_drafts_alike(tmp_path: Path) -> None:
    """The layer is divided as the model is, with the embeddings and the head that the ranks share."""
    folder = write_checkpoint(tmp_path, "deepseek_v3")
    alone, of_two = _tokens_and_drafts(folder), run_torchrun_ranks(_serve_on_two_ranks, 2, folder)
    assert alone == of_two
    assert len(alone[1]) > 40


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "glm4_moe", layer=False)
    with pytest.raises(ValueError, match=r"method=mtp: the checkpoint of .* has no MTP layer; choose one with it"):
        engine(folder, MTP)
    with pytest.raises(ValueError, match="method=mtp is not supported with pipeline_parallel_size=2"):
        engine(folder, MTP, CAPTURED, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match=r"model=other is used by .*, but the method is mtp; set the method or remove"):
        engine(folder, MTP | {"model": "other"})
    with pytest.raises(ValueError, match=r"method=mtp: transformers .* has no MTP layers of llama"):
        LLM("demo", device="cpu", speculative_config=MTP, report=Report(show=False))


def test_a_model_whose_layers_are_of_several_kinds_is_refused(tmp_path: Path) -> None:
    zoo.save(zoo.build(zoo.zoo_model("bailing_hybrid")), tmp_path)
    with pytest.raises(
        ValueError, match=r"method=mtp: transformers .* does not tell the kind of the MTP layer of bailing_hybrid"
    ):
        engine(tmp_path, MTP)


def test_the_plan_and_explain_name_the_layer(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mellum")
    with engine(folder, MTP) as llm:
        facts = explain(llm.plan, llm.report)
    entry = next(each for each in facts["plan"] if each["name"] == "speculative_config.model")
    assert (entry["effective"], entry["why"]) == (str(folder), "its checkpoint has the MTP layer")
    assert facts["draft_model"]["architecture"] == "MTP" and facts["draft_model"]["layers"] == 1
    _, mtp = transformers_models(folder)
    assert facts["draft_model"]["parameters"] == sum(each.numel() for each in mtp.layers.parameters())
