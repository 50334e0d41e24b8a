"""Parts of a step: which ones an engine holds, and which of them a step asks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.fake import make
from tests.engine.scheduler.test_scheduler import drive, request
from torchweave.engine.runner.parts.base import RUNNER_PARTS
from torchweave.engine.scheduler.parts.base import STEP_PARTS
from torchweave.pooling import Pooling

GENERATING = ["beams", "prompt_logprobs", "processors", "logprobs"]


@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({}, GENERATING),
        (
            {"num_snapshots": 2, "has_recurrent_states": True},
            ["beams", "prompt_logprobs", "states", "processors", "logprobs"],
        ),
        ({"query_len": 3, "max_drafting_rows": 4}, ["beams", "prompt_logprobs", "drafts", "processors", "logprobs"]),
        ({"pooling": Pooling("embed", 8)}, ["pooled"]),
    ],
    ids=["plain", "states", "drafts", "pooling"],
)
def test_an_engine_holds_the_parts_that_it_needs(options: dict[str, Any], held: list[str]) -> None:
    scheduler, _ = make(**options)
    assert list(scheduler.parts.held) == held
    assert not scheduler.parts.active


def test_every_part_has_a_file_for_the_host_and_one_for_the_device() -> None:
    assert STEP_PARTS.names() == RUNNER_PARTS.names()
    for name in STEP_PARTS.names():
        assert STEP_PARTS.get(name).name == RUNNER_PARTS.get(name).name == name


def test_a_step_asks_the_parts_that_running_requests_use(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, runner = make()
    active: list[tuple[str, ...]] = []
    launch = runner.launch

    def noted(step: Any) -> Any:
        active.append(tuple(part.name for part in scheduler.parts.active))
        return launch(step)

    monkeypatch.setattr(runner, "launch", noted)
    scheduler.add(request(0, [1, 2], max_tokens=12), 0)
    scheduler.add(request(1, [3, 4], max_tokens=3, logprobs=1), 0)
    scheduler.add(request(2, [5, 6], max_tokens=6, logprobs=2), 0)
    responses = drive(scheduler, runner, run_ahead=1)
    assert [len(responses[number][0].output.logprobs) for number in range(3)] == [0, 3, 6]
    assert active[0] == active[4] == ("logprobs",) and active[-1] == ()
    assert not scheduler.parts.active


def test_a_cancelled_and_an_aborted_request_leave_no_part_active() -> None:
    scheduler, _ = make()
    for number in range(2):
        scheduler.add(request(number, [1, 2], max_tokens=12, logprobs=1), 0)
        assert scheduler.schedule() is not None
        assert scheduler.parts.active
        if number == 0:
            scheduler.abort_all("the device failed")
        else:
            step = scheduler.schedule()
            assert step is not None
            scheduler.cancel(1)
    scheduler._running.completed = 9
    scheduler.cancel(1)
    assert not scheduler.parts.active and not scheduler.num_active
