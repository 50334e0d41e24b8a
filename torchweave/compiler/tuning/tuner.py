"""The tuner: asks the clock, and keeps a choice only where it wins by more than the noise.

A *question* is a subject (an op or a pass), a shape, a number of tokens, what runs today and what might run instead: a kernel
configuration, a fusion, a stream split, a build for one size. All of a question's candidates are timed in one run, each as
microseconds of one call and its noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchweave.compiler.tuning.measure import Call, Clock, Timing
from torchweave.compiler.tuning.table import Entry, Table
from torchweave.report import Report

BASELINE = ""
"""The name of what runs today, among the candidates and as a choice."""

_NOISE_FACTOR = 2.0  # a candidate wins when it saves more than twice the noise of both
_MIN_GAIN = 0.01  # and at least a hundredth of what the baseline takes


@dataclass(frozen=True)
class TuningTask:
    """What to run for a subject on a shape at a number of tokens.

    Attributes:
        baseline: carries out what runs today on copy i of the operands.
        candidates: carries out what might, by the words that the table keeps.
        copies: of operands; together too large for the caches.
    """

    subject: str
    shape: str
    tokens: int
    baseline: Call
    candidates: Mapping[str, Call]
    copies: int


def measure_task(tuning_task: TuningTask, clock: Clock) -> Entry | None:
    """The answer to a question; None when not even what runs today can be timed."""
    assert BASELINE not in tuning_task.candidates, "the empty name is the baseline's"
    timings = clock.time({BASELINE: tuning_task.baseline, **tuning_task.candidates}, tuning_task.copies)
    return best_entry(tuning_task.subject, tuning_task.shape, tuning_task.tokens, timings)


def best_entry(subject: str, shape: str, tokens: int, timings: Mapping[str, Timing]) -> Entry | None:
    """What the timings of a question's candidates say; None when the baseline is not among them."""
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
    """A table of the answers; an event `tuned` for each. Questions are drawn one by one, so that each may hold much memory."""
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
