"""Beam searches in the scheduler: the same outputs under any policy, pause and prefix sharing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.engine.fake import VOCAB, expected, expected_beams, make
from tests.engine.scheduler.test_scheduler import drive, request, tokens_of
from torchweave.engine.request import InferenceRequest, Response, SamplingParams
from torchweave.engine.scheduler.policies import POLICIES


def beam_request(number: int, prompt: list[int], **params: object) -> InferenceRequest:
    return InferenceRequest(number, np.array(prompt), SamplingParams(**params))  # type: ignore[arg-type]


def found(responses: list[Response]) -> list[list[int]]:
    assert len(responses) == 1 and responses[0].final and not responses[0].error
    return [beam.token_ids.tolist() for beam in responses[0].output.beams]


def random_params(rng: np.random.Generator, longest: int = 24) -> dict[str, object]:
    width = int(rng.integers(2, 5))
    max_tokens = int(rng.integers(1, longest))
    return {
        "beam_width": width,
        "n": int(rng.integers(1, width + 1)),
        "max_tokens": max_tokens,
        "min_tokens": int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.3 else 0,
        "length_penalty": float(rng.choice([0.0, 1.0, 2.0, -0.5])),
        "early_stopping": [True, False, "never"][rng.integers(3)],
        "stop_token_ids": rng.integers(0, VOCAB, rng.integers(0, 12)).tolist(),
    }


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_one_search_alone(length: int) -> None:
    params = {"beam_width": 3, "n": 3, "max_tokens": 17}
    scheduler, runner = make()
    scheduler.add(beam_request(0, list(range(length)), **params), 0)
    responses = drive(scheduler, runner)
    assert found(responses[0]) == expected_beams(list(range(length)), SamplingParams(**params))
    assert scheduler.kv.num_free == scheduler.kv.num_blocks


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("run_ahead", [1, 3])
def test_searches_among_others_under_every_policy(policy: str, reuse: bool, run_ahead: int) -> None:
    rng = np.random.default_rng(run_ahead)
    scheduler, runner = make(policy=policy, reuse=reuse, max_batch_size=8, num_blocks=40, max_num_tokens=20)
    stems = [rng.integers(0, VOCAB, 20).tolist() for _ in range(3)]
    wanted, single, number = {}, {}, 0
    while number < 80:
        prompt = [*stems[rng.integers(3)][: rng.integers(0, 20)], int(rng.integers(VOCAB))]
        if rng.random() < 0.5:
            params = random_params(rng)
            one = beam_request(number, prompt, **params)
            if scheduler.rejection_reason(one):
                continue
            scheduler.add(one, 0)
            wanted[number] = expected_beams(prompt, SamplingParams(**params), params["stop_token_ids"])  # type: ignore[arg-type]
        else:
            scheduler.add(request(number, prompt, max_tokens=20, streaming=bool(number % 2)), 0)
            single[number] = expected(prompt, 20)
        number += 1
    responses = drive(scheduler, runner, run_ahead)
    assert {key: found(responses[key]) for key in wanted} == wanted
    assert {key: tokens_of(responses[key]) for key in single} == single
    assert scheduler.kv.num_free == scheduler.kv.num_blocks and len(scheduler._running.slots.free) == 8
    assert (scheduler.paused_total > 0) == (policy == "max_utilization")


def test_searches_are_cancelled_at_any_moment() -> None:
    rng = np.random.default_rng(3)
    scheduler, runner = make(policy="max_utilization", num_blocks=30)
    number = iter(range(120))
    asked: dict[int, tuple[list[int], dict]] = {}

    def arrivals_and_cancels(step: int) -> Iterator[Response]:
        while scheduler.num_active < 3 and (new := next(number, None)) is not None:
            asked[new] = rng.integers(0, VOCAB, rng.integers(1, 20)).tolist(), random_params(rng)
            scheduler.add(beam_request(new, asked[new][0], **asked[new][1]), 0)
        if rng.random() < 0.2 and asked:
            yield from scheduler.cancel(int(rng.choice(list(asked))))

    responses = drive(scheduler, runner, per_step=arrivals_and_cancels)
    assert sorted(responses) == list(range(120))
    reasons = {key: said[-1].output.finish_reason for key, said in responses.items()}
    for key, (prompt, params) in asked.items():
        assert len(responses[key]) == 1
        if reasons[key] != "cancelled":
            assert found(responses[key]) == expected_beams(prompt, SamplingParams(**params), params["stop_token_ids"])
    assert {"cancelled", "length", "stop"} == set(reasons.values())
    assert scheduler.kv.num_free == scheduler.kv.num_blocks


def test_beams_share_the_blocks_of_their_common_prefix() -> None:
    scheduler, runner = make(num_blocks=64)
    scheduler.add(beam_request(0, list(range(40)), beam_width=4, max_tokens=8), 0)
    used: list[int] = []
    drive(scheduler, runner, per_step=lambda step: used.append(scheduler.kv.num_used) or ())
    assert max(used) <= 10 + 4 * 4, "the prompt's ten blocks once, and some of each beam's own"


def test_log_probabilities_and_scores_of_a_search() -> None:
    scheduler, runner = make()
    scheduler.add(beam_request(0, [1, 2], beam_width=2, n=2, max_tokens=5, logprobs=3), 0)
    output = drive(scheduler, runner)[0][0].output
    for beam in output.beams:
        assert [entry.token_id for entry in beam.logprobs] == beam.token_ids.tolist()
        assert all(len(entry.top) == 3 for entry in beam.logprobs)
        assert np.isclose(sum(entry.logprob for entry in beam.logprobs) / 5, beam.score)
    assert output.logprobs == output.beams[0].logprobs and output.beams[0].score >= output.beams[1].score


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"n": 3}, "raise beam_width or lower n"),
        ({"temperature": 0.7}, "does not sample"),
        ({"stop": "x"}, "stop strings"),
        ({"presence_penalty": 1.0}, "presence_penalty is not supported in a beam search"),
        ({"early_stopping": "soon"}, "early_stopping must be"),
        ({"beam_width": 0}, "beam_width must be at least 1"),
    ],
)
def test_unsupported_beam_search_parameters_are_rejected(params: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**{"beam_width": 2, **params})


def test_a_search_that_cannot_run_is_refused() -> None:
    scheduler, _ = make(max_batch_size=4, num_blocks=20)
    assert "max_batch_size is 4" in scheduler.rejection_reason(beam_request(0, [1], beam_width=5))
    assert "beam_width" in scheduler.rejection_reason(beam_request(0, [1], beam_width=4, max_tokens=60))
    streaming = InferenceRequest(0, np.array([1]), SamplingParams(beam_width=2), streaming=True)
    assert "streamed" in scheduler.rejection_reason(streaming)
