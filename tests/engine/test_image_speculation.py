"""Drafts for prompts with images on a CPU: the tokens of transformers, and those without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.captured import CAPTURED
from tests.engine.test_eagle import record_drafts, speculation
from tests.engine.test_image_models import EAGER
from tests.engine.test_image_models import engine as image_engine
from tests.engine.test_image_models import tokens as tokens_of
from tests.engine.test_speculation import SPECULATION
from tests.models.drafters.eagle_heads import random_head, reference_drafts, write_head
from torchweave import LLM, SamplingParams, TorchCompileConfig
from torchweave.config.options import SpeculativeConfig
from torchweave.engine.runner.parts import drafts as drafts_part
from torchweave.engine.runner.parts import images as images_part
from torchweave.images import EncodedPrompt
from torchweave.ops.slot_state import SlotState
from torchweave.ops.speculation import DraftRows
from torchweave.verify import image_zoo, zoo

NUM_TOKENS = 16
NEVER: Any = {"min_tokens": NUM_TOKENS, "stop_token_ids": [image_zoo.IMAGE_TOKEN], "ignore_eos": True}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, **NEVER)
SEEDED = SamplingParams(temperature=0.7, top_k=20, seed=5, max_tokens=NUM_TOKENS, **NEVER)


def engine(folder: Path, compile_config: TorchCompileConfig, drafts: dict[str, Any] | None) -> LLM:
    config = SpeculativeConfig(**drafts or {})
    return image_engine(folder, compile_config, speculative_config=config, max_batch_size=4, max_num_tokens=16)


class Saved:
    """A model of the zoo in a folder, prompts with images, and transformers' greedy tokens."""

    def __init__(self, name: str, folder: Path) -> None:
        entry = image_zoo.zoo_entry(name)
        assert isinstance(entry, image_zoo.ImageZooModel)
        self.entry, self.model, self.folder = entry, entry.build(), folder
        zoo.save(self.model, folder)
        self.prompts: list[EncodedPrompt] = image_zoo.image_prompts(entry, self.model)
        answers = image_zoo.image_reference_answers(entry, self.model, self.prompts, NUM_TOKENS)
        self.expected = [answer.tokens for answer in answers]


@pytest.fixture(scope="module", params=["qwen3_vl-images", "qwen3_5-images"])
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Positions of three axes; Qwen3-VL adds features in layers, and Qwen 3.5 has recurrent ones."""
    return Saved(request.param, tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def llm(qwen: Saved) -> Iterator[LLM]:
    with engine(qwen.folder, CAPTURED, SPECULATION) as running:
        yield running


def know_answers(qwen: Saved, answers: list[list[int]]) -> Any:
    """`propose` that knows the answers; the third draft of a step that begins at an even position is wrong."""
    known = [[*prompt.token_ids.tolist(), *answer] for prompt, answer in zip(qwen.prompts, answers, strict=True)]

    def propose(state: SlotState, slots: torch.Tensor, _: Any, rows: DraftRows) -> None:
        most, drafts = rows.query_len - 1, rows.drafts.view(len(slots), -1)
        for row, slot in enumerate(slots.tolist()):
            position = int(state.position[slot])
            text, room = state.history[slot, : position + 1].tolist(), int(state.draft_limit[slot]) - position
            behind = next((each[len(text) :] for each in known if each[: len(text)] == text), [])
            rows.num_drafts[row] = min(most, room, len(behind)) if slot >= 0 else 0
            for place in range(max(int(rows.num_drafts[row]), 0)):
                drafts[row, place] = behind[place] ^ int(place == 2 and position % 2 == 0)

    return propose


def test_accepted_and_rejected_drafts_change_no_token(llm: LLM, qwen: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(qwen.folder, EAGER, None) as plain:
        seeded = tokens_of(plain, qwen.prompts, SEEDED)
    drafts = llm.engine.scheduler.speculation
    assert tokens_of(llm, qwen.prompts, GREEDY) == qwen.expected and tokens_of(llm, qwen.prompts, SEEDED) == seeded
    assert drafts.num_draft_tokens > drafts.num_accepted_tokens, "of prompt lookup"
    for params, answers in ((GREEDY, qwen.expected), (SEEDED, seeded)):
        monkeypatch.setattr(drafts_part, "propose", know_answers(qwen, answers))
        before = drafts.num_accepted_tokens, drafts.num_draft_tokens
        assert tokens_of(llm, qwen.prompts, params) == answers
        accepted, proposed = drafts.num_accepted_tokens - before[0], drafts.num_draft_tokens - before[1]
        assert 30 < accepted < proposed


def test_drafts_are_rotated_by_the_positions_of_their_request(
    llm: LLM, qwen: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a row of text and a row behind images, whose positions are behind by different numbers."""
    monkeypatch.setattr(images_part, "fill_rope_offsets", lambda state, slots, start, out: out.zero_())
    assert tokens_of(llm, qwen.prompts[:1], GREEDY) == qwen.expected[:1]
    assert tokens_of(llm, qwen.prompts[2:3], GREEDY) != qwen.expected[2:3]
    llm.engine.scheduler.kv.reset()


