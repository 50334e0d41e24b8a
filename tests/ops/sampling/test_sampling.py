"""Sampling: known answers of the generator, exact filters, distributions, and independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.interpreted import run_interpreted
from tests.ops.sampling.sampling_cases import build
from tests.ops.step_cases import set_stop_ids
from torchweave.ops.kernels.sampling.layout import BAD_WORD_LOGIT
from torchweave.ops.sampling.sample import filter_logits, gumbel, logprobs, philox_4x32, random_words, sample
from torchweave.ops.slot_state import SlotState


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0x00000000, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_the_published_answers(word: int, expected: tuple[int, ...]) -> None:
    value = np.full(1, word, np.uint64)
    assert tuple(int(out[0]) for out in philox_4x32((value,) * 4, (value,) * 2)) == expected


def test_words_depend_on_seed_position_and_index_only() -> None:
    def words(seed: int, position: int, size: int) -> np.ndarray:
        return random_words(np.array([seed], np.int32), np.array([7], np.int32), np.array([position], np.int32), size)[
            0
        ]

    assert (words(1, 2, 50) == words(1, 2, 3000)[:50]).all() and (words(1, 2, 200) == words(1, 2, 3000)[:200]).all()
    every = words(1, 2, 3000)
    assert len(set(every.tolist())) == 3000
    assert not (every == words(2, 2, 3000)).any() and not (every == words(1, 3, 3000)).any()


def test_gumbel_is_accurate_in_both_tails() -> None:
    words = np.array([0, 1, (1 << 23) - 1, 1 << 23, 1 << 31, (1 << 32) - 256, (1 << 32) - 1], np.uint64)
    small = words < (1 << 23)
    uniform = np.where(small, (words + 0.5) / 2**32, (words >> np.uint64(8)) / 2**24).astype(np.float64)
    np.testing.assert_allclose(gumbel(words), -np.log(-np.log1p(-uniform)), rtol=3e-7)


def state_of(rows: int, **fields: object) -> SlotState:
    state = SlotState(rows, 2)
    updates = state.updates()
    for name, values in fields.items():
        updates.set(name, np.arange(rows), values)
    state.apply(updates)
    return state


def probabilities(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, top_n_sigma: float = 0.0
) -> np.ndarray:
    """The filters as documented, one token at a time, in float64."""
    weights = np.exp((np.array(logits) - max(logits)) / temperature)
    lowest = (
        max(logits) - top_n_sigma * np.std([each for each in logits if each > -1e30]) if top_n_sigma > 0 else -np.inf
    )
    order = [i for i in np.argsort(-weights, kind="stable") if logits[i] >= lowest]
    kept = [i for i in order if top_k <= 0 or top_k > len(order) or weights[i] >= weights[order[top_k - 1]]]
    total, mass, edge = weights[kept].sum(), 0.0, 0.0
    for i in kept:
        mass, edge = mass + weights[i], weights[i]
        if mass >= top_p * total:
            break
    kept = [i for i in kept if weights[i] >= edge and weights[i] >= min_p]
    out = np.zeros(len(logits))
    out[kept] = weights[kept] / weights[kept].sum()
    return out


FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 4, 1.0, 0.0),
    (1.5, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.2, 7, 0.85, 0.15),
    (2.0, 3, 0.5, 0.0),
    (1.5, 0, 1.0, 0.0, 1.0),
    (0.8, 0, 0.9, 0.05, 1.7),
    (1.0, 4, 0.8, 0.0, 0.9),
]


@pytest.mark.parametrize("filters", FILTERS)
def test_frequencies_fit_the_filtered_probabilities(filters: tuple[float, ...]) -> None:
    logits, draws = [1.5, -0.3, 2.2, 0.4, 0.9, -1.0, 2.0, 0.1, 1.1, -0.6], 20_000
    state = state_of(
        draws, temperature=filters[0], top_k=filters[1], top_p=filters[2], min_p=filters[3],
        top_n_sigma=filters[4] if len(filters) > 4 else 0.0, seed_lo=np.arange(draws) % 7, position=np.arange(draws) // 7,
    )  # fmt: skip
    tokens = sample(torch.tensor(logits).expand(draws, -1), torch.arange(draws, dtype=torch.int32), state)
    expected = probabilities(logits, *filters) * draws  # type: ignore[arg-type]
    seen = np.bincount(tokens.numpy(), minlength=len(logits))
    possible = expected > 0
    assert (seen[~possible] == 0).all()
    chi_square = float(((seen - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    # Wilson-Hilferty bound at one in a million; the draws are fixed, so this passes always or never.
    assert chi_square <= freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3 if freedom else True


@pytest.mark.parametrize("seed", range(10))
def test_filters_keep_the_documented_tokens(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = 40
    logits = torch.from_numpy(generator.integers(-8, 9, (rows, 30)) / 4)  # many ties
    temperature = generator.uniform(0.3, 2, rows)
    top_k, top_p = generator.integers(-1, 35, rows), generator.choice([1.0, 0.93, 0.51, 0.0], rows)
    min_p = generator.choice([0.0, 0.031, 0.27], rows)
    top_n_sigma = generator.choice([-1.0, 0.0, 0.613, 1.47, 3.1], rows)
    filters = (top_k, top_p, min_p, top_n_sigma)
    kept = filter_logits(logits.float(), torch.tensor(1 / temperature).float(), *map(torch.tensor, filters))
    for row in range(rows):
        given = [each[row] for each in filters]
        expected = probabilities(logits[row].tolist(), temperature[row], *given) > 0
        assert (kept[row] > -torch.inf).tolist() == expected.tolist(), given


def test_excluded_tokens_do_not_count_in_the_deviation() -> None:
    """Masks and bad words, which would make it huge or no number; a row in which all are excluded keeps its tokens."""
    logits = [0.0, 1.0, 2.0, 3.0, -np.inf, BAD_WORD_LOGIT]
    lowest = 3.0 - 1.2 * np.std(logits[:4])
    none, n = torch.ones(2), torch.tensor([1.2, 1.2])
    rows = torch.tensor([logits, [BAD_WORD_LOGIT] * 4 + [-np.inf] * 2])
    kept = filter_logits(rows, none, torch.tensor([0, 0]), none, torch.zeros(2), n)
    assert (kept[0] > -torch.inf).tolist() == [each >= lowest for each in logits]
    assert (kept[1] > -torch.inf).tolist() == [True] * 4 + [False] * 2


def test_top_n_sigma_keeps_the_same_tokens_at_every_temperature() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    none, n = torch.ones(1), torch.tensor([1.5])
    kept = [filter_logits(logits, none / t, torch.tensor([0]), none, none * 0, n).isfinite() for t in (0.1, 1.0, 9.0)]
    assert kept[0].equal(kept[1]) and kept[1].equal(kept[2]) and 1 < int(kept[0].sum()) < 500


def test_a_token_does_not_depend_on_its_batch() -> None:
    logits, slots, state = build(700)
    together = sample(logits, slots, state)
    order = torch.randperm(len(slots))
    assert sample(logits[order], slots[order], state).equal(together[order])
    alone = [sample(logits[i : i + 1], slots[i : i + 1], state).item() for i in range(len(slots))]
    assert alone == together.tolist()


def test_greedy_is_the_first_largest_and_ignores_the_filters() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 3.0, 5.0, 1.0]])
    state = state_of(2, top_k=1, top_p=0.1, seed_lo=5)
    assert sample(logits, torch.tensor([1, 0], dtype=torch.int32), state).tolist() == [1, 0]
    assert sample(logits.bfloat16(), torch.tensor([0, 1], dtype=torch.int32), state_of(2)).tolist() == [1, 0]


def test_padding_rows_are_ignored() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [float("nan")] * 3, [0.0, 1.0, 2.0]])
    assert sample(logits, torch.tensor([0, -1, 1], dtype=torch.int32), state_of(2)).tolist() == [1, 0, 2]


def test_stop_ids_wait_for_min_position() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(4, 1)
    state = state_of(4, position=[8, 9, 8, 8], min_position=10, temperature=[0, 0, 0.01, 0])
    updates = state.updates()
    for slot in range(3):
        set_stop_ids(updates, slot, [1, 2])
    state.apply(updates)
    assert sample(logits, torch.arange(4, dtype=torch.int32), state).tolist() == [3, 1, 3, 1]
    assert logits.isfinite().all(), "the caller's logits stay as they were"


def test_logprobs() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0.0, 0.0, 5.0, 1.0]]).bfloat16()
    chosen, values, ids, rank = logprobs(logits, torch.tensor([2, 3], dtype=torch.int32), top=2)
    every = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), every[[0, 1], [2, 3]])
    torch.testing.assert_close(values.double(), every.topk(2).values)
    assert sorted(ids[0].tolist()) == [1, 2] and ids[1].tolist() == [2, 3] and rank.tolist() == [1, 2]
    assert logprobs(logits, torch.tensor([0, 0]), top=9)[1].shape == (2, 4)
    assert logprobs(logits, torch.tensor([0, 0]), top=0)[1].shape == (2, 0)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("tests.ops.sampling.interpreted_sampling")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_build_for_hopper(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.sampling import sample as kernels

    logits, slots, state = build(128256, dtype)
    with recorded(kernels, "partial_kernel", "finish_kernel") as launches:
        kernels.launch_sample(logits, slots, state, torch.empty(len(slots), dtype=torch.int32), 1e-5)
    assert [launch.grid for launch in launches] == [(len(slots), 32), (len(slots),)]
    for launch in launches:
        assert compile_for_hopper(launch).asm["cubin"]
