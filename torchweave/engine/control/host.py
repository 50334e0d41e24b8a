"""The leader's side of control calls: a queue that any thread fills, and that the generation loop runs between two steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from torchweave.engine.control.errors import ControlError, joined
from torchweave.engine.control.rank import RankAnswer
from torchweave.engine.request import Response
from torchweave.engine.scheduler.scheduler import Scheduler

PauseMode = Literal["wait", "abort", "keep"]
CallRanks = Callable[[str, dict[str, Any]], Sequence[RankAnswer]]
"""Runs the rank handler of a name with arguments on every rank; returns their answers by rank."""
Value = TypeVar("Value")


@dataclass
class Task:
    """Work for the loop's thread: it returns the result, or a generator that the loop continues before each step until it ends."""

    work: Callable[[Host], Any]
    future: Future[Any] = field(default_factory=Future)
    generator: Generator[Any, Any, Any] | None = None


class Host:
    """What host handlers use, on the loop's thread.

    Args:
        scheduler: of the engine. Steps may be in flight, see `drain`.
        send: sends responses to their requests.
        collect_all: waits for the steps in flight and processes their results.
        call_ranks: None: the engine's ranks cannot be called.

    Attributes:
        state: what handlers keep between calls, by a name of theirs.
        pause_mode: mode of the pause; None: the engine is not paused.
        num_launched: steps so far.
        failure: of the device; it ends the loop, whatever a handler does with it.
        tasks: those that wait.
        wake: lets the loop continue the tasks that wait, from any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        send: Callable[[Sequence[Response]], None],
        collect_all: Callable[[], None],
        call_ranks: CallRanks | None,
    ) -> None:
        self.scheduler, self.send = scheduler, send
        self.state: dict[str, Any] = {}
        self.pause_mode: PauseMode | None = None
        self.num_launched = 0
        self.failure: BaseException | None = None
        self.tasks: list[Task] = []
        self.wake: Callable[[], None] = lambda: None
        self._collect_all = collect_all
        self._call_ranks = call_ranks

    def drain(self) -> None:
        """Wait for the steps in flight, and process their results."""
        self._or_fail(self._collect_all)

    def on_ranks(self, name: str, **arguments: Any) -> list[Any]:
        """Run the rank handler of `name` on every rank, with no step in flight; returns the results by rank.

        Raises:
            ControlError: the handler failed on a rank, which the message names if there are several. All ranks have answered.
        """
        if self._call_ranks is None:
            raise ControlError(f"{name} runs on the engine's ranks; create the batch manager with `call_ranks`.")
        self.drain()
        answers = self._or_fail(partial(self._call_ranks, name, arguments))
        faults = {f"Rank {rank}": answer.fault for rank, answer in enumerate(answers) if answer.fault is not None}
        if faults:
            raise ControlError(*faults["Rank 0"]) if len(answers) == 1 else joined(faults)
        return [answer.result for answer in answers]

    def in_background(self, work: Callable[[], Value]) -> Generator[None, None, Value]:
        """Run `work` on a thread of its own while steps run; for `yield from` in a handler that is a generator."""
        future: Future[Value] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            self.wake()

        threading.Thread(target=run, name="torchweave-control", daemon=True).start()
        while not future.done():
            yield
        return future.result()

    def run_later(self, task: Generator[None, None, Any]) -> None:
        """Continue `task` before each step until it ends; its error is logged."""
        self.tasks.append(Task(lambda _: None, generator=task))

    def _or_fail(self, work: Callable[[], Value]) -> Value:
        try:
            return work()
        except BaseException as failure:
            self.failure = failure
            raise


class ControlQueue:
    """Calls that wait for the loop. `run_on_loop` and `close` may be called from any thread.

    Attributes:
        queued: those that have not begun.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._lock = threading.Lock()
        self.queued: deque[Task] = deque()
        self._end_reason = ""

    def run_on_loop(self, work: Callable[[Host], Any]) -> Future[Any]:
        """Queue `work` for the loop's thread; the future has its result or error."""
        task = Task(work)
        with self._lock:
            if not self._end_reason:
                self.queued.append(task)
                return task.future
        task.future.set_exception(RuntimeError(self._end_reason))
        return task.future

    def close(self, reason: str) -> None:
        """Refuse further calls, and fail those that have not ended."""
        with self._lock:
            self._end_reason = reason
            tasks = [*self._host.tasks, *self.queued]
            self._host.tasks.clear()
            self.queued.clear()
        for task in tasks:
            if not task.future.done():
                task.future.set_exception(RuntimeError(reason))

    def run(self) -> None:
        """Continue the calls that wait, and begin the queued ones. Called by the loop before it schedules a step.

        Raises:
            BaseException: the device failed meanwhile.
        """
        waiting, self._host.tasks = self._host.tasks, []
        for task in waiting:
            self._advance(task)
        while self.queued:
            task = self.queued.popleft()
            if task.future.set_running_or_notify_cancel():
                self._advance(task)

    def _advance(self, task: Task) -> None:
        try:
            if task.generator is None:
                result = task.work(self._host)
                if not isinstance(result, Generator):
                    task.future.set_result(result)
                    return
                task.generator = result
            next(task.generator)
        except StopIteration as end:
            task.future.set_result(end.value)
        except BaseException as error:
            task.future.set_exception(error)
            if self._host.failure is not None or not isinstance(error, Exception):
                raise
        else:
            self._host.tasks.append(task)
