"""Events, artifacts and progress of an engine.

A `Report` is passed explicitly. `explain`, the dump folder, metrics and HTML pages read it, so that each decision is recorded
once, where it is made.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

_log = logging.getLogger("torchweave")
Listener = Callable[[str, dict[str, Any]], None]
ArtifactSink = Callable[[str, str], None]


class Report:
    """A thread-safe list of events (kind and facts), and artifacts (texts generated on demand).

    Args:
        show: show progress bars of long work. None: if standard error is a terminal.
    """

    def __init__(self, show: bool | None = None) -> None:
        self._events: list[tuple[float, str, dict[str, Any]]] = []
        self._listeners: list[Listener] = []
        self._artifact_sinks: list[ArtifactSink] = []
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._show = sys.stderr.isatty() if show is None else show

    def seconds(self) -> float:
        """Seconds since the report's creation."""
        return time.monotonic() - self._start

    def event(self, kind: str, /, **facts: Any) -> None:
        """Record an event; a `warning` (`what`, `why`) is also logged, and at the level DEBUG every event but progress."""
        if kind == "warning":
            _log.warning("%s: %s", facts["what"], facts["why"])
        elif kind != "progress" and _log.isEnabledFor(logging.DEBUG):
            _log.debug("%.3f s: %s %s", self.seconds(), kind, " ".join(f"{key}={fact}" for key, fact in facts.items()))
        with self._lock:
            self._events.append((self.seconds(), kind, facts))
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener(kind, facts)

    def listen(self, listener: Listener) -> None:
        """Call `listener(kind, facts)` for every later event, on the recording thread."""
        with self._lock:
            self._listeners.append(listener)

    def artifact(self, name: str, text: str | Callable[[], str]) -> None:
        """Offer a text, such as a graph or generated code, under a relative path such as `passes/00-merge/after.py`.

        A callable runs only if a sink is registered. Its exceptions become the text, since diagnostics must not stop the work.
        """
        with self._lock:
            sinks = tuple(self._artifact_sinks)
        if not sinks:
            return
        if not isinstance(text, str):
            try:
                text = text()
            except Exception as error:
                text = f"# this text could not be generated: {type(error).__name__}: {error}\n"
        for sink in sinks:
            sink(name, text)

    def keep(self, sink: ArtifactSink) -> None:
        """Call `sink(name, text)` for every later artifact; `report.keep(texts.__setitem__)` collects them in a dict."""
        with self._lock:
            self._artifact_sinks.append(sink)

    def select(self, kind: str) -> list[dict[str, Any]]:
        """Facts of every event of one kind, oldest first, each with `at`: seconds since the report's creation."""
        with self._lock:
            return [{"at": at, **facts} for at, name, facts in self._events if name == kind]

    def events(self) -> list[dict[str, Any]]:
        """Every event as `{"at": seconds, "event": kind, **facts}`."""
        with self._lock:
            return [{"at": at, "event": kind, **facts} for at, kind, facts in self._events]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the duration of a start-up stage as a `stage` event with `seconds`."""
        begin = time.monotonic()
        yield
        self.event("stage", name=name, seconds=time.monotonic() - begin)

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[..., None]]:
        """Yield `advance(steps=1, note="")`, which records a `progress` event and updates a bar on a terminal."""
        done = 0
        bars = progress_bars() if self._show and total > 0 else None
        task = bars.add_task(title, total=total, note="") if bars is not None else None

        def advance(steps: int = 1, note: str = "") -> None:
            nonlocal done
            done += steps
            self.event("progress", title=title, done=done, total=total, note=note)
            if bars is not None and task is not None:
                bars.update(task, completed=done, note=note)

        with bars or nullcontext(), self.stage(title):
            yield advance


def progress_bars() -> Progress:
    """Progress bars on standard error; each task has a `note`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    return Progress(*columns, console=Console(stderr=True))
