"""Penalties, biases and bad words in the whole engine, compared with transformers' logits processors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from torchweave import LLM, SamplingParams
from torchweave.config.options import EngineConfig, TorchCompileConfig
from torchweave.engine.request import InferenceRequest
from torchweave.engine.sampling.host_biases import HostBiases
from torchweave.engine.scheduler.parts.processors import LogitsProcessorRows, LogitsProcessors, ProcessorsPart
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.models import load
from torchweave.report import Report
from torchweave.verify import zoo

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PLAIN = TorchCompileConfig(enable_fullgraph=False)  # starts at once; what is tested is behind the model
PROMPTS = [np.random.default_rng(n).integers(3, zoo.VOCAB, 6 + 5 * n).tolist() for n in range(6)]


class OfTheAnswer(LogitsProcessor):
    """A processor that sees the answer alone, as vLLM's bad words do."""

    def __init__(self, inner: LogitsProcessor, prompt_len: int) -> None:
        self._inner, self._prompt_len = inner, prompt_len

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return self._inner(input_ids[:, self._prompt_len :], scores)


class BehindAnother(LogitsProcessor):
    """A processor that sees a token in front which is in no word: that of transformers 5.17 bars no word with which a text would be
    just as long as the word."""

    def __init__(self, inner: LogitsProcessor) -> None:
        self._inner = inner

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return self._inner(torch.nn.functional.pad(input_ids, (1, 0), value=-1), scores)  # type: ignore[arg-type]


