"""Control calls on a fake model: their order among steps, pauses in each mode, and errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from tests.engine.fake import expected
from tests.engine.test_batch_manager import Harness
from torchweave.engine.control.calls import CALLS, ControlCall
from torchweave.engine.control.errors import ControlError, Fault
from torchweave.engine.control.host import Host
from torchweave.engine.control.rank import RankAnswer
from torchweave.engine.request import InferenceRequest, Output, SamplingParams

SECONDS = 20.0


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def result(future: Future[Any]) -> Any:
    return future.result(SECONDS)


def call_at(h: Harness, request_id: int, count: int, name: str, **arguments: Any) -> Future[Any]:
    """Start a request, and queue a call on the loop's own thread when its token number `count` is sent."""
    calls: list[Future[Any]] = []

    def before_send(sent_id: int, output: Output, final: bool) -> None:
        if sent_id == request_id and not calls and len(h.tokens(sent_id)) + len(output.token_ids) >= count:
            calls.append(h.manager.call(name, **arguments))

    h.before_send = before_send
    h.ask(request_id, [request_id], streaming=True, max_tokens=80)
    wait_until(lambda: bool(calls))
    return calls[0]


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_keep_freezes_requests_which_continue_with_the_same_tokens(run_ahead: int) -> None:
    with (h := Harness(run_ahead=run_ahead)).manager:
        for number, count in ((1, 1), (2, 20), (3, 60)):
            result(call_at(h, number, count, "pause", mode="keep"))
            sent = h.tokens(number)
            assert count <= len(sent) < 80 and result(h.manager.call("is_paused")) and h.manager.is_paused
            h.ask(9, [9], max_tokens=5)
            assert not result(h.manager.call("reset_prefix_cache"))
            assert h.tokens(number) == sent and not h.received[9], "no step runs"
            result(h.manager.call("resume"))
            h.wait_final(number, 9)
            assert h.tokens(number) == expected([number], 80) and h.tokens(9) == expected([9], 5)
            assert not result(h.manager.call("is_paused"))
            del h.received[9]


def test_wait_finishes_what_runs_and_starts_nothing() -> None:
    with (h := Harness(sizes={"max_batch_size": 1})).manager:
        h.todo.append(InferenceRequest(2, np.array([2]), SamplingParams(temperature=0, max_tokens=3), priority=-1))
        result(call_at(h, 1, 2, "pause", mode="wait"))  # request 2 is in the scheduler's queue
        assert h.received[1][-1][1] and h.tokens(1) == expected([1], 80)
        assert not h.received[2] and h.scheduler.num_waiting == 1
        h.ask(3, [3], max_tokens=3)
        assert result(h.manager.call("is_paused")) and not h.received[3]
        result(h.manager.call("resume"))
        h.wait_final(2, 3)
    assert h.tokens(2) == expected([2], 3) and h.tokens(3) == expected([3], 3)


def test_wait_includes_requests_that_were_preempted() -> None:
    sizes = {"policy": "max_utilization", "num_blocks": 30, "max_batch_size": 3}
    with (h := Harness(sizes=sizes)).manager:
        for number in (2, 3):
            h.todo.append(InferenceRequest(number, np.array([number]), SamplingParams(temperature=0, max_tokens=80)))
        paused = call_at(h, 1, 2, "pause", mode="wait")
        result(paused)
        assert h.scheduler.paused_total, "the case is one where requests are preempted"
        for number in (1, 2, 3):
            assert h.received[number][-1][1] and h.tokens(number) == expected([number], 80)


def test_abort_ends_all_requests_and_keeps_later_ones() -> None:
    with (h := Harness(sizes={"max_batch_size": 1})).manager:
        h.todo.append(InferenceRequest(2, np.array([2]), SamplingParams(temperature=0, max_tokens=3), priority=-1))
        result(call_at(h, 1, 5, "pause"))
        assert all(h.received[number][-1][0].finish_reason == "cancelled" for number in (1, 2))
        assert 5 <= len(h.tokens(1)) < 80 and h.tokens(1) == expected([1], len(h.tokens(1)))
        h.ask(3, [3], max_tokens=3)
        assert result(h.manager.call("is_paused")) and not h.received[3] and h.scheduler.num_active == 0
        result(h.manager.call("resume"))
        h.wait_final(3)
    assert h.tokens(3) == expected([3], 3)


