"""Where requests go, as numbers; over HTTP it is tests/serving/engine_client/test_replicas.py."""

from __future__ import annotations

import numpy as np

from torchweave.serving.engine_client.load_balancer import (
    REQUEST_TOKENS,
    SPAN,
    Beginnings,
    Load,
    Router,
    Sent,
    spans_of,
)
from torchweave.serving.ipc.shared_load import Ledger

CACHE = 100 * SPAN


def load(replica: int, num_requests: int = 0, unread: int = 0, life: int = 0, is_full: bool = False) -> Load:
    return Load(replica, life, num_requests, unread, is_full, CACHE)


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def test_the_least_work_wins_and_equals_take_turns() -> None:
    router = Router()
    short = prompt(0, 8)
    assert router.choose(short, "", [load(0, 3, 10), load(1, 2, 10)]) == (1, 0)
    assert router.choose(short, "", [load(0, 1, 10_000), load(1, 5)])[0] == 1, (
        "a long prompt weighs more than many answers"
    )
    assert router.choose(short, "", [load(0, 0, REQUEST_TOKENS), load(1, 1)])[0] == 0, "the same work: fewer requests"
    turns = [router.choose(short, "", [load(0), load(1), load(2)])[0] for _ in range(6)]
    assert turns == [1, 2, 0, 1, 2, 0]
    assert [router.choose(short, "", [load(0), load(2)])[0] for _ in range(3)] == [2, 0, 2], "replica 1 is gone"


def test_turns_go_on_in_another_http_process() -> None:
    ledger = Ledger(engines=3, frontends=2)
    here, there = Router(ledger=ledger), Router(ledger=ledger)
    alike = [load(0), load(1), load(2)]
    turns = [router.choose(prompt(0, 8), "", alike)[0] for router in (here, here, there, here, there, there)]
    assert turns == [0, 1, 2, 0, 1, 2]


def test_a_conversation_stays_until_its_replica_is_much_busier() -> None:
    router = Router()
    first = prompt(1, 10 * SPAN + 7)
    home, known = router.choose(first, "", [load(0), load(1)])
    assert known == 0
    more = np.concatenate([first, prompt(2, 50)])
    here, there = load(home, 2), load(1 - home)
    found = router.choose(more, "", sorted([here, there], key=lambda each: each.replica))
    assert found == (home, 10 * SPAN), "two answers are less than ten spans that would be read again"
    full = load(home, 2, is_full=True)
    assert Router().choose(more, "", [full, load(1 - home, 500)])[0] == 1 - home, "who has room comes first"
    busy = load(home, 10 * SPAN // REQUEST_TOKENS + 1)
    found = router.choose(more, "", sorted([busy, there], key=lambda each: each.replica))
    assert found == (1 - home, 0)
    assert router.choose(more, "", [load(1 - home)]) == (1 - home, 10 * SPAN), "now both have it"


def test_others_salts_and_new_lives_know_nothing() -> None:
    router = Router()
    words = prompt(3, 5 * SPAN)
    router.choose(words, "", [load(0)])
    assert router.choose(words, "other", [load(0)])[1] == 0
    assert router.choose(words, "", [load(0)])[1] == 5 * SPAN
    assert router.choose(words, "", [load(0, life=1)])[1] == 0, "the engine was started again"
    changed = words.copy()
    changed[SPAN + 3] += 1
    assert router.choose(changed, "", [load(0, life=1)])[1] == SPAN
    off = Router(prefixes=False)
    assert [off.choose(words, "", [load(0)])[1] for _ in range(2)] == [0, 0]


def test_what_a_cache_cannot_hold_is_forgotten_from_its_end() -> None:
    spans = spans_of(prompt(4, 6 * SPAN), "")
    assert len(set(spans)) == 6 and spans_of(prompt(4, 6 * SPAN - 1), "") == spans[:5]
    read = Beginnings(0)
    read.add(spans, room=4)
    assert read.longest(spans) == 4
    read.add(spans_of(prompt(5, 2 * SPAN), ""), room=4)
    assert read.longest(spans) == 2
    read.add(spans, room=0)
    assert read.longest(spans) == 0


def test_routers_of_other_processes_learn_what_one_has_sent() -> None:
    sent: list[Sent] = []
    here, there = Router(announce=sent.append), Router()
    words = prompt(6, 3 * SPAN)
    assert here.choose(words, "salt", [load(1)]) == (1, 0)
    for each in sent:
        there.learn(each)
    assert there.choose(words, "salt", [load(0), load(1)]) == (1, 3 * SPAN)
    assert there.choose(words, "", [load(1)])[1] == 0
