"""Speculation in a whole engine on a CPU: the same tokens as without, whatever the requests, and fewer steps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.captured import CAPTURED
from tests.engine.scheduler.simulate import Simulation, run
from torchweave import LLM, SamplingParams, TorchCompileConfig
from torchweave.config.model_source import resolve
from torchweave.engine.request import StructuredOutputs
from torchweave.engine.runner.model_runner import ModelRunner
from torchweave.engine.runner.parts.drafts import DraftsPart
from torchweave.report import Report
from torchweave.verify import zoo
from torchweave.verify.verify import verify

SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
DRAFT_MODEL = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3, "adaptive": False}
EAGLE = DRAFT_MODEL | {"method": "eagle3", "model": "demo-eagle"}
DRAFTERS = {"ngram": SPECULATION, "draft model": DRAFT_MODEL, "EAGLE-3": EAGLE}
TEXTS = (
    "copy: abcabcabcabc",
    "repeat: the fox and the fox and the fox",
    "what is 12 + 30?",
    "copy: a b a b a b a b a b",
    "reverse: hello hello hello",
    "sort: 3 1 2 3 1 2 3 1 2",
)


EAGER = TorchCompileConfig(enable_fullgraph=False)
"""For tests that need an engine of their own, since a capture takes seconds."""


def engine(
    speculative_config: dict[str, Any] | None, compile_config: TorchCompileConfig = EAGER, **options: Any
) -> LLM:
    return LLM(
        "demo",
        device="cpu",
        seed=3,
        torch_compile_config=compile_config,
        speculative_config=speculative_config,
        report=Report(show=False),
        **options,
    )


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with engine(None, CAPTURED) as llm:
        yield llm


@pytest.fixture(scope="module", params=DRAFTERS)
def engines(request: pytest.FixtureRequest, plain: LLM) -> Iterator[tuple[LLM, LLM]]:
    """An engine without speculation, and one with it."""
    with engine(DRAFTERS[request.param], CAPTURED) as speculating:
        yield plain, speculating


def tokens(llm: LLM, params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(TEXTS), params)]


KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, top_k=30, min_p=0.01, seed=11, max_tokens=40),
    "stop token": SamplingParams(temperature=0, max_tokens=60, min_tokens=4),
    "stop string": SamplingParams(temperature=0, max_tokens=40, stop="b", ignore_eos=True),
    "one token": SamplingParams(temperature=0, max_tokens=1),
    "penalties": SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.3, ignore_eos=True),
    "bad words": SamplingParams(temperature=0, max_tokens=24, bad_words=["a"], ignore_eos=True),
    "grammar": SamplingParams(temperature=0, max_tokens=24, structured_outputs=StructuredOutputs(regex="[abc ]{4,30}")),
    "logprobs": SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True),
    "beams": SamplingParams(beam_width=2, max_tokens=8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_speculation(engines: tuple[LLM, LLM], kind: str) -> None:
    plain, speculating = engines
    assert tokens(speculating, KINDS[kind]) == tokens(plain, KINDS[kind])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_requests_without_a_seed_draw_alike(drafter: str) -> None:
    """Their seeds are drawn by the engine, which has answered the same requests before."""
    params = SamplingParams(temperature=1.0, max_tokens=20)
    with engine(None) as plain, engine(DRAFTERS[drafter]) as speculating:
        assert tokens(speculating, params) == tokens(plain, params)


def test_a_mix_of_requests(engines: tuple[LLM, LLM]) -> None:
    """Rows without drafts are in steps with drafts; log-probabilities are those of the same row."""
    plain, speculating = engines
    params = [KINDS[kind] for kind in ("greedy", "logprobs", "penalties", "seeded", "grammar", "stop string")]
    counts = speculating.engine.scheduler.speculation
    before = counts.num_accepted_tokens
    one, other = plain.generate(list(TEXTS), params), speculating.generate(list(TEXTS), params)
    assert [each.outputs[0].token_ids for each in one] == [each.outputs[0].token_ids for each in other]
    assert [each.outputs[0].text for each in one] == [each.outputs[0].text for each in other]
    scores = [[list(entry.values()) for entry in each[1].outputs[0].logprobs or ()] for each in (one, other)]
    for each, twin in zip(*scores, strict=True):
        np.testing.assert_allclose(each, twin, atol=1e-4)
    assert counts.num_accepted_tokens > before


class Replay:
    """A step of fixed size, padded as a recording is."""

    def __init__(self, runner: ModelRunner, rows: int, query_len: int) -> None:
        drafts = runner.parts["drafts"]
        assert isinstance(drafts, DraftsPart)
        self._run, self._boundary = drafts.program(rows, query_len), drafts.boundary(rows, query_len)

    def replay(self) -> None:
        self.output = self._run(self._boundary)


def test_padded_steps_have_the_same_tokens(engines: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and tokens behind those of the step change nothing, as where a GPU replays a larger recording."""
    plain, speculating = engines
    runner = speculating.engine.runner
    monkeypatch.setattr(runner.recordings, "drafts", {4: {rows: Replay(runner, rows, 4) for rows in (2, 8)}})
    params = [KINDS[kind] for kind in ("greedy", "logprobs", "penalties", "seeded", "stop token", "stop string")]
    before = speculating.manager.counts.get("draft_graph", 0)
    assert tokens(speculating, params) == tokens(plain, params)
    assert speculating.manager.counts["draft_graph"] > before


