"""Objects frozen out of the garbage collector, and for how long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from torchweave.utils import gc as collector


@pytest.fixture(autouse=True)
def python_default_thresholds() -> Iterator[None]:
    """Those of a user's process; the suite's are higher."""
    usual = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*usual)


def test_gc_is_paused_and_imports_are_frozen() -> None:
    before = gc.get_freeze_count()
    try:
        with collector.gc_frozen_after():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_gc_state_is_restored_after_an_exception() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), collector.gc_frozen_after():
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == frozen
    gc.disable()
    try:
        with collector.gc_frozen_after():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_existing_objects_are_frozen_while_an_engine_runs() -> None:
    kept, before = [[] for _ in range(1000)], gc.get_freeze_count()
    with collector.gc_frozen():
        during = gc.get_freeze_count()
        assert during >= before + len(kept)
        made = [[]]
        made.append(made)  # what comes later is looked through as ever
        del made
        assert gc.collect() > 0
    assert gc.get_freeze_count() == 0


def test_manual_collect_runs_only_when_called() -> None:
    usual = gc.get_threshold()
    with collector.gc_frozen_manual_collect():
        assert gc.get_threshold()[0] > 10 * usual[0], "by itself only where nobody tells it"
        gc.collect()
        loops = []
        for _ in range(2000):
            loops.append([])
            loops[-1].append(loops[-1])
        loops.clear()
        assert gc.get_count()[0] >= 2000
        collector.collect_if_due()
        assert gc.get_count()[0] < 700
        count = gc.get_count()
        collector.collect_if_due()
        assert gc.get_count()[1] == count[1], "nothing was due"
    assert gc.get_threshold() == usual


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_manual_collect_reaches_old_generations() -> None:
    with collector.gc_frozen_manual_collect():
        made = _Cycle()
        alive = weakref.ref(made)
        for _ in range(2):
            gc.collect(1)  # it is old now
        del made
        gc.collect(1)
        assert alive() is not None
        for _ in range(200):
            some = [[] for _ in range(1000)]
            collector.collect_if_due()
            del some
        assert alive() is None