def test_a_draft_model_reads_placeholders(tmp_path: Path) -> None:
    """LLaVA's own decoder of text: it knows the answers to text, and its embeddings have no rows of images."""
    saved = Saved("llava-images", tmp_path)
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3, "adaptive": False}
    with engine(tmp_path, EAGER, config) as llm:
        drafts = llm.engine.scheduler.speculation
        assert tokens_of(llm, saved.prompts[:1], GREEDY) == saved.expected[:1]
        assert drafts.num_accepted_tokens > 0.9 * drafts.num_draft_tokens
        for _ in range(2):
            assert tokens_of(llm, saved.prompts, GREEDY) == saved.expected
    few = replace(zoo.zoo_model("llama"), options={**zoo.zoo_model("llama").options, "vocab_size": 240})
    zoo.save(zoo.build(few), tmp_path / "few")
    with pytest.raises(ValueError, match="has 240 tokens, not the image token 250 of"):
        engine(tmp_path, EAGER, config | {"model": str(tmp_path / "few")})


def test_a_head_takes_hidden_states_of_images_and_embeddings_of_placeholders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config has positions of three axes, as those of published heads for image-text models."""
    saved = Saved("qwen2_vl-images", tmp_path)
    prompts = saved.prompts[:3]  # the last one has the tokens of another and another image
    weights = random_head(64, zoo.VOCAB)
    rope = {"rope_theta": 5000.0, "rope_type": "mrope", "mrope_section": [2, 3, 3]}
    folder = write_head(
        tmp_path / "head", weights, "eagle", rope_parameters=rope, eagle_config={}, **{TAKEN: [1, 1, 1]}
    )
    config = speculation(folder, synthetic_acceptance=0.6)
    with engine(tmp_path, CAPTURED, config) as llm:
        seen = record_drafts(llm, monkeypatch)
        tokens_of(llm, prompts, GREEDY)
        assert llm.engine.scheduler.speculation.num_accepted_tokens > 10
    with engine(tmp_path, EAGER, config | {"synthetic_acceptance": None}) as llm:
        assert tokens_of(llm, saved.prompts, GREEDY) == saved.expected
    model, compared = saved.model.double(), 0
    embedding: Any = model.get_input_embeddings()
    for text, drafts in seen:
        prompt = next(each for each in prompts if each.token_ids.tolist() == text[: len(each.token_ids)])
        states = _hidden_states(saved, prompt, text)[:-1]
        assert reference_drafts(weights, embedding.weight.detach(), states, text, len(drafts))[0] == drafts, text
        compared += len(prompt.images) > 0
    assert compared > 10


TAKEN = "eagle_aux_hidden_state_layer_ids"


@torch.no_grad()
def _hidden_states(saved: Saved, prompt: EncodedPrompt, text: list[int]) -> torch.Tensor:
    """transformers' hidden states after the first layer, three times, `[T, 3 H]` in float64."""
    given = image_zoo._joined(saved.entry, prompt.images)
    if given:
        given["pixel_values"] = given["pixel_values"].double()
    given["mm_token_type_ids"] = torch.tensor([[int(token == image_zoo.IMAGE_TOKEN) for token in text]])
    output: Any = saved.model(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False, **given)
    return torch.cat([output.hidden_states[1][0]] * 3, -1)


def test_mtp_with_images_is_refused(qwen: Saved) -> None:
    with pytest.raises(
        ValueError, match=r"method=mtp is not supported for .*, which takes images; choose another method"
    ):
        engine(qwen.folder, EAGER, {"method": "mtp"})
