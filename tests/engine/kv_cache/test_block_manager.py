"""Blocks are given once, in order, and come back whole."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from tests.engine.fake import make
from tests.engine.scheduler.test_scheduler import request
from torchweave.engine.kv_cache.block_manager import KVCache
from torchweave.engine.kv_cache.prefix_index import Hashes, Match


def test_grants_fill_the_table_in_order() -> None:
    kv = KVCache(num_blocks=10, block_size=4, max_slots=3, max_blocks_per_slot=5)
    for slot in range(3):
        kv.reserve(slot, 64)
    grant = kv.grant(np.array([0, 2]), np.array([5, 9]))
    assert grant.slots.tolist() == [0, 0, 2, 2, 2] and grant.columns.tolist() == [0, 1, 0, 1, 2]
    assert len(set(grant.blocks.tolist())) == 5 and kv.num_free == 5
    assert kv.grant(np.array([0]), np.array([8])).blocks.size == 0, "the second block still has room"
    more = kv.grant(np.array([0, 1]), np.array([9, 1]))
    assert more.slots.tolist() == [0, 1] and more.columns.tolist() == [2, 0]
    assert kv.lacking(np.array([0, 1]), np.array([12, 5])).tolist() == [0, 1]
    kv.check()


def test_random_grants_and_frees_lose_nothing() -> None:
    rng = np.random.default_rng(0)
    kv = KVCache(num_blocks=64, block_size=4, max_slots=8, max_blocks_per_slot=16)
    lengths = np.zeros(8, int)
    for _ in range(2000):
        slot = int(rng.integers(8))
        wanted = int(min(lengths[slot] + rng.integers(1, 9), 64))
        blocks = -(-wanted // kv.block_size) - int(kv.held[slot])
        if rng.random() < 0.3 or blocks > kv.num_free:
            kv.free(slot)
            lengths[slot] = 0
        else:
            kv.reserve(slot, 64)
            kv.grant(np.array([slot]), np.array([wanted]))
            lengths[slot] = wanted
        kv.check()
    for slot in range(8):
        kv.free(slot)
    assert kv.num_free == 64 and kv.unreserved_columns == 64


def test_check_sees_a_block_that_is_held_twice() -> None:
    kv = KVCache(num_blocks=4, block_size=4, max_slots=2, max_blocks_per_slot=2)
    kv.reserve(0, 8)
    kv.reserve(1, 8)
    kv.grant(np.array([0, 1]), np.array([4, 4]))
    kv.table[0, 1, 0] = kv.table[0, 0, 0]
    with pytest.raises(AssertionError, match="held by more or fewer"):
        kv.check()


def test_hashes_are_a_chain_over_full_blocks() -> None:
    tokens, last, expected = np.arange(23, dtype=np.int32), hashlib.blake2b(b"us", digest_size=16).digest(), []
    for start in range(0, 20, 4):
        last = hashlib.blake2b(last + tokens[start : start + 4].tobytes(), digest_size=16).digest()
        expected.append(last)
    known: list[bytes] = []
    hashes = Hashes(tokens, 4, "us", known)
    assert len(hashes) == 5 and not known
    assert hashes[1] == expected[1] and len(known) == 2, "as far as somebody looks"
    assert hashes[2:] == expected[2:] and list(hashes) == known == expected
    shorter = Hashes(tokens[:11], 4, "us", known)
    assert list(shorter) == expected[:2], "what is known of a longer sequence is not this one's"
    with pytest.raises(IndexError):
        shorter[2]


def test_a_prompt_is_hashed_and_published_as_it_is_read() -> None:
    """All at once a prompt of 128,000 tokens held up everyone for 9 ms, and each of its steps for 2."""
    batch, runner = make(max_model_len=512, num_blocks=256, max_num_tokens=16)
    batch.add(request(0, [int(token) for token in np.random.default_rng(0).integers(3, 50, 400)], max_tokens=4), seed=0)

    class Counted(dict[tuple[int, bytes], int]):
        looks = 0

        def __contains__(self, key: object) -> bool:
            self.looks += 1
            return super().__contains__(key)

    batch.kv._known._block_of = known = Counted()
    (waiting,) = batch._waiting
    for read in range(1, 26):
        step = batch.next_step()
        assert step is not None
        assert len(waiting._hashes) == len(known) == read * 4
        batch.absorb(step, runner.collect(runner.launch(step)))
    assert known.looks <= 100 + 2, "each block once, and the first one as it is admitted and as it starts"


def test_what_was_found_before_gives_what_is_found_anew() -> None:
    """Whatever is published, given and lost between two looks; in a cache that is much too small for all."""
    rng = np.random.default_rng(0)
    kv = KVCache(num_blocks=24, block_size=4, max_slots=3, max_blocks_per_slot=12)
    texts = [[bytes([text, column]) for column in range(10)] for text in range(3)]
    texts += [texts[0][:6] + texts[1][6:], texts[2][:3]]
    before: list[Match] = [Match()] * len(texts)
    kept = changed = 0
    for _ in range(3000):
        slot, text = int(rng.integers(3)), int(rng.integers(len(texts)))
        if kv.held[slot]:
            kv.free(slot)
        else:
            found = kv.match(texts[text], before[text])
            anew = kv.match(texts[text])
            assert (found.columns, found.revived, found.spared) == (anew.columns, anew.revived, anew.spared)
            assert found.columns == 0 or np.array_equal(found.blocks, anew.blocks)  # type: ignore[arg-type]
            kept += 0 < before[text].columns == found.columns
            changed += before[text].columns != found.columns
            before[text] = found
            columns = int(rng.integers(found.columns, len(texts[text]) + 1))
            if columns and columns - found.columns + found.revived <= kv.num_free:
                kv.reserve(slot, columns * 4)
                if found.columns:
                    kv.attach(slot, found)
                kv.grant(np.array([slot]), np.array([columns * 4]))
                kv.publish(slot, texts[text][:columns], first=found.columns)
        kv.check()
    assert kept > 100 and changed > 100, "both happen"


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_requests_for_which_there_is_no_room_are_not_looked_at(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a common beginning of 32,000 tokens each look took a millisecond, of 26 requests in each step."""
    batch, runner = make(policy=policy, max_batch_size=16, num_blocks=16, max_num_tokens=64)
    for number in range(12):
        batch.add(request(number, list(range(3, 24)), max_tokens=30), seed=0)
    looks = 0
    match = KVCache.match

    def counted(kv: KVCache, *args: Any) -> Match:
        nonlocal looks
        looks += 1
        return match(kv, *args)

    monkeypatch.setattr(KVCache, "match", counted)
    steps = 0
    while batch.num_active:
        step = batch.next_step()
        assert step is not None
        batch.absorb(step, runner.collect(runner.launch(step)))
        steps += batch.num_waiting > 0
    assert steps > 50 and looks < 3 * steps + 12 * 3
