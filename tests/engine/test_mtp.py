"""MTP layers in a whole engine on a CPU: drafts are those of transformers' `MtpModel`, and tokens those without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers.modeling_layers", reason="needs transformers with MTP layers")
modeling_layers = pytest.importorskip("transformers.modeling_layers")
if not hasattr(modeling_layers, "MtpModel"):
    pytest.skip("this transformers has no MTP layers", allow_module_level=True)

from tests.engine.test_eagle import record_drafts
from tests.models.mtp_checkpoints import MODELS, reference_drafts, transformers_models, write_checkpoint
from torchweave import LLM, SamplingParams
from torchweave.report import Report
from torchweave.verify import zoo

MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_k=40, seed=5, max_tokens=24)
PENALTY = SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.2)
PROMPTS = [[5, 9, 4, 3, 7, 6], list(range(3, 60)), [8, 8, 8, 8], [200, 3, 17, 90, 41, 33, 2, 250], [7]]


def engine(folder: Path, speculative_config: dict[str, Any] | None, **options: Any) -> LLM:
    return LLM(
        str(folder),
        device="cpu",
        report=Report(show=False),
        speculative_config=speculative_config,
        torch_compile_config={"enable_inductor": False, "compile_cache": False},
        **{"block_size": 4, "max_num_tokens": 24, "max_model_len": 128, "max_batch_size": 6} | options,
    )


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_checkpoint(tmp_path_factory.mktemp("mtp") / request.param, request.param)


def tokens(llm: LLM, params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def test_drafts_are_those_of_transformers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decoding rows, prefix hits, rows without drafts, catching up, and texts with accepted drafts.

    Drafts are accepted at random, so that the layer takes several tokens of a row at once.
    """
    config = MTP | {"synthetic_acceptance": 0.6, "disable_by_batch_size": 4}
    with engine(checkpoint, config) as llm:
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
    params = [GREEDY, SEEDED, GREEDY, PENALTY, SEEDED]
    found = []
    for config in (None, MTP):
        with engine(checkpoint, config) as llm:
            found.append([tokens(llm, params), tokens(llm, params)])
            assert (llm.engine.scheduler.speculation.num_drafts > 0) == (config is not None)
    assert found[1] == found[0]
    model, _ = transformers_models(checkpoint)
    wanted = zoo.reference_tokens(model, [PROMPTS[0], PROMPTS[2]], 32)
    assert [found[1][0][0], found[1][0][2]] == wanted