def test_drafts_save_steps(engines: tuple[LLM, LLM]) -> None:
    plain, speculating = engines
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    steps = []
    for llm in engines:
        before = sum(llm.manager.counts.values())
        llm.generate(["copy: abcabcabcabcabcabcabc"], params)
        steps.append(sum(llm.manager.counts.values()) - before)
    assert steps[1] < 0.7 * steps[0], steps
    counts = speculating.engine.scheduler.speculation
    assert counts.num_accepted_tokens_per_pos.sum() == counts.num_accepted_tokens <= counts.num_draft_tokens
    assert plain.engine.scheduler.speculation.num_drafts == 0


def test_streams_send_every_token_once(engines: tuple[LLM, LLM]) -> None:
    plain, speculating = engines
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = plain.generate([TEXTS[0]], params)[0].outputs[0]
    parts = list(speculating.stream(TEXTS[0], params))
    assert [token for part in parts for token in part.token_ids] == expected.token_ids
    assert "".join(part.text for part in parts) == expected.text
    assert len(parts) < len(expected.token_ids)


def test_prefix_hits_and_pauses() -> None:
    """Histories hold cached prompts and, after a pause, the answer so far; prompts take several steps."""
    options = {"num_kv_blocks": 24, "block_size": 4, "max_model_len": 80, "max_batch_size": 6, "max_num_tokens": 32}
    params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
    answers = {}
    for name, config in ({"none": None} | DRAFTERS).items():
        with engine(config, capacity_scheduler_policy="max_utilization", **options) as llm:
            answers[name] = [tokens(llm, params), tokens(llm, params)]
            scheduler = llm.engine.scheduler
            scheduler.check()
            assert scheduler.paused_total > 0 and scheduler.kv.num_free == scheduler.kv.num_blocks, name
    for name in DRAFTERS:
        assert answers[name] == answers["none"], name


def test_synthetic_acceptance_in_steps_that_are_not_too_wide() -> None:
    with engine({**SPECULATION, "synthetic_acceptance": 0.5, "disable_by_batch_size": 4}) as llm:
        assert llm.plan.max_drafting_rows == 4
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        llm.generate(list(TEXTS[:4]), params)
        counts = llm.engine.scheduler.speculation
        num_drafts = counts.num_drafts
        assert 0.35 < counts.num_accepted_tokens_per_pos[0] / num_drafts < 0.65
        llm.generate(list(TEXTS), params)
        assert counts.num_drafts == num_drafts


@pytest.mark.parametrize(
    ("drafter", "options", "max_batch_size"),
    [("draft model", {}, 1), ("EAGLE-3", {}, 1), ("draft model", {"disable_by_batch_size": 1}, 3)],
)
def test_graphs_that_exclude_a_size_of_one(plain: LLM, drafter: str, options: Any, max_batch_size: int) -> None:
    """Steps of one row or token are padded to two, beyond the largest batch and, of drafts, the largest step."""
    backed = replace(CAPTURED, dynamic_shapes="backed")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    sizes = {"max_batch_size": max_batch_size, "max_num_tokens": 4}
    with engine(DRAFTERS[drafter] | options, backed, **sizes) as llm:
        assert llm.engine.runner._min_size == 2
        answers = [each.generate(list(TEXTS[:2]), params) for each in (plain, llm)]
        assert [each.outputs[0].token_ids for each in answers[0]] == [each.outputs[0].token_ids for each in answers[1]]
        assert llm.engine.scheduler.speculation.num_accepted_tokens > 0


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size=2, since only the last stage"):
        engine(SPECULATION, CAPTURED, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="must be at least prompt_lookup_min=4"):
        engine({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2})
    with pytest.raises(ValueError, match="needs steps of 4 tokens, but max_num_tokens is 2"):
        engine(SPECULATION, max_num_tokens=2, max_batch_size=1)


def test_models_have_the_tokens_of_transformers() -> None:
    """Windows beside dense layers; `torchweave models verify --num_speculative_tokens` runs the others.

    As its own draft model it accepts nearly all drafts, since its draft layers hold the same keys and values.
    """
    result = verify(["gemma2"], num_speculative_tokens=3, speculative_method="draft_model")
    assert result["passed"] == 1, result["results"]


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_short_simulation_with_random_drafts(policy: str) -> None:
    counts = run(policy, steps=800, seed=3, check_every=4, episode=200, drafts=True)
    assert counts["requests"] > 60 and counts["cancelled"] > 5 and counts["with drafts"] > 150
    assert (counts["paused"] > 0) == (policy == "max_utilization")


