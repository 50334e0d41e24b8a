"""Draft heads in a whole engine on a CPU: drafts are those of plain torch, and tokens those without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.captured import CAPTURED
from tests.engine.test_speculation import EAGER, EAGLE, TEXTS, engine
from tests.models.drafters.eagle_heads import demo_model, hidden_states_of, random_head, reference_drafts, write_head
from tests.ranks import run_torchrun_ranks
from torchweave import LLM, SamplingParams, TorchCompileConfig
from torchweave.engine.runner.parts.drafts import DraftsPart
from torchweave.ops.slot_state import StepInputs
from torchweave.ops.speculation import DraftRows
from torchweave.verify import zoo

FUSED = TorchCompileConfig(enable_inductor=False, compile_cache=False)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_k=40, seed=5, max_tokens=24)


def speculation(folder: Path, **options: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3, "adaptive": False, **options}


def record_drafts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """(text up to the last token, drafts) of each greedy row with drafts, as steps propose them."""
    drafter, state, seen = llm.engine.runner.parts["drafts"], llm.engine.runner.state, []
    assert isinstance(drafter, DraftsPart)
    begin = drafter.begin

    def recorded(slots: torch.Tensor, views: DraftRows, inputs: StepInputs) -> None:
        begin(slots, views, inputs)
        drafts = views.drafts.view(len(slots), -1)
        for row, slot in enumerate(slots.tolist()):
            count = int(views.num_drafts[row])
            if slot >= 0 and count and not state.temperature[slot]:
                text = state.history[slot, : int(state.position[slot]) + 1].tolist()
                seen.append((text, drafts[row, :count].tolist()))

    monkeypatch.setattr(drafter, "begin", recorded)
    return seen


def test_drafts_are_those_of_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decoding rows, prefix hits, rows without drafts, catching up, and texts with accepted drafts.

    Drafts are accepted at random, so that the head takes several tokens of a row at once. No two texts share a block: of its last
    position the head would have the token of the text that was first.
    """
    weights = random_head(192, 104, 70)
    config = speculation(write_head(tmp_path, weights), synthetic_acceptance=0.6, disable_by_batch_size=4)
    options = {"block_size": 4, "max_model_len": 80, "max_batch_size": 6, "max_num_tokens": 24}
    texts = [text for text in TEXTS if text != "copy: a b a b a b a b a b"]
    with engine(config, FUSED, **options) as llm:
        seen = record_drafts(llm, monkeypatch)
        params = [GREEDY, GREEDY, SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.2), SEEDED, SEEDED]
        for prompts in (texts, texts, texts[:2]):
            llm.generate(prompts, params[: len(prompts)])
        scheduler = llm.engine.scheduler
        assert scheduler.speculation.num_accepted_tokens > 20
    model = demo_model()
    embedding = model.get_input_embeddings().weight.detach()
    distinct = {(tuple(text), tuple(drafts)) for text, drafts in seen}
    assert len(distinct) > 40
    for text, drafts in sorted(distinct)[::3]:
        states = hidden_states_of(model, list(text))[:-1]
        assert reference_drafts(weights, embedding, states, list(text), len(drafts))[0] == list(drafts), text


def test_a_model_of_another_kind_has_its_tokens(tmp_path: Path) -> None:
    """Scaled embeddings, and windows, whose layers share one group with the head."""
    model = zoo.build(zoo.zoo_model("gemma2"))
    zoo.save(model, tmp_path / "model")
    text = model.config.get_text_config()
    weights = random_head(text.hidden_size, text.vocab_size)
    taken = [1, text.num_hidden_layers, 1]
    folder = write_head(tmp_path / "head", weights, eagle_aux_hidden_state_layer_ids=taken)
    found = []
    for config, compiled in ((None, EAGER), (speculation(folder), CAPTURED)):
        prompts = [[5, 9, 4, 3, 7, 6], list(range(3, 40)), [8, 8, 8]]
        with LLM(
            str(tmp_path / "model"), device="cpu", max_num_tokens=32, max_model_len=96, speculative_config=config,
            torch_compile_config=compiled,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, [GREEDY, GREEDY, SEEDED])
            found.append([output.outputs[0].token_ids for output in outputs])
            assert (llm.engine.scheduler.speculation.num_drafts > 0) == (config is not None)
    assert found[0] == found[1]


def _tokens_and_accepted_drafts(compiled: TorchCompileConfig, **options: Any) -> tuple[list[list[int]], int]:
    with engine(EAGLE, compiled, dtype="float32", cpu_kv_cache_gib=0.02, **options) as llm:
        outputs = llm.generate([*TEXTS, "copy: tensor"], [GREEDY, SEEDED, GREEDY, GREEDY, SEEDED, GREEDY, GREEDY])
        tokens = [output.outputs[0].token_ids for output in outputs]
        return tokens, llm.engine.scheduler.speculation.num_accepted_tokens


def _serve_on_two_ranks() -> tuple[list[list[int]], int]:
    return _tokens_and_accepted_drafts(CAPTURED, tensor_parallel_size=2, executor="torchrun")


def test_every_rank_drafts_alike() -> None:
    """Each has the whole head, which reads the embeddings that the ranks share; a head that read others would draft badly."""
    alone, of_two = _tokens_and_accepted_drafts(EAGER), run_torchrun_ranks(_serve_on_two_ranks, 2)
    assert alone == of_two
    assert alone[1] > 20


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"method=eagle3 needs speculative_config.model, the name of the head"):
        engine({"method": "eagle3"})
    with pytest.raises(ValueError, match="method=eagle3 is not supported with pipeline_parallel_size=2"):
        engine(speculation(tmp_path), CAPTURED, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match=r"speculative_config.model=demo-draft: .* is no EAGLE-3 head, but has Llama"):
        engine({"method": "eagle3", "model": "demo-draft"})
