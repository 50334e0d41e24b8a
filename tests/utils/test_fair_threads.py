"""Threads that several clients share."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from torchweave.utils.fair_threads import FairThreads


def test_the_first_job_of_a_client_does_not_wait_for_those_of_another() -> None:
    threads, may_end = FairThreads(2, "test"), threading.Event()
    long = [threads.submit("a", lambda: may_end.wait(60)) for _ in range(16)]
    assert threads.submit("b", lambda: 5).result(60) == 5
    assert threads.submit("c", lambda: 6).result(60) == 6
    assert not any(each.done() for each in long)
    may_end.set()
    assert all(each.result(60) for each in long)


def test_clients_take_turns_and_keep_their_order() -> None:
    threads, may_begin, may_end = FairThreads(1, "test"), threading.Event(), threading.Event()
    threads.submit("x", lambda: may_end.wait(60))  # leaves one thread
    threads.submit("y", lambda: may_begin.wait(60))
    order: list[str] = []
    jobs: list[Future[None]] = []
    for client, count in (("a", 3), ("b", 2), ("c", 1)):
        jobs += [threads.submit(client, lambda it=f"{client}{number}": order.append(it)) for number in range(count)]
    jobs[1].cancel()  # its client has left
    may_begin.set()
    for each in jobs:
        assert each.cancelled() or each.exception(60) is None
    may_end.set()
    assert order == ["a0", "b0", "c0", "b1", "a2"]


def test_errors_reach_the_future_and_the_thread_goes_on() -> None:
    threads = FairThreads(1, "test")

    def fail() -> None:
        raise KeyError("a")

    with pytest.raises(KeyError):
        threads.submit("a", fail).result(60)
    assert threads.submit("a", lambda: 1).result(60) == 1
