"""Speculation of models with recurrent layers in a whole engine on a CPU: states advance by the tokens that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.captured import CAPTURED
from tests.engine.test_eagle import record_drafts
from tests.engine.test_recurrent_models import (
    EAGER,
    GREEDY,
    MIXED,
    REUSE,
    engine,
    engine_without_loop,
    prompts,
    serve_mixed_requests,
    with_common_beginning,
)
from tests.models.drafters.eagle_heads import hidden_states_of, random_head, reference_drafts, write_head
from tests.parameters import few
from tests.ranks import run_ranks
from torchweave import LLM, SamplingParams
from torchweave.config.options import SpeculativeConfig
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.engine.request import InferenceRequest
from torchweave.engine.runner.model_runner import ModelRunner
from torchweave.engine.runner.parts import drafts as drafts_part
from torchweave.engine.runner.parts.drafts import DraftsPart
from torchweave.engine.startup.build import Engine
from torchweave.ops.slot_state import SlotState
from torchweave.ops.speculation import DraftOptions, DraftRows
from torchweave.report import Report
from torchweave.verify import zoo

NGRAM = SpeculativeConfig("ngram", num_speculative_tokens=3, prompt_lookup_min=1, adaptive=False)
SEEDED = SamplingParams(temperature=0.9, top_k=40, seed=5, max_tokens=12, ignore_eos=True)


def draft_from(monkeypatch: pytest.MonkeyPatch, texts: Sequence[Sequence[int]]) -> None:
    """Draft what follows in `texts`: a random number of tokens, each right with probability 0.8."""
    rng = np.random.default_rng(1)

    def propose(state: SlotState, slots: Tensor, options: DraftOptions, rows: DraftRows) -> None:
        history, position, limit = (state.host_arrays[name] for name in ("history", "position", "draft_limit"))
        most = rows.query_len - 1
        drafts, num_drafts = rows.drafts.numpy().reshape(-1, most), rows.num_drafts.numpy()
        num_drafts[...] = 0
        for row, slot in enumerate(slots.tolist()):
            text = history[slot, : position[slot] + 1].tolist()
            follows = next((each[len(text) :] for each in texts if list(each[: len(text)]) == text), ())
            room = min(int(limit[slot] - position[slot]), len(follows), int(rng.integers(most + 1)))
            if slot >= 0 and room > 0:
                num_drafts[row] = room
                drafts[row, :room] = [token if rng.random() < 0.8 else 4 for token in follows[:room]]

    monkeypatch.setattr(drafts_part, "propose", propose)


def joined(given: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[int]]:
    return [[*prompt, *answer] for prompt, answer in zip(given, answers, strict=True)]


def generate(llm: LLM, given: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(list(given), params)]


@pytest.mark.parametrize(
    "name", few(["mamba", "qwen3_next", "kimi_linear", "recurrent_gemma"], ["mamba", "qwen3_next"])
)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside drafts, then prefix hits; most drafts are right, so that rows keep one to four tokens."""
    model, given = zoo.build(zoo.zoo_model(name)), prompts(6)
    zoo.save(model, tmp_path)
    expected = zoo.reference_tokens(model, given, 12)
    draft_from(monkeypatch, joined(given, expected))
    with engine(tmp_path, CAPTURED, max_batch_size=3, speculative_config=NGRAM, **REUSE) as llm:
        assert generate(llm, given, GREEDY) == expected
        assert generate(llm, given, GREEDY) == expected
        counts = llm.engine.scheduler.speculation
        assert 30 < counts.num_accepted_tokens < counts.num_draft_tokens - 10
        llm.engine.scheduler.check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("falcon_h1")
    zoo.save(zoo.build(zoo.zoo_model("falcon_h1")), path)
    return path


@pytest.fixture(scope="module")
def seeded(folder: Path) -> list[list[int]]:
    """Sampled answers without speculation."""
    with engine(folder, max_batch_size=3, **REUSE) as llm:
        return generate(llm, prompts(4), SEEDED)


