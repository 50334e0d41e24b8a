"""Failures are isolated: affected requests are answered, others continue, and nothing hangs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.fake import expected
from tests.engine.test_batch_manager import Harness
from torchweave.distributed.worker_group import RankFailure
from torchweave.engine.request import INVALID_LOGITS, InferenceRequest, Output, SamplingParams
from torchweave.engine.scheduler.step import StepResult
from torchweave.ops.kernels.sampling.layout import INVALID_TOKEN


class Lost(BaseException):
    """Not even an Exception, as SystemExit and asyncio's CancelledError."""


FAULTS = pytest.mark.parametrize("fault", [RuntimeError("gone"), Lost("gone")], ids=lambda f: type(f).__name__)


@FAULTS
def test_a_failing_response_stops_its_request_and_not_the_others(fault: BaseException) -> None:
    h = Harness()

    def fails(request_id: int, output: Output, final: bool) -> None:
        if request_id == 1:
            raise fault

    h.before_send = fails
    with h.manager:
        h.ask(1, [1], streaming=True, max_tokens=60)
        h.ask(2, [2], streaming=True, max_tokens=60)
        h.wait_final(2)
    assert h.tokens(2) == expected([2], 60)
    assert h.scheduler.kv.num_free == h.scheduler.kv.num_blocks


@FAULTS
def test_failing_batch_response_callback_stops_its_requests(fault: BaseException) -> None:
    with (h := Harness(together=True)).manager:
        h.faults["send_responses"] = fault
        h.ask(1, [1], streaming=True, max_tokens=80)
        while h.order.count("send_responses") < 2 or h.scheduler.num_active:
            time.sleep(0.001)
        del h.faults["send_responses"]
        h.ask(2, [2], streaming=True, max_tokens=20)
        h.wait_final(2)
    assert not h.received[1] and h.tokens(2) == expected([2], 20)
    assert h.scheduler.kv.num_free == h.scheduler.kv.num_blocks


@FAULTS
@pytest.mark.parametrize("callback", ["get_requests", "notify_state_changes", "poll_stop", "return_stats"])
def test_a_failing_callback_costs_no_request(callback: str, fault: BaseException) -> None:
    sizes = {"max_model_len": 500, "num_blocks": 200}
    with (h := Harness(sizes=sizes, notify_state_changes=lambda _: h._note("notify_state_changes"))).manager:
        h.ask(1, [1], streaming=True, max_tokens=300)
        while not h.received[1]:
            time.sleep(0.001)
        h.faults[callback] = fault
        seen = len(h.order)
        h.ask(2, [2], max_tokens=20)
        while len(h.order) < seen + 10 or callback not in h.order[seen:]:
            time.sleep(0.001)
        del h.faults[callback]
        h.wait_final(1, 2)
    assert h.tokens(1) == expected([1], 300) and h.tokens(2) == expected([2], 20)
    assert h.manager.failure is None


@pytest.mark.parametrize("callback", ["get_requests", "send_response"])
def test_a_callback_that_fails_after_the_device_costs_no_other_answer(callback: str) -> None:
    h = Harness(sizes={"max_model_len": 500, "num_blocks": 200})
    for number in (1, 2):
        h.ask(number, [number], streaming=True, max_tokens=400)
    while not (h.received[1] and h.received[2]):
        time.sleep(0.001)

    def fails(request_id: int, output: Output, final: bool) -> None:
        if final and request_id == 1:
            raise Lost("the client is gone")

    def broken(*_: object) -> None:
        if callback == "get_requests":
            h.faults[callback] = Lost("the queue broke")
        else:
            h.before_send = fails
        raise RuntimeError("the device is gone")

    h.runner.collect = broken  # type: ignore[method-assign]
    h.wait_final(2)
    h.manager.shutdown(timeout=10)
    assert "the device is gone" in h.received[2][-1][2] and not h.manager.alive
    assert h.scheduler.kv.num_free == h.scheduler.kv.num_blocks


def test_ids_to_stop_may_be_an_array() -> None:
    with (h := Harness()).manager:
        h.stops = np.array([1, 8])  # type: ignore[assignment]
        h.ask(1, [1], max_tokens=90)
        h.ask(2, [2], max_tokens=20)
        h.wait_final(1, 2)
    assert h.received[1][-1][0].finish_reason == "cancelled" and h.tokens(2) == expected([2], 20)


