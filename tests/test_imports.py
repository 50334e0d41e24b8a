"""What a process of the project's own imports is kept from the collector, and only that."""

from __future__ import annotations

import gc

import pytest

from torchweave import imports


def test_the_collector_rests_meanwhile_and_never_looks_at_what_was_imported() -> None:
    before = gc.get_freeze_count()
    try:
        with imports.for_good():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_it_goes_on_after_a_fault_and_rests_where_it_rested() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), imports.for_good():
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == frozen
    gc.disable()
    try:
        with imports.for_good():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