@pytest.mark.parametrize("after, arguments", [("resume", {}), ("pause", {"mode": "keep"})])
def test_a_pause_that_waits_ends_with_the_next_pause_or_resume(after: str, arguments: dict[str, Any]) -> None:
    with (h := Harness()).manager:
        calls: list[Future[Any]] = []

        def before_send(_: int, output: Output, final: bool) -> None:
            if len(calls) < 2 and not (calls and not h.manager.is_paused):  # the second one while the first one waits
                name = after if calls else "pause"
                calls.append(h.manager.call(name, **(arguments if calls else {"mode": "wait"})))

        h.before_send = before_send
        h.ask(1, [1], streaming=True, max_tokens=80)
        wait_until(lambda: len(calls) == 2)
        result(calls[1])
        with pytest.raises(ControlError, match="Another pause or resume") as error:
            result(calls[0])
        assert error.value.kind == "conflict"
        result(h.manager.call("resume"))
        h.wait_final(1)
    assert h.tokens(1) == expected([1], 80)


def test_a_frozen_request_can_be_cancelled() -> None:
    with (h := Harness()).manager:
        result(call_at(h, 1, 3, "pause", mode="keep"))
        h.stops = {1}
        h.wait_final(1)
        assert h.received[1][-1][0].finish_reason == "cancelled"


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_of_a_paused_engine_answers_its_requests(drain: bool) -> None:
    h = Harness()
    result(call_at(h, 1, 3, "pause", mode="keep"))
    h.manager.shutdown(drain=drain, timeout=SECONDS)
    assert not h.manager.alive and "was shut down" in h.received[1][-1][2]
    with pytest.raises(RuntimeError, match="The engine has ended"):
        result(h.manager.call("resume"))


def test_prefix_cache_is_reset_only_while_nothing_runs() -> None:
    with (h := Harness()).manager:
        assert result(call_at(h, 1, 3, "reset_prefix_cache")) is False
        h.wait_final(1)
        assert h.scheduler.kv.num_cached and result(h.manager.call("reset_prefix_cache")) is True
        assert not h.scheduler.kv.num_cached
        h.ask(2, [1], max_tokens=80)
        h.wait_final(2)
        assert h.tokens(2) == expected([1], 80)
        assert result(h.manager.call("pause", clear_cache=False)) is False and h.scheduler.kv.num_cached
        assert result(h.manager.call("pause", mode="wait")) is True and not h.scheduler.kv.num_cached


@pytest.mark.parametrize("mode", ["keep", None])
def test_running_requests_compute_their_cache_again(mode: str | None) -> None:
    with (h := Harness()).manager:
        if mode is not None:
            result(call_at(h, 1, 20, "pause", mode=mode))
            assert result(h.manager.call("reset_prefix_cache", reset_running_requests=True))
            h.runner.cache[:] = -1  # as new weights make it: nothing of it may be read
            assert h.scheduler.num_paused == 1 and not h.scheduler.kv.num_used
            result(h.manager.call("resume"))
        else:
            assert result(call_at(h, 1, 20, "reset_prefix_cache", reset_running_requests=True))
        h.wait_final(1)
        assert h.tokens(1) == expected([1], 80) and h.scheduler.paused_total == 1
        with pytest.raises(ValueError, match="must be True or False"):
            result(h.manager.call("reset_prefix_cache", reset_running_requests=1))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ControlCall]]:
    """Calls that a test adds to the table."""
    for name in ("odd", "late"):
        monkeypatch.setitem(CALLS, name, ControlCall())
    yield CALLS