def test_the_simulation_notices_a_wrong_length() -> None:
    """A slot whose unused tokens are not taken back, or twice, loses or repeats tokens, or never ends."""
    simulation = Simulation("guaranteed_no_evict", query_len=4, max_drafting_rows=4)
    simulation.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=30))
    simulation.scheduler._running.take_back = lambda slots, sizes: False  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        simulation.drain()


def draft_cells(llm: LLM, num_tokens: int) -> list[np.ndarray]:
    """Keys and values of the draft model's layers for the first tokens of the request that was last in slot 0."""
    runner, size = llm.engine.runner, llm.plan.block_size
    first = len(llm.engine.loaded.module.attention_layers)
    blocks = runner.state.block_table[0, : -(-num_tokens // size)].long()
    return [part[blocks].flatten(0, 1)[:num_tokens].numpy() for each in runner.caches[first:] for part in each.tensors]


def test_a_draft_model_computes_what_steps_without_drafts_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps without drafts the cache of the draft model is what it is after drafts in every step."""
    long, short = (
        SamplingParams(temperature=0, max_tokens=80, ignore_eos=True),
        SamplingParams(max_tokens=30, seed=1, ignore_eos=True),
    )
    cells, counts, caught_up = [], [], []
    for prompts, params in ([TEXTS[1]], [long]), ([TEXTS[1], TEXTS[4]], [long, short]):
        with engine({**DRAFT_MODEL, "disable_by_batch_size": 1}, max_num_tokens=64) as llm:
            drafts = llm.engine.runner.parts["drafts"]
            assert isinstance(drafts, DraftsPart)
            run_catch_up = drafts.catch_up
            monkeypatch.setattr(
                drafts, "catch_up", lambda *args, run=run_catch_up: (caught_up.append(args[2]), run(*args))
            )
            output = llm.generate(prompts, params)[0]
            num_tokens = len(output.prompt_token_ids) + 70
            assert int(llm.engine.runner.state.draft_computed[0]) > num_tokens
            cells.append([output.outputs[0].token_ids, *draft_cells(llm, num_tokens)])
            counts.append(llm.engine.scheduler.speculation.num_drafts)
    assert cells[0][0] == cells[1][0] and 0 < counts[1] < counts[0]
    assert len(caught_up) == 1 and caught_up[0] > 15
    for one, other in zip(cells[0][1:], cells[1][1:], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)


def test_adaptive_drafts_change_no_token() -> None:
    params = [KINDS[kind] for kind in ("greedy", "logprobs", "penalties", "seeded", "stop token", "stop string")]
    with engine(None) as plain, engine({**DRAFT_MODEL, "adaptive": True}) as speculating:
        assert speculating.plan.query_lens == (2, 4)
        assert tokens(speculating, params) == tokens(plain, params)
        assert speculating.engine.scheduler.speculation.num_accepted_tokens > 0


def test_draft_models_that_do_not_suit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"method=draft_model needs speculative_config.model"):
        engine({"method": "draft_model"})
    with pytest.raises(
        ValueError, match=r"is used by speculative_config.method=draft_model and eagle3, but the method is ngram"
    ):
        engine({"method": "ngram", "model": "demo-draft"})
    with pytest.raises(ValueError, match=r"speculative_config.model=nowhere: No model at 'nowhere'"):
        engine({"method": "draft_model", "model": "nowhere"})
    recurrent, tokenizer = tmp_path / "recurrent", tmp_path / "tokenizer"
    zoo.save(zoo.build(zoo.zoo_model("qwen3_next")), recurrent)
    with pytest.raises(ValueError, match="a draft model has attention to all its keys or to a window in every layer"):
        engine({"method": "draft_model", "model": str(recurrent)}, max_model_len=64)
    shutil.copytree(resolve("demo-draft").folder, tokenizer)
    text = (tokenizer / "tokenizer.json").read_text()
    (tokenizer / "tokenizer.json").write_text(text.replace('"a": ', '"ä": '))
    with pytest.raises(ValueError, match=r"has another tokenizer than demo .the token 'a' is None in one and"):
        engine({"method": "draft_model", "model": str(tokenizer)})
    config = (tokenizer / "config.json").read_text()
    (tokenizer / "config.json").write_text(
        config.replace('"max_position_embeddings": 512', '"max_position_embeddings": 64')
    )
    with pytest.raises(ValueError, match="max_model_len is 512, but the model supports 64 tokens"):
        engine({"method": "draft_model", "model": str(tokenizer)})
