"""Callbacks of the batch manager; see also test_manager_faults.py and test_statistics.py."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.engine.fake import expected, make
from torchweave.engine.batch_manager import BatchManager
from torchweave.engine.generation_loop import WakeUp
from torchweave.engine.request import InferenceRequest, Output, Response, SamplingParams


class Harness:
    """Callbacks that record what happened, and a batch manager over the fake model."""

    def __init__(self, together: bool = False, start_fault: BaseException | None = None, **options: Any) -> None:
        self.scheduler, self.runner = make(**options.pop("sizes", {}))
        self.runner.start_fault = start_fault
        self.todo: list[InferenceRequest] = []
        self.max_nums: list[int] = []
        self.received: dict[int, list[tuple[Output, bool, str]]] = defaultdict(list)
        self.free_at_final: list[int] = []
        self.stats: list[dict] = []
        self.stops: set[int] = set()
        self.threads: set[str] = set()
        self.calls = 0
        self.final = threading.Condition()
        self.order: list[str] = []
        self.faults: dict[str, BaseException] = {}
        self.before_send: Callable[[int, Output, bool], None] = lambda *response: None
        self.manager = BatchManager(
            self.scheduler,
            self.runner,
            self.get_requests,
            None if together else self.send_response,
            self.poll_stop,
            self.return_stats,
            send_responses=self.send_responses if together else None,
            **options,
        )

    def _note(self, callback: str) -> None:
        self.order.append(callback)
        if callback in self.faults:
            raise self.faults[callback]

    def return_stats(self, text: str) -> None:
        self._note("return_stats")
        self.stats.append(json.loads(text))

    def get_requests(self, max_num: int) -> list[InferenceRequest]:
        self.max_nums.append(max_num)
        self._note("get_requests")
        now = []
        while self.todo and (max_num < 0 or len(now) < max_num):
            now.append(self.todo.pop(0))
        return now

    def send_response(self, request_id: int, output: Output, final: bool, error: str) -> None:
        self._note("send_response")
        self.threads.add(threading.current_thread().name)
        self.before_send(request_id, output, final)
        with self.final:
            self.received[request_id].append((output, final, error))
            self.final.notify_all()

    def poll_stop(self) -> set[int]:
        self._note("poll_stop")
        now, self.stops = self.stops, set()
        return now

    def send_responses(self, responses: Sequence[Response]) -> None:
        self._note("send_responses")
        self.calls += 1
        for response in responses:
            self.send_response(*response)

    def ask(self, request_id: int, prompt: list[int], streaming: bool = False, **params: Any) -> None:
        sampling = SamplingParams(temperature=0, **params)
        self.todo.append(InferenceRequest(request_id, np.array(prompt), sampling, streaming))
        self.manager.wake()

    def wait_final(self, *ids: int, count: int = 1) -> None:
        def done() -> bool:
            return all(sum(final for _, final, _ in self.received[i]) >= count for i in ids)

        with self.final:
            assert self.final.wait_for(done, timeout=20), f"no final response for {ids}: {dict(self.received)}"

    def tokens(self, request_id: int) -> list[int]:
        return [int(token) for output, _, _ in self.received[request_id] for token in output.token_ids]


def test_tell_moves_is_a_deprecated_name_of_notify_state_changes() -> None:
    changes: list[tuple[int, str]] = []
    with pytest.warns(DeprecationWarning, match="use notify_state_changes"):
        h = Harness(tell_moves=changes.extend)
    with h.manager:
        h.ask(1, [1, 2], max_tokens=3)
        h.wait_final(1)
    assert changes == [(1, "started"), (1, "answering")]


def test_streaming_gets_every_step_and_others_one_final_response() -> None:
    with (h := Harness()).manager:
        h.ask(1, [1, 2], streaming=True, max_tokens=6)
        h.ask(2, [1, 2], max_tokens=6)
        h.wait_final(1, 2)
    assert [len(output.token_ids) for output, _, _ in h.received[1]] == [1] * 6
    assert [len(output.token_ids) for output, _, _ in h.received[2]] == [6]
    assert h.tokens(1) == h.tokens(2) == expected([1, 2], 6)
    assert [final for _, final, _ in h.received[1]] == [False] * 5 + [True]
    assert h.threads == {"torchweave-batch-manager"}


def test_all_responses_of_an_iteration_in_one_call() -> None:
    with (h := Harness(together=True)).manager:
        for number in (1, 2, 3):
            h.ask(number, [number], streaming=True, max_tokens=30)
        h.ask(4, [4], max_tokens=30)
        h.wait_final(1, 2, 3, 4)
    assert all(h.tokens(number) == expected([number], 30) for number in (1, 2, 3, 4))
    assert [len(output.token_ids) for output, _, _ in h.received[1]] == [1] * 30
    assert h.calls < 45, "a call an iteration, not one a response"


def test_exactly_one_response_callback() -> None:
    for send in (None, lambda *response: None):
        with pytest.raises(ValueError, match="either send_response or send_responses"):
            BatchManager(*make(), lambda max_num: [], send, send_responses=send)


def test_state_is_free_before_the_final_response() -> None:
    h = Harness()
    free: list[int] = []

    def watch(request_id: int, output: Output, final: bool) -> None:
        if final:
            free.append(h.scheduler.kv.num_used)

    h.before_send = watch
    with h.manager:
        h.ask(1, [3] * 9, max_tokens=8)
        h.wait_final(1)
    assert free == [0]


def test_max_num_is_never_exceeded() -> None:
    with (h := Harness(sizes={"max_batch_size": 2}, max_num_requests=3)).manager:
        for number in range(9):
            h.ask(number, [number + 1], max_tokens=4)
        h.wait_final(*range(9))
    assert max(h.max_nums) == 3 and min(h.max_nums) == 0
    assert all(h.tokens(number) == expected([number + 1], 4) for number in range(9))


def test_unlimited_max_num_takes_all_requests_at_each_step() -> None:
    with (h := Harness(sizes={"max_batch_size": 2})).manager:
        for number in range(9):
            h.ask(number, [number + 1], max_tokens=4)
        h.wait_final(*range(9))
    assert set(h.max_nums) == {-1} and len(h.max_nums) >= len(h.stats)


def test_duplicate_request_id_is_rejected_for_the_later_request() -> None:
    with (h := Harness()).manager:
        h.todo = [
            InferenceRequest(5, np.array([1, 2]), SamplingParams(temperature=0, max_tokens=40)),
            InferenceRequest(5, np.array([9]), SamplingParams(temperature=0, max_tokens=2)),
        ]
        h.manager.wake()
        h.wait_final(5, count=2)
        errors = [error for _, _, error in h.received[5]]
        assert "in flight" in errors[0] and not errors[1]
        assert h.tokens(5) == expected([1, 2], 40)
        h.ask(5, [9], max_tokens=2)  # usable again
        h.wait_final(5, count=3)
    assert h.received[5][-1][2] == ""


def test_ids_beyond_64_bits_are_refused() -> None:
    with (h := Harness()).manager:
        h.ask(2**64, [1])
        h.ask(2**64 - 1, [1], max_tokens=1)
        h.wait_final(2**64, 2**64 - 1)
    assert "2**64" in h.received[2**64][0][2] and not h.received[2**64 - 1][0][2]


def test_stopped_requests_return_their_tokens() -> None:
    h = Harness(sizes={"max_model_len": 2000, "num_blocks": 600})
    with h.manager:
        h.ask(1, [1], streaming=True, max_tokens=1900)
        while len(h.received[1]) < 5:
            time.sleep(0.001)
        h.stops = {1}
        h.wait_final(1)
    output, _, error = h.received[1][-1]
    assert output.finish_reason == "cancelled" and not error
    assert h.tokens(1) == expected([1], len(h.tokens(1))) and len(h.tokens(1)) < 1900


def test_shutdown_finishes_what_is_active() -> None:
    h = Harness()
    for number in range(12):
        h.ask(number, [number + 1], max_tokens=20)
    h.wait_final(0)
    h.manager.shutdown()
    assert not h.manager.alive
    answered = [number for number in range(12) if h.received[number]]
    assert all(h.tokens(number) == expected([number + 1], 20) for number in answered) and answered


def test_shutdown_without_drain_answers_each_with_an_error() -> None:
    h = Harness(sizes={"max_model_len": 2000, "num_blocks": 1000})
    for number in (1, 2):
        h.ask(number, [number], streaming=True, max_tokens=1900)
    while not (h.received[1] and h.received[2]):
        time.sleep(0.001)
    h.manager.shutdown(drain=False)
    assert all(h.received[number][-1][1] and "shut down" in h.received[number][-1][2] for number in (1, 2))
    assert h.scheduler.kv.num_free == h.scheduler.kv.num_blocks


def test_device_failure_answers_every_request() -> None:
    h = Harness()
    h.runner.fail_at = 3
    h.ask(1, [1], max_tokens=30)
    h.ask(2, [2], max_tokens=30)
    h.wait_final(1, 2)
    assert all("the device is gone" in h.received[number][-1][2] for number in (1, 2))
    h.manager.shutdown(timeout=5)
    assert not h.manager.alive and h.manager.failure is not None


def test_callback_order() -> None:
    """Requests are fetched before a step is formed; behind a step come its responses, then stops, then statistics."""
    with (h := Harness(run_ahead=1)).manager:
        h.ask(1, [1], streaming=True, max_tokens=3)
        h.wait_final(1)
    at = h.order.index("send_response")
    assert h.order[at - 1 : at + 8] == [
        "get_requests",
        *["send_response", "poll_stop", "return_stats", "get_requests"] * 2,
    ]


def test_a_request_that_waits_can_be_stopped() -> None:
    with (h := Harness(sizes={"max_batch_size": 1, "max_model_len": 500, "num_blocks": 200})).manager:
        h.ask(1, [1], streaming=True, max_tokens=400)
        h.ask(2, [2], max_tokens=400)
        while not h.received[1]:
            time.sleep(0.001)
        h.stops = {2, 77}
        h.wait_final(2)
        assert h.received[2][0][0].finish_reason == "cancelled" and h.received[2][0][0].token_ids.size == 0
        h.stops = {1}
        h.wait_final(1)


def test_a_higher_priority_overtakes_all_that_wait() -> None:
    """Whoever waits, waits in the manager: a queue of the client's would hide priorities from it."""
    h = Harness(sizes={"max_batch_size": 1})
    h.todo = [InferenceRequest(number, np.array([number + 1]), SamplingParams(max_tokens=4)) for number in range(40)]
    h.todo.append(InferenceRequest(99, np.array([5]), SamplingParams(max_tokens=4), priority=1))
    with h.manager:
        h.manager.wake()
        h.wait_final(*range(40), 99)
    assert list(h.received).index(99) <= 1


