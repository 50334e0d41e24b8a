"""The tuner: times the candidates of each tuning task and keeps a winner only if it gains more than the noise.

A candidate is a kernel configuration, a fusion, a stream split, or a build for one size. All candidates of a task are timed in
one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchweave.compiler.tuning.measure import Call, Clock, Timing
from torchweave.compiler.tuning.table import Entry, Table
from torchweave.report import Report

BASELINE = ""
"""Name of the baseline in timings, and as a table's choice."""

_NOISE_FACTOR = 2.0  # a candidate must save more than twice the combined noise
_MIN_GAIN = 0.01  # and more than this share of the baseline's time


@dataclass(frozen=True)
class TuningTask:
    """Candidates for an op or pass (`subject`) on a shape at a token count.

    Attributes:
        baseline: runs the default on copy i of the operands.
        candidates: the alternatives, by their choice in the table.
        copies: number of copies of the operands; together larger than the caches.
    """

    subject: str
    shape: str
    tokens: int
    baseline: Call
    candidates: Mapping[str, Call]
    copies: int


def measure_task(tuning_task: TuningTask, clock: Clock) -> Entry | None:
    """Time a task; None if the baseline cannot be timed."""
    assert BASELINE not in tuning_task.candidates, "the empty name is reserved for the baseline"
    timings = clock.time({BASELINE: tuning_task.baseline, **tuning_task.candidates}, tuning_task.copies)
    return best_entry(tuning_task.subject, tuning_task.shape, tuning_task.tokens, timings)


def best_entry(subject: str, shape: str, tokens: int, timings: Mapping[str, Timing]) -> Entry | None:
    """The table entry that follows from a task's timings; None without a timing of the baseline."""
    if BASELINE not in timings:
        return None
    baseline = timings[BASELINE]
    name = min(timings, key=lambda each: timings[each].microseconds)
    best = timings[name]
    noise = baseline.noise + best.noise
    if baseline.microseconds - best.microseconds <= max(_NOISE_FACTOR * noise, _MIN_GAIN * baseline.microseconds):
        name, best = BASELINE, baseline
    times = (round(best.microseconds, 3), round(baseline.microseconds, 3), round(noise, 3))
    return Entry(subject, shape, tokens, name, *times)


def tune(
    tuning_tasks: Iterable[TuningTask], clock: Clock, device: str, report: Report, total: int | None = None
) -> Table:
    """Run the tasks into a table, with an event `tuned` for each; a generator of tasks holds one task's operands at a time."""
    entries: list[Entry] = []
    with report.progress("measuring choices", total or 0) as advance:
        for tuning_task in tuning_tasks:
            entry = measure_task(tuning_task, clock)
            if entry is not None:
                entries.append(entry)
                report.event(
                    "tuned",
                    subject=entry.subject,
                    shape=entry.shape,
                    tokens=entry.tokens,
                    choice=entry.choice,
                    microseconds=entry.microseconds,
                    baseline=entry.baseline,
                    saved=entry.saved,
                    noise=entry.noise,
                )
            advance(1, f"{tuning_task.subject} {tuning_task.shape} T={tuning_task.tokens}")
    return Table(device, tuple(entries), "tuned on this machine")