@pytest.mark.parametrize("stops", [[[1]], 5], ids=str)
def test_invalid_stop_ids_affect_no_request(stops: Any) -> None:
    with (h := Harness()).manager:
        h.stops = stops
        h.ask(1, [1], max_tokens=20)
        h.wait_final(1)
    assert h.tokens(1) == expected([1], 20) and h.manager.failure is None


def test_requests_fetched_before_the_fault_are_answered() -> None:
    h = Harness()

    def some(max_num: int) -> Iterator[InferenceRequest]:
        if h.order.count("some") == 0:
            h.order.append("some")
            yield InferenceRequest(1, np.array([1]), SamplingParams(temperature=0, max_tokens=9))
            raise RuntimeError("the queue broke")

    h.manager._loop._callbacks = h.manager._loop._callbacks.__class__(
        some, None, h.send_response, h.poll_stop, h.return_stats
    )
    with h.manager:
        h.wait_final(1)
    assert h.tokens(1) == expected([1], 9)


@pytest.mark.parametrize("prompt", [["a"], [[1, 2]], [1.5], [], None, np.array([None])], ids=str)
def test_a_request_that_cannot_be_read_is_answered(prompt: Any) -> None:
    with (h := Harness()).manager:
        h.todo.append(InferenceRequest(1, np.array(prompt) if isinstance(prompt, list) else prompt))
        h.ask(2, [2], max_tokens=5)
        h.wait_final(1, 2)
    assert h.received[1][0][2] and h.tokens(2) == expected([2], 5)


NO_IDS: list[Any] = ["a", 2.5, None]


@pytest.mark.parametrize("odd", [None, "a request", *(InferenceRequest(each, np.array([1])) for each in NO_IDS)])
def test_a_request_without_an_id_costs_no_other(odd: Any) -> None:
    with (h := Harness()).manager:
        h.todo += [odd, InferenceRequest(2, np.array([2]), SamplingParams(temperature=0, max_tokens=5), streaming=True)]
        h.wait_final(2)
    assert list(h.received) == [2] and h.tokens(2) == expected([2], 5)


def test_an_odd_id_of_a_cancellation_costs_no_other() -> None:
    """0.5 is not request 0, and the ids beside it count."""
    h = Harness(sizes={"max_model_len": 500, "num_blocks": 200})
    ids = [[0.5, "a", None, 2]]
    h.manager._loop._callbacks = h.manager._loop._callbacks.__class__(
        h.get_requests,
        None,
        h.send_response,
        lambda: ids.pop() if ids and h.received[0] and h.received[2] else (),
        None,
    )
    with h.manager:
        h.ask(0, [1], streaming=True, max_tokens=20)
        h.ask(2, [2], streaming=True, max_tokens=400)
        h.wait_final(0, 2)
    assert h.tokens(0) == expected([1], 20) and len(h.tokens(2)) < 400


@pytest.mark.parametrize("field", [{"cache_salt": None}, {"cache_salt": "\ud800"}, {"priority": None}], ids=ascii)
def test_a_request_that_cannot_be_queued_is_answered(field: dict[str, Any]) -> None:
    with (h := Harness()).manager:
        h.todo.append(InferenceRequest(1, np.arange(40) % 5, **field))
        h.ask(2, [2], max_tokens=5)
        h.wait_final(1, 2)
    assert next(iter(field)) in h.received[1][0][2] and h.tokens(2) == expected([2], 5)


@pytest.mark.parametrize("moment", ["start", "launch", "collect"])
@pytest.mark.parametrize(
    "fault", [RuntimeError("the device is gone"), Lost("the device is gone")], ids=lambda f: type(f).__name__
)
def test_device_failure_at_any_step_answers_every_request(moment: str, fault: BaseException) -> None:
    h = Harness(start_fault=fault if moment == "start" else None)
    if moment != "start":
        h.ask(1, [1], streaming=True, max_tokens=60)
        while not h.received[1]:
            time.sleep(0.001)

        def broken(*args: object) -> None:
            raise fault

        setattr(h.runner, moment, broken)
        h.wait_final(1)
        assert "the device is gone" in h.received[1][-1][2]
    h.manager.shutdown(timeout=10)
    assert not h.manager.alive and h.manager.failure is fault
    assert h.scheduler.kv.num_free == h.scheduler.kv.num_blocks


