"""Load balancing policies as numbers; over HTTP they are tested in test_replicas.py."""

from __future__ import annotations

import numpy as np

from torchweave.serving.engine_client.load_balancer import (
    PREFIX_CHUNK,
    REQUEST_COST,
    Load,
    LoadBalancer,
    PrefixHistory,
    PromptRouted,
    hash_prefixes,
)
from torchweave.serving.ipc.shared_load import SharedLoad

CACHE = 100 * PREFIX_CHUNK


def load(
    replica: int, num_requests: int = 0, pending_prefill_tokens: int = 0, num_restarts: int = 0, is_full: bool = False
) -> Load:
    return Load(replica, num_restarts, num_requests, pending_prefill_tokens, is_full, CACHE)


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def test_least_work_wins_and_ties_are_round_robin() -> None:
    router = LoadBalancer()
    short = prompt(0, 8)
    assert router.choose(short, "", [load(0, 3, 10), load(1, 2, 10)]) == (1, 0)
    assert router.choose(short, "", [load(0, 1, 10_000), load(1, 5)])[0] == 1, (
        "a long prompt weighs more than many answers"
    )
    assert router.choose(short, "", [load(0, 0, REQUEST_COST), load(1, 1)])[0] == 0, "the same work: fewer requests"
    chosen = [router.choose(short, "", [load(0), load(1), load(2)])[0] for _ in range(6)]
    assert chosen == [1, 2, 0, 1, 2, 0]
    assert [router.choose(short, "", [load(0), load(2)])[0] for _ in range(3)] == [2, 0, 2], "replica 1 is gone"


def test_round_robin_is_shared_by_http_processes() -> None:
    shared_load = SharedLoad(engines=3, frontends=2)
    here, there = LoadBalancer(shared_load=shared_load), LoadBalancer(shared_load=shared_load)
    alike = [load(0), load(1), load(2)]
    chosen = [router.choose(prompt(0, 8), "", alike)[0] for router in (here, here, there, here, there, there)]
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_conversation_stays_until_its_replica_is_much_busier() -> None:
    router = LoadBalancer()
    first = prompt(1, 10 * PREFIX_CHUNK + 7)
    home, known = router.choose(first, "", [load(0), load(1)])
    assert known == 0
    more = np.concatenate([first, prompt(2, 50)])
    here, there = load(home, 2), load(1 - home)
    found = router.choose(more, "", sorted([here, there], key=lambda each: each.replica))
    assert found == (home, 10 * PREFIX_CHUNK), "two answers are less than ten spans that would be read again"
    full = load(home, 2, is_full=True)
    assert LoadBalancer().choose(more, "", [full, load(1 - home, 500)])[0] == 1 - home, "who has room comes first"
    busy = load(home, 10 * PREFIX_CHUNK // REQUEST_COST + 1)
    found = router.choose(more, "", sorted([busy, there], key=lambda each: each.replica))
    assert found == (1 - home, 0)
    assert router.choose(more, "", [load(1 - home)]) == (1 - home, 10 * PREFIX_CHUNK), "now both have it"


def test_prefixes_are_not_shared_across_salts_or_restarts() -> None:
    router = LoadBalancer()
    words = prompt(3, 5 * PREFIX_CHUNK)
    router.choose(words, "", [load(0)])
    assert router.choose(words, "other", [load(0)])[1] == 0
    assert router.choose(words, "", [load(0)])[1] == 5 * PREFIX_CHUNK
    assert router.choose(words, "", [load(0, num_restarts=1)])[1] == 0, "the engine was started again"
    changed = words.copy()
    changed[PREFIX_CHUNK + 3] += 1
    assert router.choose(changed, "", [load(0, num_restarts=1)])[1] == PREFIX_CHUNK
    off = LoadBalancer(prefixes=False)
    assert [off.choose(words, "", [load(0)])[1] for _ in range(2)] == [0, 0]


def test_prefix_history_evicts_the_longest_prefixes_first() -> None:
    prefix_hashes = hash_prefixes(prompt(4, 6 * PREFIX_CHUNK), "")
    assert len(set(prefix_hashes)) == 6 and hash_prefixes(prompt(4, 6 * PREFIX_CHUNK - 1), "") == prefix_hashes[:5]
    read = PrefixHistory(0)
    read.add(prefix_hashes, capacity=4)
    assert read.num_matching(prefix_hashes) == 4
    read.add(hash_prefixes(prompt(5, 2 * PREFIX_CHUNK), ""), capacity=4)
    assert read.num_matching(prefix_hashes) == 2
    read.add(prefix_hashes, capacity=0)
    assert read.num_matching(prefix_hashes) == 0


def test_load_balancers_of_other_processes_learn_routed_prompts() -> None:
    sent: list[PromptRouted] = []
    here, there = LoadBalancer(announce=sent.append), LoadBalancer()
    words = prompt(6, 3 * PREFIX_CHUNK)
    assert here.choose(words, "salt", [load(1)]) == (1, 0)
    for each in sent:
        there.on_prompt_routed(each)
    assert there.choose(words, "salt", [load(0), load(1)]) == (1, 3 * PREFIX_CHUNK)
    assert there.choose(words, "", [load(1)])[1] == 0