class Counted(LogitsProcessor):
    """OpenAI's presence and frequency penalties, which transformers does not have."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        counts = torch.bincount(input_ids[0], minlength=scores.shape[1]).float()
        return scores - self._frequency * counts - self._presence * (counts > 0)


def processors(params: SamplingParams, prompt: Sequence[int]) -> LogitsProcessorList:
    found: list[LogitsProcessor] = []
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()}))
    if params.allowed_token_ids:
        others = [token for token in range(zoo.VOCAB) if token not in params.allowed_token_ids]
        found.append(NoBadWordsLogitsProcessor([[token] for token in others]))
    found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    found.append(OfTheAnswer(Counted(params.presence_penalty, params.frequency_penalty), len(prompt)))
    if params.bad_words:
        barred = NoBadWordsLogitsProcessor([list(map(int, word)) for word in params.bad_words])
        found.append(OfTheAnswer(BehindAnother(barred), len(prompt)))
    return LogitsProcessorList(found)


def reference(model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Greedy, token by token, through transformers' own model and processors."""
    ids, change = list(prompt), processors(params, prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            given = torch.tensor([ids])
            scores = change(given, model(input_ids=given, use_cache=False).logits[:, -1].float())
            ids.append(int(scores.argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder, made = tmp_path_factory.mktemp("llama"), zoo.build(zoo.zoo_model("llama"))
    zoo.save(made, folder)
    return made, folder


def engine(folder: Path, **options: Any) -> LLM:
    report = Report(show=False)
    defaults: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 64, "num_kv_blocks": 64, "block_size": 8}
    config = EngineConfig("llama", dtype="float32", device="cpu", torch_compile_config=PLAIN, **(defaults | options))
    return LLM.from_loaded(load(folder, report=report), config, report)


@pytest.fixture(scope="module")
def llm(model: tuple[PreTrainedModel, Path]) -> Iterator[LLM]:
    with engine(model[1]) as found:
        yield found


@pytest.fixture(scope="module")
def asked(model: tuple[PreTrainedModel, Path]) -> list[tuple[SamplingParams, list[int]]]:
    """Parameters of every kind, one for each prompt, and the tokens that transformers draws with them."""
    plain = [reference(model[0], prompt, GREEDY) for prompt in PROMPTS]
    words = [
        [word for at in range(0, 8, 2) for word in ([answer[at], answer[at + 1]], answer[at : at + 3])]
        for answer in plain
    ]
    some = [
        replace(GREEDY, repetition_penalty=1.4),
        replace(GREEDY, presence_penalty=0.3, frequency_penalty=0.2),
        replace(GREEDY, logit_bias={plain[2][0]: -5.0, 17: 0.5, 40: -100.0}, frequency_penalty=-0.1),
        replace(GREEDY, allowed_token_ids=list(range(20, 60)), repetition_penalty=0.8),
        replace(GREEDY, bad_words=[*words[4], [plain[4][3]]]),
        replace(GREEDY, bad_words=words[5], repetition_penalty=1.2, presence_penalty=0.1, logit_bias={9: 0.2}),
    ]
    found = [(params, reference(model[0], prompt, params)) for params, prompt in zip(some, PROMPTS, strict=True)]
    for (_, changed), one in zip(found, plain, strict=True):
        assert changed != one, "the parameters change nothing, so that nothing is tested"
    return found


def tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_tokens_equal_transformers_logits_processors(llm: LLM, asked: list[tuple[SamplingParams, list[int]]]) -> None:
    assert tokens(llm, PROMPTS, [params for params, _ in asked]) == [expected for _, expected in asked]


def test_other_rows_of_the_batch_are_unaffected(llm: LLM, asked: list[tuple[SamplingParams, list[int]]]) -> None:
    hot = SamplingParams(temperature=0.8, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    alone = tokens(llm, PROMPTS, [hot] * 6)
    mixed = tokens(llm, PROMPTS + PROMPTS, [hot] * 6 + [params for params, _ in asked])
    assert mixed == alone + [expected for _, expected in asked]


def test_rows_without_processors_are_not_resampled(llm: LLM) -> None:
    told: list[LogitsProcessorRows | None] = []
    part = llm.engine.scheduler.parts.held["processors"]
    assert isinstance(part, ProcessorsPart)
    logits_processors = part.processors
    inner = logits_processors.rows_of_step
    try:
        logits_processors.rows_of_step = lambda slots, emits: told.append(inner(slots, emits)) or told[-1]  # type: ignore[method-assign]
        tokens(llm, PROMPTS, [GREEDY] * 6)
        assert not told
        tokens(llm, PROMPTS, [GREEDY] * 5 + [replace(GREEDY, repetition_penalty=1.1)])
    finally:
        del logits_processors.rows_of_step
    assert {adjust.rows.shape[1] for adjust in told if adjust} == {1}


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_tokens": 11},
        {"num_kv_blocks": 12, "capacity_scheduler_policy": "max_utilization", "max_num_tokens": 24},
        {"run_ahead": 0, "enable_prefix_caching": False},
    ],
    ids=["chunked", "paused", "no run-ahead"],
)
def test_pauses_chunking_and_prefix_caching_change_no_token(
    model: tuple[PreTrainedModel, Path], asked: list[tuple[SamplingParams, list[int]]], options: dict[str, Any]
) -> None:
    with engine(model[1], **options) as llm:
        for _ in range(2):  # the second time with blocks of the first
            assert tokens(llm, PROMPTS, [params for params, _ in asked]) == [expected for _, expected in asked]
        if "num_kv_blocks" in options:
            assert llm.engine.scheduler.paused_total > 0
        if options.get("enable_prefix_caching", True):
            assert llm.engine.scheduler.kv.reused_total > 0


def test_logprobs_are_of_unprocessed_logits(llm: LLM) -> None:
    plain = llm.generate([PROMPTS[0]], replace(GREEDY, logprobs=2))[0].outputs[0]
    barred = plain.token_ids[0]
    changed = llm.generate([PROMPTS[0]], replace(GREEDY, logprobs=2, logit_bias={barred: -100.0}))[0].outputs[0]
    assert plain.logprobs and changed.logprobs
    drawn = changed.token_ids[0]
    assert drawn != barred and list(plain.logprobs[0]) == [barred, drawn]
    assert changed.logprobs[0] == pytest.approx(plain.logprobs[0])


def test_no_stop_token_is_drawn_before_min_tokens_however_many_there_are(
    llm: LLM, model: tuple[PreTrainedModel, Path]
) -> None:
    plain = reference(model[0], PROMPTS[0], GREEDY)
    others = [token for token in range(3, zoo.VOCAB) if token not in plain][:9]  # more than a slot has room for
    stops = [*others, *plain]
    barred = replace(GREEDY, bad_words=[[token] for token in stops])
    expected = reference(model[0], PROMPTS[0], barred)
    stopped = replace(GREEDY, stop_token_ids=stops, min_tokens=6)
    (found,) = tokens(llm, [PROMPTS[0]], [stopped])
    assert found[:6] == expected[:6] and not set(found[:-1]) & set(stops)
    assert found == tokens(llm, [PROMPTS[0]], [replace(stopped, stop_token_ids=stops[::-1])])[0]


def test_bad_words_are_given_as_texts() -> None:
    with LLM("demo", device="cpu", torch_compile_config=PLAIN, report=Report(show=False)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        assert llm.generate("12+30=", params)[0].outputs[0].text == "42"
        assert llm.generate("12+30=", replace(params, bad_words=["4"]))[0].outputs[0].text.startswith("4") is False
        several = llm.generate("12+30=", replace(params, bad_words=["42"]))[0].outputs[0].text
        assert several.startswith("4") and "42" not in several


def test_logits_processor_state_rows_are_reused() -> None:
    logits_processors = LogitsProcessors(4, HostBiases((), 9))
    params = SamplingParams(repetition_penalty=1.1)
    state = RequestState(InferenceRequest(0, np.array([1]), params), 0, 0, np.array([1], np.int32), (), frozenset(), -1)
    for _ in range(10):
        for slot in range(4):
            logits_processors.start(slot, state)
        for slot in (2, 0, 3, 1):
            logits_processors.release(slot)
    logits_processors.start(3, state)
    step = logits_processors.rows_of_step(np.array([3]), np.array([True]))
    assert step is not None and step.rows[2].tolist() == [0], "the lowest place that is free"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"logit_bias": {10_000: 1.0}}, "logit_bias holds the token id 10000"),
        ({"allowed_token_ids": [5, 10_000]}, "allowed_token_ids holds the token id 10000"),
        ({"bad_words": [[5, 10_000]]}, "bad_words holds the token id 10000"),
        ({"bad_words": [[5] * 33]}, "at most 32 tokens"),
        ({"bad_words": ["five"]}, "tokenizer"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7, 8], "min_tokens": 2}, "stop tokens alone"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_rejected(llm: LLM, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate([[5, 6]], replace(GREEDY, **params))
