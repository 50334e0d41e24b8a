"""Messages of steps: a rank that follows gets what the leader's scheduler built."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.scheduler.simulate import Simulation, random_options
from torchweave.engine.ranks.step_message import decode, encode
from torchweave.engine.request import SamplingParams
from torchweave.engine.scheduler.parts.drafts import CatchUp
from torchweave.engine.scheduler.parts.images import ImageInputs
from torchweave.engine.scheduler.parts.logprobs import LogprobRows
from torchweave.engine.scheduler.parts.pooled import PooledRows
from torchweave.engine.scheduler.parts.processors import LogitsProcessorRows
from torchweave.engine.scheduler.parts.prompt_logprobs import PromptTargets
from torchweave.engine.scheduler.parts.states import StateCopies
from torchweave.engine.scheduler.policies import POLICIES
from torchweave.engine.scheduler.step import Chunk, Step


def plain(value: Any) -> Any:
    """A value with lists instead of arrays, so that equal ones compare equal."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if is_dataclass(value):
        return type(value), {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value


def as_followed(step: Step) -> Step:
    """What a follower needs: no `leader_only` part, and the number of the rows of a step without chunks, which its device has."""
    parts = {name: payload for name, payload in step.parts.items() if not payload.leader_only}
    if step.chunks:
        return replace(step, parts=parts)
    assert step.emits.all(), "a row without a chunk emits"
    rows = step.num_rows
    return replace(step, slots=np.zeros(rows, np.int32), starts=np.zeros(rows, np.int64), parts=parts)


def check(step: Step) -> None:
    message = encode(step)
    followed = decode(message)
    assert plain(followed) == plain(as_followed(step))
    assert message == encode(step), "all ranks get the same bytes"
    assert (followed.num_rows, followed.num_tokens) == (step.num_rows, step.num_tokens)


def simulated(policy: str, seed: int, kind: str, num_steps: int = 80) -> list[Step]:
    """Steps of a random history of requests with beams, log-probabilities, drafts and recurrent states."""
    rng = np.random.default_rng(seed)
    options = random_options(policy, rng, drafts=kind in ("drafts", "both"), states=kind in ("states", "both"))
    simulation, steps = Simulation(policy, seed=seed, **options), list[Step]()
    launch = simulation.runner.launch

    def noted(step: Step) -> Any:
        steps.append(step)
        return launch(step)

    simulation.runner.launch = noted  # type: ignore[method-assign]
    for number in range(num_steps):
        if rng.random() < 0.4:
            simulation.arrive()
        if rng.random() < 0.2:
            params = SamplingParams(temperature=0, max_tokens=9, logprobs=1, prompt_logprobs=1 if number % 2 else None)
            simulation.submit(rng.integers(0, 90, rng.integers(1, 30)).tolist(), params)
        simulation.step()
    simulation.drain()
    return steps


@given(
    seed=st.integers(0, 2**16),
    policy=st.sampled_from(sorted(POLICIES)),
    kind=st.sampled_from(["", "drafts", "states", "both"]),
)
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_follower_gets_the_steps_of_any_history(seed: int, policy: str, kind: str) -> None:
    for step in simulated(policy, seed, kind):
        check(step)


def test_histories_have_steps_of_every_kind() -> None:
    """Otherwise the test above shows little."""
    found: Counter[str] = Counter()
    for kind in ("", "drafts", "states", "both"):
        for step in (each for seed in range(4) for each in simulated("max_utilization", seed, kind)):
            found.update(f"{'mixed' if step.chunks else 'decode'} {name}" for name in ("", *step.parts))
            found["drafts"] += step.query_len > 1
    expected = ("beams", "logprobs", "states", "")
    assert all(found[f"decode {name}"] and found[f"mixed {name}"] for name in expected), found
    assert found["drafts"] and found["mixed prompt_logprobs"]


def decode_step(rows: int = 256, **rest: Any) -> Step:
    arrays = np.arange(rows, dtype=np.int32), np.arange(rows, dtype=np.int64)
    updates = np.array([3, 5], np.int32), np.array([1, 2], np.int32)
    return Step(7, *arrays, (), np.ones(rows, bool), updates, 900, **rest)


ROWS = np.arange(2, dtype=np.int64)


@pytest.mark.parametrize(
    "parts",
    [
        {"states": StateCopies(saves=(ROWS, ROWS + 8))},  # of a decode-only step
        {"states": StateCopies(restores=(ROWS, ROWS + 8), saves=(ROWS, ROWS + 4))},
        {"images": ImageInputs(rope_offsets=np.ones((3, 256), np.int32))},
        {"drafts": CatchUp(5), "processors": LogitsProcessorRows(np.zeros((3, 1), np.int32))},
        {"prompt_logprobs": PromptTargets(((1, 2),), ROWS, np.array([4, 5], np.int32), 3)},
        {"logprobs": LogprobRows(ROWS, 3), "pooled": PooledRows()},
    ],
    ids=lambda parts: "+".join(parts),
)
def test_every_part_travels_with_any_step(parts: dict[str, Any]) -> None:
    chunks = (Chunk(0, np.array([5, 6], np.int64)),)
    mixed = Step(8, np.array([4, 2]), np.array([11]), chunks, np.array([True, False]), None, 12, parts=parts)
    for step in (decode_step(parts=parts), decode_step(parts=parts, query_len=3), mixed):
        check(step)


def test_a_decode_step_is_a_small_message() -> None:
    assert len(encode(decode_step(query_len=3, depends_on=6))) < 80
    assert len(encode(decode_step(parts={"logprobs": LogprobRows(np.arange(256), 5)}))) < 80
    assert len(encode(decode_step(parts={"states": StateCopies(restores=(ROWS, ROWS))}))) < 250


def test_arrays_arrive_writable_and_of_their_shape() -> None:
    arrays = np.zeros((2, 3), np.float32), np.zeros(0, np.int64), np.array(True)
    step = decode_step(parts={"images": ImageInputs(*arrays[:2])}, depends_on=2)
    images = decode(encode(step)).parts["images"]
    assert isinstance(images, ImageInputs) and images.rope_offsets is not None
    images.rope_offsets[:] = 1
    assert images.rope_offsets.shape == (2, 3)
    assert pickle.loads(pickle.dumps(step)).parts["images"].lookahead.dtype == np.int64
