"""Logits processors against those of transformers, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.ops.interpreted import run_interpreted
from tests.ops.sampling.logits_processor_cases import build
from torchweave.ops.kernels.sampling import layout
from torchweave.ops.sampling.logits_processors import (
    LogitsProcessorState,
    LogitsStateInit,
    process_logits_reference,
    resample,
    rewind_reference,
)
from torchweave.ops.slot_state import SlotState

VOCAB = 50


def one_row(
    flags: int, presence: float = 0.0, frequency: float = 0.0, repetition: float = 1.0, mask: int = -1
) -> torch.Tensor:
    floats = np.array([presence, frequency, repetition], np.float32).view(np.int32)
    return torch.from_numpy(np.array([[0, 0, 0, flags, mask, *floats]], np.int32).T.copy())


def changed(
    logits: torch.Tensor,
    rows: torch.Tensor,
    join: LogitsStateInit,
    masks: torch.Tensor | None = None,
    at: int = 1,
    min_position: int = 0,
) -> torch.Tensor:
    processor_state, state = LogitsProcessorState(VOCAB, torch.device("cpu")), SlotState(1, 4)
    processor_state.join(join)
    state.host_arrays["position"][0], state.host_arrays["min_position"][0] = at, min_position
    out = torch.empty(1, VOCAB)
    process_logits_reference(logits, rows, masks, processor_state, out)
    rewind_reference(rows, state, processor_state, out)
    assert state.host_arrays["position"][0] == at - 1
    return out


def counts_of(prompt: list[int], answer: list[int]) -> tuple[np.ndarray, np.ndarray]:
    counts = np.bincount(answer, minlength=VOCAB) + layout.IN_PROMPT * (np.bincount(prompt, minlength=VOCAB) > 0)
    ids = np.flatnonzero(counts)
    return ids.astype(np.int32), counts[ids].astype(np.int32)


def words_of(words: list[list[int]], answer: list[int], first: int) -> tuple[np.ndarray, np.ndarray]:
    table = np.full((len(words), layout.MAX_BAD_WORD_TOKENS), -1, np.int32)
    for row, word in zip(table, words, strict=True):
        row[: len(word)] = word[::-1]
    recent_tokens = np.full(layout.MAX_BAD_WORD_TOKENS, -1, np.int32)
    for at, token in enumerate(answer, start=first):
        recent_tokens[at % layout.MAX_BAD_WORD_TOKENS] = token
    return table, recent_tokens


@pytest.mark.parametrize("seed", range(20))
def test_penalties_biases_and_bad_words_are_those_of_transformers(seed: int) -> None:
    generator = np.random.default_rng(seed)
    prompt, answer = (generator.integers(0, 12, size).tolist() for size in (9, int(generator.integers(0, 45))))
    logits = torch.from_numpy(generator.standard_normal((1, VOCAB)).astype(np.float32) * 4)
    repetition, biases = (
        float(generator.uniform(0.5, 2)),
        {int(t): float(b) for t, b in generator.uniform(0, 50, (4, 2))},
    )
    words = [generator.integers(0, 12, int(generator.integers(2, 4))).tolist() for _ in range(30)]
    single = [[int(generator.integers(0, VOCAB))]]

    expected = LogitsProcessorList([
        SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()}),
        RepetitionPenaltyLogitsProcessor(repetition),
    ])(torch.tensor([prompt + answer]), logits)  # fmt: skip
    expected = NoBadWordsLogitsProcessor(words + single)(torch.tensor([answer], dtype=torch.int64), expected)

    table, recent_tokens = words_of(words, answer, len(prompt))
    bias = {**biases, single[0][0]: layout.BAD_WORD_LOGIT}
    join = LogitsStateInit(
        0, counts_of(prompt, answer), (0.0, np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)),
        table, recent_tokens,
    )  # fmt: skip
    got = changed(
        logits,
        one_row(layout.HAS_COUNTS | layout.HAS_BIAS | layout.HAS_BAD_WORDS, repetition=repetition),
        join,
        at=len(prompt + answer),
    )
    barred = got < layout.BAD_WORD_LOGIT / 10
    assert torch.equal(barred, expected == -torch.inf)
    torch.testing.assert_close(got[~barred], expected[~barred], rtol=1e-6, atol=1e-6)


def test_presence_and_frequency_penalties_count_output_tokens_only() -> None:
    logits = torch.linspace(-1, 1, VOCAB)[None]
    join = LogitsStateInit(0, counts_of([3, 4], [4, 5, 5]))
    got = changed(logits, one_row(layout.HAS_COUNTS, presence=0.5, frequency=0.25), join) - logits
    expected = torch.zeros(VOCAB)
    expected[4], expected[5] = -0.75, -1.0
    torch.testing.assert_close(got[0], expected)


def test_a_one_token_bad_word_is_banned_below_min_position() -> None:
    table, recent_tokens = words_of([[7], [3, 9]], [3], first=4)
    for at, barred in ((5, [7, 9]), (6, [9])):
        recent_tokens[(at - 1) % layout.MAX_BAD_WORD_TOKENS] = 3
        join = LogitsStateInit(0, words=table, recent_tokens=recent_tokens)
        got = changed(torch.zeros(1, VOCAB), one_row(layout.HAS_BAD_WORDS), join, at=at, min_position=6)
        assert np.flatnonzero(got[0] == layout.BAD_WORD_LOGIT).tolist() == barred


def test_a_grammar_mask_overrides_bad_words() -> None:
    mask = torch.zeros(1, 2, dtype=torch.int32)
    mask[0, 1] = 1 << 3
    join = LogitsStateInit(0, bias=(0.0, np.array([35], np.int32), np.array([layout.BAD_WORD_LOGIT], np.float32)))
    got = changed(torch.zeros(1, VOCAB), one_row(layout.HAS_BIAS, mask=0), join, mask)
    assert got.argmax() == 35 and (got > -torch.inf).sum() == 1


def test_resampling_advances_slots_and_processor_state() -> None:
    case = build(60, seed=5)
    processor_state, before = case.processor_state(), case.state.host_arrays["position"].copy()
    counts = processor_state.counts.clone()
    tokens, out = case.tokens.clone(), case.out.clone()
    resample(case.logits, case.rows, case.masks, case.state, processor_state, case.tokens, case.out)
    touched = case.rows[0].long()
    others = torch.tensor([row for row in range(12) if row not in touched.tolist()])
    assert case.tokens[others].equal(tokens[others]) and case.out[others].equal(out[others])
    assert (case.state.host_arrays["position"] == before).all(), (
        "a token was drawn before, and this one is in its place"
    )
    new = case.tokens[touched]
    assert (case.state.host_arrays["last_token"][case.rows[1].numpy()] == new.numpy()).all()
    for flags, place, token in zip(case.rows[3].tolist(), case.rows[2].tolist(), new.tolist(), strict=True):
        counted = (processor_state.counts[place] - counts[place]).tolist()
        assert counted == [int(v == token and bool(flags & layout.HAS_COUNTS)) for v in range(60)]


def test_processor_state_grows_and_keeps_its_rows() -> None:
    processor_state = LogitsProcessorState(VOCAB, torch.device("cpu"))
    processor_state.join(LogitsStateInit(2, counts_of([1], [2, 2])))
    assert len(processor_state.counts) == 8 and len(processor_state.bias) == len(processor_state.words) == 0, (
        "only what is needed is allocated"
    )
    processor_state.join(LogitsStateInit(40, counts_of([7], [])))
    assert len(processor_state.counts) == 64
    assert processor_state.counts[2].nonzero().flatten().tolist() == [1, 2] and processor_state.counts[2, 2] == 2
    processor_state.join(LogitsStateInit(2, counts_of([5], [])))
    assert processor_state.counts[2].nonzero().flatten().tolist() == [5], "nothing is left of whoever was here before"


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("tests.ops.sampling.interpreted_logits_processors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_build_for_hopper(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.sampling import logits_processors as kernels

    case = build(128_256, seed=0, dtype=dtype)
    processor_state, changed = case.processor_state(), torch.empty(8, 128_256)
    with recorded(kernels, "process_logits_kernel", "rewind_kernel", "commit_kernel") as launches:
        kernels.launch_process_logits(case.logits, case.rows, case.masks, processor_state, changed)
        kernels.launch_rewind(case.rows, case.state, processor_state, changed)
        kernels.launch_commit(
            case.rows, case.tokens[:8], case.out[:8], case.state, processor_state, case.tokens, case.out
        )
    assert len(launches) >= 3, "one for each kernel"
    for launch in launches:
        assert "st.local" not in compile_for_hopper(launch).asm["ptx"], "nothing is spilled"
