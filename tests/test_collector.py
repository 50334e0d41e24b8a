"""What is kept from the collector, and for how long."""

from __future__ import annotations

import gc

import pytest

from torchweave import collector


def test_the_collector_rests_meanwhile_and_never_looks_at_what_was_imported() -> None:
    before = gc.get_freeze_count()
    try:
        with collector.for_good():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_it_goes_on_after_a_fault_and_rests_where_it_rested() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), collector.for_good():
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == frozen
    gc.disable()
    try:
        with collector.for_good():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_what_exists_before_an_engine_runs_is_left_alone_while_it_does() -> None:
    kept, before = [[] for _ in range(1000)], gc.get_freeze_count()
    with collector.at_rest():
        during = gc.get_freeze_count()
        assert during >= before + len(kept)
        made = [[]]
        made.append(made)  # what comes later is looked through as ever
        del made
        assert gc.collect() > 0
    assert gc.get_freeze_count() == 0
