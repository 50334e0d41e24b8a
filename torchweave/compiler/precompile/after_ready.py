"""Report kernels and graphs that are built while the engine serves: each delays every request, by up to seconds."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from typing import Any

from torchweave.report import Report

_log = logging.getLogger("torchweave")
_reports: weakref.WeakSet[Report] = weakref.WeakSet()
_lock = threading.Lock()


def watch_builds(report: Report, has_triton: bool) -> None:
    """Record a `compile_after_ready` event for everything that this process compiles after the report's `ready` event, and a
    `load_after_ready` event for a kernel that Triton's cache holds, which takes milliseconds.

    Args:
        has_triton: the engine launches Triton kernels, which are compiled at the first launch with other types or constants.
    """
    with _lock:
        _reports.add(report)
        if has_triton:
            _listen_to_triton()
        if "torch._dynamo" in sys.modules:
            from torch._dynamo.callback import callback_handler

            if _on_compile_start not in callback_handler.start_callbacks:
                callback_handler.register_start_callback(_on_compile_start)


def _listen_to_triton() -> None:
    from triton import knobs

    before = knobs.compilation.listener
    if getattr(before, "reports_builds", False):
        return

    def on_build(*, src: Any, cache_hit: bool, **facts: Any) -> None:
        if before is not None:
            before(src=src, cache_hit=cache_hit, **facts)
        _report_build(f"Triton kernel {getattr(src, 'name', '')}", cache_hit)

    on_build.reports_builds = True  # type: ignore[attr-defined]
    knobs.compilation.listener = on_build


def _on_compile_start(*_: Any) -> None:
    _report_build("graph of torch.compile", False)


def _report_build(what: str, from_cache: bool) -> None:
    for report in list(_reports):
        if report.select("ready"):
            report.event("load_after_ready" if from_cache else "compile_after_ready", what=what)
            if not from_cache:
                _log.warning("Compiled %s after the engine was ready, while requests waited.", what)
