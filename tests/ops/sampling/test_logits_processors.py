"""Logits that are changed before a token is drawn: transformers' processors say how, token by token."""

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
from torchweave.ops.sampling.logits_processors import (
    BARRED,
    HAS_BIAS,
    HAS_COUNTS,
    HAS_WORDS,
    IN_PROMPT,
    LONGEST_WORD,
    AdjustState,
    Join,
    adjust_reference,
    redraw,
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
    join: Join,
    masks: torch.Tensor | None = None,
    at: int = 1,
    min_position: int = 0,
) -> torch.Tensor:
    places, state = AdjustState(VOCAB, torch.device("cpu")), SlotState(1, 4)
    places.join(join)
    state.host["position"][0], state.host["min_position"][0] = at, min_position
    out = torch.empty(1, VOCAB)
    adjust_reference(logits, rows, masks, places, out)
    rewind_reference(rows, state, places, out)
    assert state.host["position"][0] == at - 1
    return out


def counts_of(prompt: list[int], answer: list[int]) -> tuple[np.ndarray, np.ndarray]:
    counts = np.bincount(answer, minlength=VOCAB) + IN_PROMPT * (np.bincount(prompt, minlength=VOCAB) > 0)
    ids = np.flatnonzero(counts)
    return ids.astype(np.int32), counts[ids].astype(np.int32)


def words_of(words: list[list[int]], answer: list[int], first: int) -> tuple[np.ndarray, np.ndarray]:
    table = np.full((len(words), LONGEST_WORD), -1, np.int32)
    for row, word in zip(table, words, strict=True):
        row[: len(word)] = word[::-1]
    tail = np.full(LONGEST_WORD, -1, np.int32)
    for at, token in enumerate(answer, start=first):
        tail[at % LONGEST_WORD] = token
    return table, tail


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

    table, tail = words_of(words, answer, len(prompt))
    bias = {**biases, single[0][0]: BARRED}
    join = Join(
        0, counts_of(prompt, answer), (0.0, np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)),
        table, tail,
    )  # fmt: skip
    got = changed(
        logits, one_row(HAS_COUNTS | HAS_BIAS | HAS_WORDS, repetition=repetition), join, at=len(prompt + answer)
    )
    barred = got < BARRED / 10
    assert torch.equal(barred, expected == -torch.inf)
    torch.testing.assert_close(got[~barred], expected[~barred], rtol=1e-6, atol=1e-6)


def test_presence_and_frequency_count_the_answer_alone() -> None:
    logits = torch.linspace(-1, 1, VOCAB)[None]
    join = Join(0, counts_of([3, 4], [4, 5, 5]))
    got = changed(logits, one_row(HAS_COUNTS, presence=0.5, frequency=0.25), join) - logits
    expected = torch.zeros(VOCAB)
    expected[4], expected[5] = -0.75, -1.0
    torch.testing.assert_close(got[0], expected)


def test_a_word_of_one_token_is_barred_below_the_least_position() -> None:
    table, tail = words_of([[7], [3, 9]], [3], first=4)
    for at, barred in ((5, [7, 9]), (6, [9])):
        tail[(at - 1) % LONGEST_WORD] = 3
        join = Join(0, words=table, tail=tail)
        got = changed(torch.zeros(1, VOCAB), one_row(HAS_WORDS), join, at=at, min_position=6)
        assert np.flatnonzero(got[0] == BARRED).tolist() == barred


def test_a_mask_wins_over_barred_words() -> None:
    mask = torch.zeros(1, 2, dtype=torch.int32)
    mask[0, 1] = 1 << 3
    join = Join(0, bias=(0.0, np.array([35], np.int32), np.array([BARRED], np.float32)))
    got = changed(torch.zeros(1, VOCAB), one_row(HAS_BIAS, mask=0), join, mask)
    assert got.argmax() == 35 and (got > -torch.inf).sum() == 1


def test_a_redraw_moves_slots_and_places_on() -> None:
    case = build(60, seed=5)
    places, before = case.places(), case.state.host["position"].copy()
    counts = places.counts.clone()
    tokens, out = case.tokens.clone(), case.out.clone()
    redraw(case.logits, case.rows, case.masks, case.state, places, case.tokens, case.out)
    touched = case.rows[0].long()
    others = torch.tensor([row for row in range(12) if row not in touched.tolist()])
    assert case.tokens[others].equal(tokens[others]) and case.out[others].equal(out[others])
    assert (case.state.host["position"] == before).all(), "a token was drawn before, and this one is in its place"
    new = case.tokens[touched]
    assert (case.state.host["last_token"][case.rows[1].numpy()] == new.numpy()).all()
    for flags, place, token in zip(case.rows[3].tolist(), case.rows[2].tolist(), new.tolist(), strict=True):
        counted = (places.counts[place] - counts[place]).tolist()
        assert counted == [int(v == token and bool(flags & HAS_COUNTS)) for v in range(60)]


def test_places_grow_and_keep_what_they_hold() -> None:
    places = AdjustState(VOCAB, torch.device("cpu"))
    places.join(Join(2, counts_of([1], [2, 2])))
    assert len(places.counts) == 8 and len(places.bias) == len(places.words) == 0, "only what is needed is allocated"
    places.join(Join(40, counts_of([7], [])))
    assert len(places.counts) == 64
    assert places.counts[2].nonzero().flatten().tolist() == [1, 2] and places.counts[2, 2] == 2
    places.join(Join(2, counts_of([5], [])))
    assert places.counts[2].nonzero().flatten().tolist() == [5], "nothing is left of whoever was here before"


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("tests.ops.sampling.interpreted_logits_processors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_build_for_hopper(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.sampling import logits_processors as kernels

    case = build(128_256, seed=0, dtype=dtype)
    places, changed = case.places(), torch.empty(8, 128_256)
    with recorded(kernels, "adjust_kernel", "rewind_kernel", "settle_kernel") as launches:
        kernels.launch_adjust(case.logits, case.rows, case.masks, places, changed)
        kernels.launch_rewind(case.rows, case.state, places, changed)
        kernels.launch_settle(case.rows, case.tokens[:8], case.out[:8], case.state, places, case.tokens, case.out)
    for launch in launches:
        assert "st.local" not in compile_for_hopper(launch).asm["ptx"], "nothing is spilled"