def test_garbage_collected_manager_finishes_active_requests() -> None:
    h = Harness()
    h.ask(1, [1], max_tokens=60)
    thread = h.manager._thread
    while not h.scheduler.num_active and not h.received[1]:
        time.sleep(0.001)
    del h.manager
    thread.join(20)
    assert not thread.is_alive() and h.tokens(1) == expected([1], 60)


def test_callback_may_shut_down_the_manager() -> None:
    h = Harness()
    h.before_send = lambda *response: h.manager.shutdown(drain=False)
    h.ask(1, [1], streaming=True, max_tokens=60)
    h.wait_final(1)
    h.manager._thread.join(20)
    assert not h.manager.alive and h.manager.failure is None
    assert "shut down" in h.received[1][-1][2]


def test_a_manager_that_is_shut_down_twice_or_idle_ends() -> None:
    h = Harness(idle_seconds=None)
    time.sleep(0.05)
    h.manager.shutdown(timeout=10)
    h.manager.shutdown(drain=False, timeout=10)
    assert not h.manager.alive and not h.received


def test_a_wake_up_is_cleared_by_the_wait_that_it_ends() -> None:
    event, ended = WakeUp(), threading.Event()
    event.set()
    event.set()
    event.wait(None)
    begin = time.monotonic()
    event.wait(0.05)  # not set: two of them before a wait are one
    assert time.monotonic() - begin >= 0.04
    waiter = threading.Thread(target=lambda: (event.wait(None), ended.set()))
    waiter.start()
    assert not ended.wait(0.05), "nobody has set it"
    event.set()
    assert ended.wait(10)
    waiter.join()
