"""The examination: run the subject eagerly, trace it, compile it, and collect the findings."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

from torchweave.doctor import graph_breaks, performance, recompiles, trace_failures
from torchweave.doctor.compile_run import compile_subject
from torchweave.doctor.eager_run import run_eager
from torchweave.doctor.finding import Finding, deduplicate, without_follow_on
from torchweave.doctor.source_reader import is_library
from torchweave.doctor.subject import Subject
from torchweave.doctor.tracing import trace


def examine(subject: Subject) -> list[Finding]:
    """All findings, worst first; empty for a module without problems.

    Raises:
        ValueError: forward raises on the described inputs at every size.
    """
    with _quiet():
        eager_result = run_eager(subject)
        if not eager_result.results:
            size, error = next(iter(eager_result.errors.items()))
            raise ValueError(f"forward of {subject.name} raises on its inputs at a size of {size}: {error}")
        trace_result = trace(subject, [fault.op for fault in eager_result.faults])
        whole = trace_result.is_one_graph() and not eager_result.faults and not subject.takes_numbers
        compile_result = compile_subject(subject, eager_result) if whole else None
    findings = (
        *trace_failures.find(eager_result, trace_result),
        *graph_breaks.find(eager_result, trace_result),
        *performance.find(subject, trace_result, compile_result),
        *recompiles.find(eager_result, trace_result, compile_result),
    )
    return deduplicate(without_follow_on(findings, is_library))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the subject's output and torch's warnings and logs."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