def test_errors_of_calls_leave_the_engine_serving(registered: dict[str, ControlCall]) -> None:
    def odd(host: Host, what: str, size: bytes = b"") -> int:
        if what == "raise":
            raise KeyError("no")
        if what == "ranks":
            host.on_ranks("odd", what=what)
        return len(size)

    registered["odd"] = ControlCall(odd)
    with (h := Harness()).manager:
        assert result(call_at(h, 1, 3, "odd", what="", size=bytes(1 << 20))) == 1 << 20
        with pytest.raises(KeyError):
            result(h.manager.call("odd", what="raise"))
        with pytest.raises(ControlError, match="create the batch manager with `call_ranks`"):
            result(h.manager.call("odd", what="ranks"))
        with pytest.raises(ControlError, match=r"There is no control call 'update'; there are .*is_paused, "):
            result(h.manager.call("update"))
        for arguments in ({}, {"what": "", "sort": 1}):
            with pytest.raises(ControlError, match="The control call odd takes what, size"):
                result(h.manager.call("odd", **arguments))
        with pytest.raises(ValueError, match="mode='stop' is not known: it is wait, abort, keep"):
            result(h.manager.call("pause", mode="stop"))
        h.wait_final(1)
    assert h.tokens(1) == expected([1], 80)


def test_handlers_of_ranks_run_with_no_step_in_flight(registered: dict[str, ControlCall]) -> None:
    answers: list[RankAnswer] = [RankAnswer(3), RankAnswer(fault=Fault("The disk is full", "failed"))]
    seen: list[tuple[str, dict[str, Any], int]] = []

    def call_ranks(name: str, arguments: dict[str, Any]) -> list[RankAnswer]:
        seen.append((name, arguments, len(h.manager._loop._in_flight)))
        return answers

    registered["odd"] = ControlCall(rank=lambda rank, path: None)
    with (h := Harness(call_ranks=call_ranks, run_ahead=3)).manager:
        with pytest.raises(ControlError, match=r"^Rank 1: The disk is full$") as error:
            result(call_at(h, 1, 3, "odd", path="/tmp"))
        assert error.value.kind == "failed"
        answers[1] = RankAnswer(4)
        assert result(h.manager.call("odd", path="/tmp")) == [3, 4]
        h.wait_final(1)
    assert seen == [("odd", {"path": "/tmp"}, 0)] * 2 and h.tokens(1) == expected([1], 80)


def test_failure_of_the_device_in_a_call_ends_the_engine(registered: dict[str, ControlCall]) -> None:
    def call_ranks(name: str, arguments: dict[str, Any]) -> list[RankAnswer]:
        raise RuntimeError("Rank 1 has ended unexpectedly")

    registered["odd"] = ControlCall(rank=lambda rank: None)
    h = Harness(call_ranks=call_ranks)
    with pytest.raises(RuntimeError, match="Rank 1 has ended"):
        result(call_at(h, 1, 3, "odd"))
    h.wait_final(1)
    h.manager.join()
    assert "Rank 1 has ended" in h.received[1][-1][2] and h.manager.failure is not None


def test_a_call_that_waits_for_steps_ends_with_the_engine(registered: dict[str, ControlCall]) -> None:
    def late(host: Host, end: int) -> Generator[None, None, int]:
        while host.num_launched < end:
            yield
        return host.num_launched

    registered["late"] = ControlCall(late)
    with (h := Harness()).manager:
        soon, never = h.manager.call("late", end=7), h.manager.call("late", end=10**6)
        h.ask(1, [1], max_tokens=20)
        assert result(soon) == 7 and not never.done()
    with pytest.raises(RuntimeError, match="The engine has ended"):
        result(never)


def test_calls_from_many_threads_are_all_answered() -> None:
    with (h := Harness()).manager:
        futures: list[Future[Any]] = []
        callers = [
            threading.Thread(target=lambda: futures.extend(h.manager.call("is_paused") for _ in range(20)))
            for _ in range(8)
        ]
        for caller in callers:
            caller.start()
        h.ask(1, [1], max_tokens=30)
        for caller in callers:
            caller.join()
        assert [result(future) for future in futures] == [False] * 160
        h.wait_final(1)
