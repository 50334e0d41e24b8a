"""The examination on one page: watch it run, trace it, weave it, and say what was found."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

from torchweave.doctor import graph_breaks, performance, recompiles, trace_failures
from torchweave.doctor.compile_run import attempt
from torchweave.doctor.eager_run import observe
from torchweave.doctor.finding import Finding, settle
from torchweave.doctor.subject import Subject
from torchweave.doctor.tracing import trace


def examine(subject: Subject) -> list[Finding]:
    """Everything that was found, worst first; empty for a module that is captured once and runs as it should.

    Raises:
        ValueError: forward cannot be run on the inputs that were described.
    """
    with _quiet():
        observed = observe(subject)
        if not observed.results:
            size, error = next(iter(observed.errors.items()))
            raise ValueError(f"forward of {subject.name} raises on its inputs at a size of {size}: {error}")
        traced = trace(subject, [fault.op for fault in observed.faults])
        whole = traced.is_one_graph() and not observed.faults and not subject.takes_numbers
        wove = attempt(subject, observed) if whole else None
    return settle(
        (
            *trace_failures.find(observed, traced),
            *graph_breaks.find(observed, traced),
            *performance.find(subject, traced, wove),
            *recompiles.find(subject, observed, traced, wove),
        )
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the subject prints, and torch's own advice, out of the report."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