def test_a_seed_has_its_answer(folder: Path, seeded: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    draft_from(monkeypatch, joined(prompts(4), seeded))
    with engine(folder, max_batch_size=3, speculative_config=NGRAM, **REUSE) as llm:
        assert generate(llm, prompts(4), SEEDED) == seeded
        assert llm.engine.scheduler.speculation.num_accepted_tokens > 10


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3"])
def test_draft_models_and_heads(folder: Path, tmp_path: Path, seeded: list[list[int]], drafter: Any) -> None:
    """A Llama with the same vocabulary, and a random EAGLE-3 head."""
    if drafter == "eagle3":
        text = zoo.zoo_model("falcon_h1").config().get_text_config()
        weights = random_head(text.hidden_size, text.vocab_size)
        path = write_head(tmp_path / "head", weights, eagle_aux_hidden_state_layer_ids=[1, text.num_hidden_layers, 1])
    else:
        path = tmp_path / "llama"
        zoo.save(zoo.build(zoo.zoo_model("llama")), path)
    config = replace(NGRAM, method=drafter, model=str(path))
    with engine(folder, max_batch_size=3, speculative_config=config, **REUSE) as llm:
        for _ in range(2):
            assert generate(llm, prompts(4), SEEDED) == seeded
        assert llm.engine.scheduler.speculation.num_draft_tokens > 40


def test_a_head_reads_hidden_states_of_recurrent_layers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts are those of plain torch, behind drafts that were kept at random, chunks and prefix hits."""
    model = zoo.build(zoo.zoo_model("falcon_h1"))
    embedding, taken = model.get_input_embeddings().weight.detach().double(), (1, 2, 1)
    weights = random_head(embedding.shape[1], embedding.shape[0])
    head = write_head(tmp_path / "head", weights, eagle_aux_hidden_state_layer_ids=list(taken))
    config = replace(NGRAM, method="eagle3", model=str(head), synthetic_acceptance=0.6)
    with engine(folder, max_batch_size=3, speculative_config=config, **REUSE) as llm:
        seen = record_drafts(llm, monkeypatch)
        for _ in range(2):
            generate(llm, prompts(6), GREEDY)
        assert llm.engine.scheduler.speculation.num_accepted_tokens > 20
    distinct = sorted({(tuple(text), tuple(drafts)) for text, drafts in seen})[::3]
    assert len(distinct) > 10
    for text, drafts in distinct:
        states = hidden_states_of(model, list(text), taken)[:-1].double()
        assert reference_drafts(weights, embedding, states, list(text), len(drafts))[0] == list(drafts), text


def test_mixed_requests_with_cancels_leave_every_state_slot_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses, cancels, prefix hits and chunks between steps with drafts."""
    shared = with_common_beginning()
    expected = zoo.reference_tokens(zoo.build(zoo.zoo_model("falcon_h1")), shared, 6)
    draft_from(monkeypatch, joined(shared, expected))
    built = engine_without_loop(folder, speculative_config=NGRAM, **MIXED)
    serve_mixed_requests(built, shared, expected, 150)
    assert built.scheduler.speculation.num_accepted_tokens > 60 and built.scheduler.paused_total > 0


class Replay:
    """A step of fixed size, padded as a recording is."""

    def __init__(self, runner: ModelRunner, rows: int, query_len: int) -> None:
        drafts = runner.parts["drafts"]
        assert isinstance(drafts, DraftsPart)
        self._run, self._boundary = drafts.program(rows, query_len), drafts.boundary(rows, query_len)

    def replay(self) -> None:
        self.output = self._run(self._boundary)


def serve(built: Engine, texts: Sequence[tuple[list[int], int]]) -> list[Tensor]:
    """Serve prompts with a number of tokens; returns the states afterwards."""
    scheduler, runner = built.scheduler, built.runner
    for number, (prompt, count) in enumerate(texts):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        scheduler.add(InferenceRequest(number, np.asarray(prompt), params), seed=0)
    while scheduler.num_active:
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(step, runner.collect(runner.launch(step)))
    return [state.clone() for state in runner.recurrent_states]


def test_states_are_those_without_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of padding alone change no state, nor do rows and tokens behind those of the step in a larger recording."""
    given = prompts(2)
    expected = zoo.reference_tokens(zoo.build(zoo.zoo_model("falcon_h1")), given, 12)
    texts = [(prompt, 12) for prompt in given]
    draft_from(monkeypatch, joined(given, expected))
    plain = serve(engine_without_loop(folder, max_batch_size=4, **REUSE), texts)
    for padded in (False, True):
        built = engine_without_loop(folder, max_batch_size=4, speculative_config=NGRAM, **REUSE)
        runner = built.runner
        for state in runner.recurrent_states:
            state.fill_(0.5)
        runner.run_dummy_draft_step(4, 4)
        assert all((state == 0.5).all() for state in runner.recurrent_states)
        if padded:
            monkeypatch.setattr(runner.recordings, "drafts", {4: {4: Replay(runner, 4, 4)}})
        found = serve(built, texts)
        assert built.scheduler.speculation.num_accepted_tokens > 6
        for one, other in zip(plain, found, strict=True):
            torch.testing.assert_close(one[:2], other[:2], rtol=1e-4, atol=1e-4)
            assert (other[2:4] == 0.5).all(), "a padding row advanced a state"


def check_states_of_kept_tokens(folder: Path, device: str, **options: Any) -> None:
    """Keep drafts at random, and compare each slot's states with those of a request whose prompt is the slot's text."""
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    options |= {"dtype": "float32", "device": device, "max_model_len": 128, "num_kv_blocks": 64, "max_num_tokens": 64}
    config = replace(NGRAM, synthetic_acceptance=0.6)
    with LLM(str(folder), speculative_config=config, max_batch_size=4, report=Report(show=False), **options) as llm:
        llm.generate(prompts(4), greedy)
        assert llm.engine.scheduler.speculation.num_accepted_tokens > 20
        state, states = llm.engine.runner.state, [each[:4].clone() for each in llm.engine.runner.recurrent_states]
        texts = [state.history[slot, : int(state.position[slot])].tolist() for slot in range(4)]
    assert min(map(len, texts)) > 10
    with LLM(str(folder), max_batch_size=1, report=Report(show=False), **options) as llm:
        for slot, text in enumerate(texts):
            llm.generate([text], replace(greedy, max_tokens=1))
            for kept, whole in zip(states, llm.engine.runner.recurrent_states, strict=True):
                torch.testing.assert_close(kept[slot], whole[0], rtol=1e-3, atol=1e-3)


def test_states_follow_the_tokens_that_are_kept(folder: Path) -> None:
    check_states_of_kept_tokens(folder, "cpu", torch_compile_config=EAGER)


def _speculate_on_a_rank(process_groups: ProcessGroups, folder: Path, expected: list[list[int]]) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        draft_from(monkeypatch, joined(with_common_beginning(), expected))
        built = engine_without_loop(folder, CAPTURED, process_groups, speculative_config=NGRAM, **MIXED)
        built.runner.start()
        serve_mixed_requests(built, with_common_beginning(), expected, 60, process_groups)
    return built.scheduler.speculation.num_accepted_tokens


def test_states_that_are_divided_over_ranks(folder: Path) -> None:
    expected = zoo.reference_tokens(zoo.build(zoo.zoo_model("falcon_h1")), with_common_beginning(), 6)
    first, second = run_ranks(_speculate_on_a_rank, 2, folder, expected)
    assert first == second > 20


def test_what_is_not_supported_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"method=mtp: transformers .* has no MTP layers of falcon_h1"):
        engine(folder, EAGER, speculative_config=SpeculativeConfig("mtp", num_speculative_tokens=3))
    draft = replace(NGRAM, method="draft_model", model=str(folder))
    with pytest.raises(ValueError, match="a draft model has attention to all its keys or to a window in every layer"):
        engine(folder, EAGER, speculative_config=draft)
