"""The first rank compiles what the others load: each entry once, available as soon as it is stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchweave.compiler.cache.store import CompileCache
from torchweave.engine.startup.compile_model import CacheLock
from torchweave.report import Report

LIMIT = 20.0
NAMES = ("embedding", "layer", "head")


class Rank:
    """Loads or makes three pieces in its turn; `making` is called before each that it makes."""

    def __init__(self, folder: Path, first: bool, barrier: threading.Barrier) -> None:
        self.made: list[str] = []
        self.loaded: list[str] = []
        self._cache_lock = CacheLock(first, lambda: barrier.wait(LIMIT) and None)
        self._cache = CompileCache(folder, Report(show=False), self._cache_lock.wait)

    def compile_graph(self, making: Callable[[str], None]) -> None:
        with self._cache_lock.lock_cache():
            for name in NAMES:
                if self._cache.load("piece", {"piece": name}) is not None:
                    self.loaded.append(name)
                    continue
                making(name)
                self.made.append(name)
                self._cache.store("piece", {"piece": name}, name.encode())


@pytest.fixture
def ranks(tmp_path: Path) -> tuple[Rank, Rank]:
    barrier = threading.Barrier(2)
    return Rank(tmp_path / "cache", True, barrier), Rank(tmp_path / "cache", False, barrier)


def test_other_ranks_load_a_piece_while_the_next_is_compiled(ranks: tuple[Rank, Rank]) -> None:
    first, other = ranks

    def making(name: str) -> None:
        if name == "head":  # not before the other one has what was made so far
            while len(other.loaded) < 2:
                time.sleep(0.01)

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(first.compile_graph, making), pool.submit(other.compile_graph, pytest.fail)]:
            each.result(LIMIT)
    assert first.made == list(NAMES) and other.loaded == list(NAMES) and not other.made


def test_warm_start_loads_without_waiting_for_the_first_rank(ranks: tuple[Rank, Rank]) -> None:
    first, other = ranks
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(rank.compile_graph, lambda name: None) for rank in ranks]:
            each.result(LIMIT)
        again = pool.submit(other.compile_graph, pytest.fail)
        while len(other.loaded) < 6 and not again.done():  # before the first one has begun
            time.sleep(0.01)
        pool.submit(first.compile_graph, pytest.fail).result(LIMIT)
        again.result(LIMIT)
    assert first.made == list(NAMES) and first.loaded == list(NAMES) and other.loaded == [*NAMES, *NAMES]


def test_other_ranks_compile_entries_that_could_not_be_stored(ranks: tuple[Rank, Rank]) -> None:
    first, other = ranks
    first._cache.store = lambda *_: ""  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(rank.compile_graph, lambda name: None) for rank in ranks]:
            each.result(LIMIT)
    assert first.made == list(NAMES) == other.made and not other.loaded


def test_failure_of_the_first_rank_releases_the_others(ranks: tuple[Rank, Rank]) -> None:
    first, other = ranks

    def fail(name: str) -> None:
        raise RuntimeError(f"no {name}")

    with ThreadPoolExecutor(2) as pool:
        failing, waiting = pool.submit(first.compile_graph, fail), pool.submit(other.compile_graph, lambda name: None)
        with pytest.raises(RuntimeError, match="no embedding"):
            failing.result(LIMIT)
        waiting.result(LIMIT)
    assert other.made == list(NAMES)