@pytest.mark.parametrize(
    ("fault", "traced"), [(RankFailure("Rank 1 has ended"), False), (RuntimeError("the device is gone"), True)]
)
def test_rank_failure_is_logged_without_a_traceback(fault: Exception, traced: bool) -> None:
    h, records = Harness(), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]

    def broken(*args: object) -> None:
        raise fault

    setattr(h.runner, "collect", broken)  # noqa: B010
    logging.getLogger("torchweave").addHandler(handler)
    try:
        with h.manager:
            h.ask(1, [1], max_tokens=4)
            h.wait_final(1)
        h.manager.shutdown(timeout=10)
    finally:
        logging.getLogger("torchweave").removeHandler(handler)
    (record,) = [each for each in records if "generation loop failed" in each.getMessage()]
    assert bool(record.exc_info) == traced
    assert ("Rank 1 has ended" in record.getMessage()) != traced


def test_requests_during_shutdown_are_rejected() -> None:
    """What was handed in while the device failed is answered too, once."""
    h = Harness()
    h.runner.fail_at = 0
    h.todo = [InferenceRequest(number, np.array([1]), SamplingParams(max_tokens=5)) for number in range(1, 4)]
    h.manager.wake()
    h.wait_final(1, 2, 3)
    h.manager.shutdown(timeout=10)
    assert all(len(h.received[number]) == 1 and "failed" in h.received[number][0][2] for number in (1, 2, 3))


def test_waiting_for_a_wake_up_costs_nothing() -> None:
    """An idle manager that clients wake does not poll for requests, and takes the next one at once."""
    with (h := Harness(idle_seconds=None)).manager:
        h.ask(1, [1], max_tokens=1)
        h.wait_final(1)
        calls, end = -1, time.monotonic() + 60
        while len(h.max_nums) != calls and time.monotonic() < end:  # the last look follows the answer
            calls = len(h.max_nums)
            time.sleep(0.3)
        assert len(h.max_nums) == calls
        h.ask(2, [2], max_tokens=1)
        h.wait_final(2)


def test_an_idle_manager_looks_for_requests_at_its_interval_and_sleeps_in_between() -> None:
    with (h := Harness()).manager:
        h.ask(1, [1], max_tokens=1)
        h.wait_final(1)
        time.sleep(0.1)  # the first looks come sooner
        thread = h.manager._thread.ident
        assert thread is not None
        clock = time.pthread_getcpuclockid(thread)  # threads of earlier tests may run in this process too
        looks, used, begin = len(h.max_nums), time.clock_gettime(clock), time.monotonic()
        time.sleep(1)
        looks, used = len(h.max_nums) - looks, time.clock_gettime(clock) - used
        assert 0 < looks <= (time.monotonic() - begin) / 0.02 + 1
        assert used / looks < 0.002, "a look is a wake-up and one callback"


@pytest.mark.parametrize("params", [{}, {"logprobs": 2}, {"beam_width": 3, "n": 2}], ids=str)
def test_logits_that_are_not_finite_end_their_request_alone(
    params: dict[str, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    h = Harness(sizes={"num_blocks": 60})
    collect, break_slots = h.runner.collect, set[int]()

    def broken(handle: object) -> StepResult:
        result = collect(handle)
        slots = steps.pop(0)
        tokens = result.tokens.copy()
        tokens[[number for number, slot in enumerate(slots) if slot in break_slots]] = INVALID_TOKEN
        return StepResult(tokens, result.how, parts=result.parts)

    launch = h.runner.launch
    steps: list[list[int]] = []

    def noting(step: Any) -> Any:
        steps.append(step.slots.tolist())
        return launch(step)

    monkeypatch.setattr(h.runner, "collect", broken)
    monkeypatch.setattr(h.runner, "launch", noting)
    with h.manager:
        h.ask(1, [1] * 20, streaming=True, max_tokens=60)
        while not h.received[1]:
            time.sleep(0.001)
        h.ask(2, [2] * 20, max_tokens=60, **params)
        while 2 not in h.scheduler._running.slots.slot_of:
            time.sleep(0.001)
        break_slots.add(h.scheduler._running.slots.slot_of[2])
        h.wait_final(2)
        break_slots.clear()
        h.ask(3, [2] * 20, max_tokens=10)
        h.wait_final(1, 3)
    output, _, error = h.received[2][-1]
    assert output.finish_reason == "error" and error == INVALID_LOGITS
    assert "Request 2 ended with an error: The model's logits are not finite" in capfd.readouterr().err
    assert h.tokens(1) == expected([1] * 20, 60) and h.tokens(3) == expected([2] * 20, 10)
    assert h.scheduler.num_invalid == 1 and h.scheduler.kv.num_free == h.scheduler.kv.num_blocks
